"""All pages: the site builds without a network, every block is checked or marked as output, translations keep step.

Every fenced block has one of these languages:

| language | checked |
|---|---|
| `console`, `bash` | commands: arguments parse, the recipe is valid with its overrides, make targets exist |
| `yaml` | a valid recipe, or a valid part of one |
| `json` | parses; the configuration that `paceline convert` reads |
| `python` | compiles |
| `text` | output, or a sketch: not checked |

Pages in RUN are run for real besides, by the test that is named there.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from urllib.parse import unquote

import pytest
from support import pages
from support.chromium import open_page
from support.pages import PAGES, ROOT, Block, blocks, check_command, check_recipe, commands, name_of, without_comments

from paceline import cli
from paceline.core.errors import RecipeError
from paceline.recipe.load import load
from paceline.recipe.validate import validate
from scripts import docs_site
from scripts.docs_site import build

LANGUAGES = {"console", "bash", "yaml", "json", "python", "text"}
RUN = {
    "README.md": "tests/test_readme.py",
    "docs/data.md": "tests/test_data_docs.py",
    "docs/eject.md": "tests/test_eject_docs.py",
    "docs/extending.md": "tests/test_extending_docs.py",
    "docs/python.md": "tests/test_python_docs.py",
    "docs/tutorial.md": "tests/test_tutorial.py",
    "docs/saliency.md": "tests/test_task_docs.py",
    "docs/segmentation.md": "tests/test_task_docs.py",
    "docs/video.md": "tests/test_task_docs.py",
    "docs/learning.md": "tests/test_run_docs.py",
    "docs/predict.md": "tests/test_run_docs.py",
    "docs/export.md": "tests/test_run_docs.py",
    "docs/report.md": "tests/report/test_report_docs.py",
    "docs/sweep.md": "tests/test_sweep_docs.py",
    "docs/install.md": "tests/test_sweep_docs.py",
    "docs/plan.md": "tests/test_plan_docs.py",
    "docs/coming-from/pet.md": "tests/convert/test_foreign_config.py",
    "docs/coming-from/dali-json.md": "tests/convert/test_foreign_config.py",
    "docs/coming-from/ultralytics.md": "tests/convert/test_yolo_data.py",
}
"""Pages whose commands or code a test runs for real."""
OWN_RECIPES = {"docs/data.md", "docs/extending.md", "docs/zh/data.md", "docs/zh/extending.md"}
"""Pages whose recipes only those tests can check: without a model, or with parts that the page registers."""
TRANSLATED = {
    "README.zh-CN.md": "README.md",
    **{f"docs/zh/{page.name}": f"docs/{page.name}" for page in PAGES if page.parent == ROOT / "docs/zh"},
}
TRANSLATIONS = {name for name in TRANSLATED if name in map(name_of, PAGES)}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; building fails on a broken link, a wrong anchor, and a page that is not in the navigation."""
    out = tmp_path_factory.mktemp("site")
    assert len(build(out)) == len(PAGES)
    return out


def test_no_page_of_the_site_asks_another_machine_for_anything(site: Path) -> None:
    written = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert len(written) > len(PAGES)
    for path in written:
        text = path.read_text(encoding="utf-8")
        assert re.findall(r"""(?:src=|@import|url\()\s*["']?(?:https?:)?//""", text) == [], path
        assert re.findall(r'<link[^>]*href="(?:https?:)?//', text) == [], path


