"""Two compared runs in Chromium, clicked through as a reader does."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from sample_runs import CLASSES, write_run, write_worst_samples
from support.chromium import Page, open_page

from paceline.report.page import write_report

CURVE = '#curves [data-metric="loss"]'


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with open_page(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compared")
    first = write_run(folder / "first", top1={30: 0.9}, expect={"top1": 0.7}, optimizer={"lr": 0.1})
    write_worst_samples(first)
    second = write_run(folder / "second<i>", optimizer={"lr": 0.2}, expect={"top1": 0.95})
    write_report([first, second], folder / "report.html")
    return folder / "report.html"


@pytest.fixture
def page(browser: Page, compared: Path, tmp_path: Path) -> Iterator[Page]:
    """The report of both runs, without what an earlier test chose; in the end it made no request and no complaint."""
    address = (tmp_path / "report.html").as_uri()
    shutil.copy(compared, tmp_path / "report.html")
    browser.requests.clear()
    browser.problems.clear()
    browser.open(address)
    browser.wait_for(f"document.querySelector('{CURVE} path.line') !== null")
    yield browser
    browser.evaluate("new Promise(requestAnimationFrame)")
    assert browser.problems == []
    assert {each for each in browser.requests if not each.startswith("data:")} == {address}


def text(page: Page, selector: str) -> str:
    return str(page.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))


def count(page: Page, selector: str) -> int:
    return int(page.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length"))


def test_the_verdict_comes_first(page: Page) -> None:
    assert page.evaluate("document.querySelector('main > section').id") == "verdict"
    assert "first has the best top1 on val" in text(page, "#verdict")
    assert "0.9000" in text(page, "#verdict")
    rows = [row.split() for row in text(page, "#comparison tbody").splitlines()]
    assert [(row[0], row[1]) for row in rows] == [("first", "0.9000"), ("second<i>", "0.8000")]
    assert "reached" in rows[0]
    assert rows[1][4:11] == ["40", "of", "40", "0", "of", "1", "reached"]
    assert text(page, "#differences tbody").split() == ["expect.top1", "0.7", "0.95", "optimizer.lr", "0.1", "0.2"]


def test_only_what_is_comparable_is_ranked_together(browser: Page, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "first", top1={40: 0.3}), write_run(tmp_path / "longer", num_steps=80, ends=False)]
    runs.append(write_run(tmp_path / "other", task={"name": "detection"}, data={"val": {"dataset": "coco"}}))
    for metric in (runs[2] / "metrics.jsonl", runs[2] / "status.json"):
        metric.write_text(metric.read_text().replace("top1", "ap50"))
    write_report(runs, tmp_path / "report.html")
    browser.open((tmp_path / "report.html").as_uri())
    tables = browser.evaluate("[...document.querySelectorAll('#comparison table')].map((each) => each.innerText)")
    assert [[line.split()[0] for line in each.splitlines()[1:]] for each in tables] == [["longer", "first"], ["other"]]
    assert ["best top1" in tables[0], "best ap50" in tables[1], "top1" in tables[1]] == [True, True, False]
    assert "longer is killed; first trained 40 steps, not 80" in text(browser, "#comparison .unequal")
    assert count(browser, "#verdict") == 0
    titles = browser.evaluate("[...document.querySelectorAll('#curves h3')].map((each) => each.innerText)")
    assert titles == ["top1", "loss, classification", "loss, detection", "ap50"]


def test_many_runs_are_told_apart_with_all_their_keys(browser: Page, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"run-{n}", num_steps=20, optimizer={"lr": n}, train={"seed": n}) for n in range(18)]
    write_report(runs, tmp_path / "report.html")
    browser.open((tmp_path / "report.html").as_uri())
    browser.place(f"{CURVE} svg")
    browser.wait_for(f"document.querySelector('{CURVE} path.line') !== null")
    lines = browser.evaluate(
        f"[...document.querySelectorAll('{CURVE} path.line:not(.thin)')].map((each) =>"
        " getComputedStyle(each).stroke + each.getAttribute('stroke-dasharray'))"
    )
    assert len(set(lines)) == 18
    colors = browser.evaluate("report.runs.map((_, index) => runColor(index))")
    assert len(set(colors)) == 18
    rows = [row.split() for row in text(browser, "#differences table").splitlines()]
    assert rows == [["run", "optimizer.lr", "train.seed"], *([f"run-{n}", str(n), str(n)] for n in range(18))]
    assert browser.evaluate("document.querySelector('#differences .card').scrollWidth <= innerWidth")


def test_hovering_shows_the_values_there(page: Page) -> None:
    assert page.evaluate(f"document.querySelector('{CURVE} .tip').hidden")
    page.mouse("mouseMoved", page.place(f"{CURVE} svg", x=0.999))
    page.wait_for(f"!document.querySelector('{CURVE} .tip').hidden")
    lines = text(page, f"{CURVE} .tip").splitlines()
    assert lines[0] == "step 40"
    assert [line.split("\t")[:2] for line in lines[1:]] == [
        ["first · train", "0.0250"],
        ["first · val", "0.0500"],
        ["second<i> · train", "0.0250"],
        ["second<i> · val", "0.0500"],
    ]
    page.mouse("mouseMoved", page.place("h1"))
    page.wait_for(f"document.querySelector('{CURVE} .tip').hidden")


def test_controls_change_the_curves(page: Page) -> None:
    path = f"document.querySelector('{CURVE} path.line').getAttribute('d')"
    before = page.evaluate(path)
    page.click("#smoothing")
    assert text(page, ".bar output") == "0.50"
    assert page.evaluate(path) != before
    before = page.evaluate(path)
    page.click(f"{CURVE} header button")
    assert page.evaluate(f"document.querySelector('{CURVE} header button').getAttribute('aria-pressed')") == "true"
    assert page.evaluate(path) != before
    page.click("[data-axis=epoch]")
    page.mouse("mouseMoved", page.place(f"{CURVE} svg", x=0.999))
    page.wait_for(f"!document.querySelector('{CURVE} .tip').hidden")
    assert text(page, f"{CURVE} .tip").splitlines()[0] == "epoch 4"
    num_lines = count(page, f"{CURVE} path.line")
    page.click(".chip[data-run='1']")
    assert count(page, f"{CURVE} path.line") == num_lines // 2


def test_dragging_zooms_and_a_double_click_shows_all(page: Page) -> None:
    path = f"document.querySelector('{CURVE} path.line').getAttribute('d')"
    before = page.evaluate(path)
    start, end = page.place(f"{CURVE} svg", x=0.4), page.place(f"{CURVE} svg", x=0.7)
    page.mouse("mousePressed", start, button="left", clickCount=1)
    page.mouse("mouseMoved", end, button="left", buttons=1)
    page.mouse("mouseReleased", end, button="left", clickCount=1)
    assert page.evaluate(path) != before
    page.click("#unzoom")
    assert page.evaluate(path) == before


def test_each_run_has_its_details(page: Page) -> None:
    assert "34" in text(page, "#evaluations tbody")
    assert "best" in text(page, "#evaluations tr.best")
    assert count(page, "[data-confusion=val] td") == 9
    page.mouse("mouseMoved", page.place("[data-confusion=val] tr:nth-child(2) td"))
    page.wait_for("document.querySelector('[data-confusion=val] p').innerText.includes('40')")
    assert CLASSES[2] in text(page, "[data-confusion=val]")
    assert count(page, "#images img") == 2
    assert page.evaluate("[...document.images].every((each) => each.complete && each.naturalWidth > 0)")
    assert count(page, "[data-worst=val] figure") == 3
    assert count(page, "[data-worst=val] img") == 2
    worst = text(page, "[data-worst=val] figure")
    assert all(each in worst for each in ("4.500", "sample 0", "<i>dog</i>, not cat", "photos/0.jpg"))
    page.click("[data-tab='1']")
    assert count(page, "[data-worst]") == 0
    page.click("#setup summary")
    assert "0.2" in text(page, "#setup .recipe")
    assert "recipe.yaml:4:3" in text(page, "#setup .recipe")
    assert count(page, "#setup details") == 4


def test_light_dark_and_phone(page: Page) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    page.wait_for("document.documentElement.dataset.theme === 'dark'")
    dark = page.evaluate(background)
    page.click("#theme")
    assert page.evaluate(background) != dark
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
    page.call("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=2, mobile=True)
    page.wait_for("innerWidth === 390")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.call("Emulation.clearDeviceMetricsOverride")


@pytest.mark.parametrize("is_empty", [True, False])
def test_runs_that_came_to_little_are_shown(browser: Page, tmp_path: Path, is_empty: bool) -> None:
    """A run without metrics, and one whose files hold what no run wrote."""
    folder = write_run(tmp_path / "run", num_steps=0 if is_empty else 40, ends=False)
    reason = "out of memory <b>"
    if not is_empty:
        (folder / "status.json").write_text(json.dumps({"state": "failed", "step": 7, "reason": reason}))
        (folder / "logs" / "starts.jsonl").write_text('{"time": 1e300, "step": 1, "state": [], "device": {}}\n')
        line = {"step": 50, "split": "val", "constructor": 1, "__proto__": 2, "<i>": None, "loss": 1e300, "epoch": "x"}
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(f"{json.dumps(line)}\n")
    browser.problems.clear()
    write_report([folder], tmp_path / "report.html")
    browser.open((tmp_path / "report.html").as_uri())
    assert browser.problems == []
    assert count(browser, "footer") == 1
    assert (reason in text(browser, ".notice")) != is_empty
    assert ("no metrics yet" in text(browser, "main")) == is_empty


def test_the_policy_stops_what_a_page_could_load(page: Page) -> None:
    """Otherwise that nothing complained would mean nothing."""
    page.evaluate("fetch('https://example.invalid/').catch(() => 0)")
    page.evaluate("document.body.append(Object.assign(new Image(), {src: 'https://example.invalid/x.png'}))")
    page.wait_for("new Promise((done) => setTimeout(() => done(true), 100))")
    assert len([each for each in page.problems if "Content Security Policy" in each]) >= 2
    page.problems.clear()
    page.requests[:] = [each for each in page.requests if "example.invalid" not in each]


@pytest.fixture
def quick(browser: Page) -> Iterator[Page]:
    """A page whose timers run a hundred times as fast."""
    script = "const slow = setInterval; window.setInterval = (call, time) => slow(call, time / 100);"
    added = browser.call("Page.addScriptToEvaluateOnNewDocument", source=script)["identifier"]
    browser.problems.clear()
    yield browser
    browser.call("Page.removeScriptToEvaluateOnNewDocument", identifier=added)
    browser.open("about:blank")
    assert browser.problems == []


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Path]:
    """A run whose lock is held."""
    folder = write_run(tmp_path / "run", ends=False)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def add_evaluation(folder: Path) -> None:
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 50, "epoch": 5, "split": "val", "top1": 0.9625, "num_samples": 3}\n')


def test_a_file_is_loaded_again_while_its_run_is_running_and_not_after(quick: Page, running: Path) -> None:
    page = running / "report.html"
    write_report([running], page)
    quick.open(page.as_uri())
    assert "0.8000" in text(quick, "#verdict")
    add_evaluation(running)
    status = json.loads((running / "status.json").read_text())
    (running / "status.json").write_text(json.dumps(status | {"state": "finished"}))
    write_report([running], page)
    quick.wait_for("document.querySelector('#verdict')?.innerText.includes('0.9625')")
    quick.evaluate("new Promise((done) => setTimeout(done, 500))")
    assert quick.evaluate("performance.getEntriesByType('navigation')[0].type") == "reload"
    quick.evaluate("window.isStill = true")
    quick.evaluate("new Promise((done) => setTimeout(done, 500))")
    assert quick.evaluate("window.isStill")
