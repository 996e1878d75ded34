"""The release checklist finds what is wrong, and the workflow runs what the package promises."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from scripts.release import QUICK, NotReadyError, benchmarks, changelog, clean_main, one_version, walk

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    """A small checkout for which every quick point of the checklist holds."""
    files = {
        "pyproject.toml": '[project]\nversion = "1.2.3"\n',
        "src/paceline/__init__.py": '__version__ = "1.2.3"\n',
        "CITATION.cff": "version: 1.2.3\n",
        "CHANGELOG.md": "# Changelog\n\n## Unreleased\n\n## 1.2.3 (2026-12-01)\n\n### Highlights\n- Faster.\n",
        "docs/benchmarks.json": '{"machine": "paceline 1.2.3, torch"}\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    commit(tmp_path)
    return tmp_path


def commit(root: Path) -> None:
    author = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for words in (("init", "-q", "-b", "main"), ("add", "-A"), (*author, "commit", "-q", "--allow-empty", "-m", "all")):
        subprocess.run(["git", *words], cwd=root, check=True)


def test_a_checkout_that_is_ready_passes(ready: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert walk(ready, QUICK) == 0
    assert capsys.readouterr().out.count("  ok ") == len(QUICK)


@pytest.mark.parametrize(
    ("name", "old", "new", "point", "found"),
    [
        ("CITATION.cff", "1.2.3", "1.2.2", one_version, "CITATION.cff has 1.2.2; pyproject.toml has 1.2.3"),
        ("CHANGELOG.md", "## Unreleased\n", "## Unreleased\n- New.\n", changelog, "Unreleased"),
        ("CHANGELOG.md", " (2026-12-01)", "", changelog, 'no section "## 1.2.3 (YYYY-MM-DD)"'),
        ("CHANGELOG.md", "### Highlights\n", "", changelog, "Highlights"),
        ("docs/benchmarks.json", "1.2.3", "1.2.2", benchmarks, "make bench"),
    ],
)
def test_what_is_wrong_is_named(ready: Path, name: str, old: str, new: str, point: object, found: str) -> None:
    text = (ready / name).read_text()
    assert old in text
    (ready / name).write_text(text.replace(old, new))
    commit(ready)
    assert callable(point)
    with pytest.raises(NotReadyError, match=re.escape(found)):
        point(ready)
    assert walk(ready, QUICK) == 1


def test_uncommitted_changes_other_branches_and_old_tags_are_refused(ready: Path) -> None:
    (ready / "new.txt").write_text("")
    with pytest.raises(NotReadyError, match="not committed"):
        clean_main(ready)
    commit(ready)
    subprocess.run(["git", "tag", "v1.2.3"], cwd=ready, check=True)
    with pytest.raises(NotReadyError, match="tagged already"):
        clean_main(ready)
    subprocess.run(["git", "checkout", "-q", "-b", "other"], cwd=ready, check=True)
    with pytest.raises(NotReadyError, match="releases are cut from main"):
        clean_main(ready)


def test_public_ci_runs_the_commands_of_the_makefile_on_every_python_of_the_package() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    stated = [text.rpartition(" ")[2] for text in project["classifiers"] if "Python :: 3." in text]
    assert workflow["jobs"]["tests"]["strategy"]["matrix"]["python"] == stated
    runs = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    for run in runs:
        words = [word for word in run.split() if word not in {"sudo", "--preserve-env"}]
        dry_run = subprocess.run([*words, "--dry-run"], cwd=ROOT, capture_output=True, text=True)
        assert (words[0], dry_run.returncode) == ("make", 0), dry_run.stderr


def test_the_templates_are_forms() -> None:
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        if path.stem != "config":
            assert {"name", "description", "body"} <= form.keys()
            assert all(part["attributes"]["label"] for part in form["body"])