def test_every_link_of_the_built_site_leads_to_a_file_of_it(site: Path) -> None:
    for path in site.rglob("*.html"):
        for target in re.findall(r'(?:href|src)="([^"#]+)', path.read_text(encoding="utf-8")):
            if not target.startswith(("http", "mailto:")):
                assert (path.parent / target).is_file(), f"{path}: {target}"


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("[gone](b.md)", "docs/a.md: b.md: no such file"),
        ("[gone](#there)", "docs/a.md: #there: no such heading"),
        ("[gone](../README.md#there)", "docs/a.md: ../README.md#there: no such heading"),
        ("![gone](a.png)", "docs/a.md: a.png: no such file"),
        ("[secret](../../outside.md)", "docs/a.md: ../../outside.md: no such file"),
    ],
)
def test_broken_links_fail_the_build(
    wrong: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outside.md").write_text("# Outside\n")
    root = tmp_path / "repository"
    (root / "docs/site").mkdir(parents=True)
    (root / "README.md").write_text("# Here\n\n[a](docs/a.md#a-page)\n")
    (root / "docs/a.md").write_text(f"# A *page*\n\n{wrong}\n")
    (root / "docs/new.md").write_text("# New\n")
    (root / "docs/site/navigation.yaml").write_text("en: {Start: [README.md, docs/a.md, docs/a.md, docs/old.md]}\n")
    monkeypatch.setattr(docs_site, "ROOT", root)
    with pytest.raises(docs_site.SiteError) as caught:
        build(tmp_path / "site")
    assert str(caught.value).splitlines() == [
        expected,
        "docs/site/navigation.yaml: docs/new.md is missing",
        "docs/site/navigation.yaml: docs/old.md does not exist",
        "docs/site/navigation.yaml: docs/a.md is there twice",
    ]
    assert not (tmp_path / "site").exists()


def test_every_word_of_every_section_is_in_the_index(site: Path) -> None:
    script = (site / "sections.js").read_text(encoding="utf-8")
    found = json.loads(script.removeprefix("const SECTIONS = ").removesuffix(";\n"))
    assert {each["language"] for each in found} == {"en", "zh", "any"}
    by_address = {each["address"]: each for each in found}
    glossary = by_address["glossary.html#glossary"]
    assert (glossary["page"], glossary["heading"], glossary["language"]) == ("Glossary", "Glossary", "any")
    section = by_address["zh/tutorial.html#两个进程"]
    assert section["language"] == "zh"
    assert "data.batch_size 是全局 batch size" in section["text"]  # a sentence without its marks
    assert "paceline eval runs/two --procs 2" in section["text"]  # a block
    assert "断点续训" not in section["text"]  # the next heading


def test_a_reader_finds_a_word_in_chromium(site: Path, tmp_path: Path) -> None:
    """Searched by typing in both languages; a result leads to its section; no error, and nothing from outside."""
    with open_page(tmp_path / "profile") as page:
        for start, typed, expected in (
            ("index.html", "gomp_spincount threads", "/processes.html#shared-machines"),
            ("zh/index.html", "忙等", "/zh/processes.html#共用的机器"),
        ):
            page.open((site / start).as_uri())
            page.click("#search")
            page.call("Input.insertText", text=typed)
            page.wait_for("document.querySelector('#found a') !== null")
            hits = page.evaluate("[...document.querySelectorAll('#found a')].map((each) => each.href)")
            assert any(unquote(hit).endswith(expected) for hit in hits), hits
            shown = page.evaluate("document.querySelector('#found p').innerText.toLowerCase()")
            assert typed.split()[0] in shown
            page.click("#found a")
            page.wait_for(f"location.href === {json.dumps(hits[0])}")
            page.wait_for("document.readyState === 'complete' && document.getElementById('found').hidden")
            assert page.evaluate("document.getElementById(decodeURIComponent(location.hash.slice(1))) !== null")
        page.click("#search")
        page.call("Input.insertText", text="xyzzy")
        page.wait_for("document.querySelector('#found a') === null && !document.getElementById('found').hidden")
        assert page.problems == []
        assert {each for each in page.requests if not each.startswith(site.as_uri())} == set()
        assert len(page.requests) > 4


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_are_valid(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = blocks(page)
    assert [str(block) for block in found if block.language not in LANGUAGES] == []
    for block in found:
        if block.file:
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
    for block in found:
        try:
            _check(block, tmp_path)
        except BaseException as error:
            raise AssertionError(f"{block}: {error}") from error


def _check(block: Block, folder: Path) -> None:
    if block.language in ("console", "bash"):
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        for words in commands(block):
            check_command(words, folder, makefile)
    elif block.language == "yaml" and name_of(block.page) not in OWN_RECIPES:
        if not (block.file or "").endswith(".yml"):  # a file of another program
            check_recipe(block, folder)
    elif block.language == "json":
        json.loads(block.text)
    elif block.language == "python":
        compile(block.text, str(block), "exec")


def test_pages_with_python_are_run_for_real() -> None:
    with_python = {name_of(page) for page in PAGES if any(block.language == "python" for block in blocks(page))}
    assert with_python - TRANSLATIONS - RUN.keys() == set()
    for page, test in RUN.items():
        assert (ROOT / test).is_file() or not (ROOT / page).is_file()


@pytest.mark.parametrize("name", sorted(TRANSLATIONS))
def test_translations_keep_step(name: str) -> None:
    """The same headings by number and level, the same results, and the same blocks but for comments."""
    theirs, ours = ROOT / name, ROOT / TRANSLATED[name]
    assert _levels(theirs) == _levels(ours)
    assert len(blocks(theirs)) == len(blocks(ours))
    for translated, block in zip(blocks(theirs), blocks(ours), strict=True):
        assert translated.language == block.language, translated
        assert translated.file == block.file, translated
        if block.language != "text":
            assert without_comments(translated.text) == without_comments(block.text), translated
    results = [sorted(re.findall(r"\b\d\.\d{2,}", page.read_text(encoding="utf-8"))) for page in (theirs, ours)]
    assert results[0] == results[1]
    tables = [len(re.findall(r"^\|", page.read_text(encoding="utf-8"), flags=re.MULTILINE)) for page in (theirs, ours)]
    assert tables[0] == tables[1]


def _levels(page: Path) -> list[str]:
    text = pages.FENCE.sub("", page.read_text(encoding="utf-8"))
    return re.findall(r"^(#+) ", text, flags=re.MULTILINE)


def test_every_how_to_page_is_translated() -> None:
    sections = docs_site.navigation()["en"]
    how_to = [page for name in ("Start", "Tasks", "Run and look", "Your own code") for page in sections[name]]
    assert set(how_to) - set(TRANSLATED.values()) == {"docs/recipe-reference.md"}  # generated, in English


SECTIONS = "model|data|losses|optimizer|schedule|train|evaluate|checkpoint|logging|task"
MIGRATIONS = [page for page in PAGES if page.parent.name == "coming-from" and page.stem != "README"]


@pytest.mark.parametrize("page", MIGRATIONS, ids=lambda page: page.stem)
def test_the_right_column_of_a_migration_table_is_valid(page: Path, tmp_path: Path) -> None:
    """Each `section: {…}` and `{name: …}` beside the page's own recipe, and the words of each command."""
    recipe = tmp_path / "whole.yaml"
    recipe.write_text([block.text for block in blocks(page) if block.language == "yaml"][-1], encoding="utf-8")
    rows = re.findall(r"^\|.*\| ([^|]*) \|$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = [code for row in rows for code in re.findall(r"`([^`]+)`", row) if "…" not in code]
    sections = [code for code in found if re.match(rf"({SECTIONS})(\.\w+)?: ", code)]
    transforms = [code for code in found if code.startswith("{name: ")]
    assert len(sections) >= 8
    parts = [re.sub(r"^data\.(train|val|test): (.*)$", r"data: {\1: \2}", code) for code in sections]
    for part in [*parts, *(f"data: {{train: {{transforms: [{code}]}}}}" for code in transforms)]:
        (tmp_path / "part.yaml").write_text(f"extends: whole.yaml\nname: part\n{part}\n", encoding="utf-8")
        try:
            validate(load(str(tmp_path / "part.yaml")))
        except RecipeError as error:  # a part may lack a key that it has beside others, or exclude one of the whole
            wrong = [each for each in error.problems if not re.search("required, but missing|incompatible with", each)]
            assert wrong == [], part
    for code in found:
        if re.match(r"paceline [\w-]+ ", code):
            cli._parse(re.sub(r"\bN\b", "2", code).split()[1:])


def test_make_docs_builds_the_site() -> None:
    dry_run = subprocess.run(["make", "-n", "docs"], cwd=ROOT, capture_output=True, text=True)
    assert dry_run.returncode == 0
    assert "scripts/docs_site.py" in dry_run.stdout


@pytest.mark.parametrize("name", ["docs/guarantees.md", "docs/reliability.md"])
def test_every_promise_has_its_test(name: str) -> None:
    promises = re.findall(
        r"^\| [^|]+ \| (`tests/[^|]*) \|$", (ROOT / name).read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert len(promises) >= 20
    for path in (path for row in promises for path in re.findall(r"`([^`]+)`", row)):
        assert (ROOT / path).exists(), path
