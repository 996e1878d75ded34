"""The page stands alone, and no text of a run becomes markup."""

from __future__ import annotations

import json
import re
from pathlib import Path

from page_elements import Elements
from sample_runs import write_run

from paceline.report.page import write_report

HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)"><!-- \u2028 {{data}} {{script}} &amp; 京'


def test_the_page_refers_to_nothing_outside(tmp_path: Path) -> None:
    write_report([write_run(tmp_path / "run")], tmp_path / "deep" / "report.html")
    page = (tmp_path / "deep" / "report.html").read_text(encoding="utf-8")
    elements = Elements(page)
    assert [tag for tag, _ in elements.found].count("script") == 2
    linked = [value for _, each in elements.found for name, value in each.items() if name in ("src", "href")]
    assert linked == ["data:,"]
    assert not re.search(r"@import|url\(|https?://(?!www\.w3\.org/2000/svg)", page)
    (policy,) = [each["content"] for _, each in elements.found if each.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'sha256-")
    assert "unsafe" not in policy
    assert "connect-src" not in policy


def test_text_of_a_run_stays_text(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    recipe = (folder / "recipe.yaml").read_text(encoding="utf-8")
    (folder / "recipe.yaml").write_text(recipe.replace('"run"', json.dumps(HOSTILE)), encoding="utf-8")
    (folder / "status.json").write_text(json.dumps({"state": HOSTILE, "reason": HOSTILE + "\udc80"}))
    write_report([folder], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    elements = Elements(page)
    assert [tag for tag, _ in elements.found].count("script") == 2
    assert "img" not in [tag for tag, _ in elements.found]
    (run,) = json.loads(elements.data)["runs"]
    assert (run["name"], run["state"], run["reason"]) == (HOSTILE, HOSTILE, HOSTILE + "\udc80")
    assert elements.title.strip() == HOSTILE


def test_a_run_of_many_steps_makes_a_small_page(tmp_path: Path) -> None:
    write_report(
        [write_run(tmp_path / "run", num_steps=6000, log_every=1, evaluate_every=1500)], tmp_path / "report.html"
    )
    elements = Elements((tmp_path / "report.html").read_text(encoding="utf-8"))
    (run,) = json.loads(elements.data)["runs"]
    assert max(len(each["x"]) for each in run["series"]) <= 1003
    assert (tmp_path / "report.html").stat().st_size < 500_000
