"""Tables of results: real files, changed by several real processes, with what people put into them."""

from __future__ import annotations

import csv
import io
import json
import math
import multiprocessing
import os
import resource
import signal
import stat
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openpyxl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openpyxl.cell.rich_text import CellRichText, TextBlock
from openpyxl.cell.text import InlineFont
from openpyxl.comments import Comment
from openpyxl.styles import Font, PatternFill

from paceline.core.errors import DataError, UsageError
from paceline.loggers.events import Ended, Evaluated, LoggerGroup, Started
from paceline.loggers.files import StatusFile
from paceline.loggers.jsonl import JsonlLogger
from paceline.loggers.results import About, ResultsRow, Value, read_results, update_rows, write_results

ABOUT = About("small", "classification", "convnet")
BOTH = pytest.mark.parametrize("name", ["table.csv", "table.xlsx"])


def row(directory: str, **values: Value) -> dict[str, Value]:
    return {"run": "small", "directory": directory, "split": "val", **values}


def cells(path: Path) -> list[list[Any]]:
    if path.suffix == ".csv":
        return list(csv.reader(io.StringIO(path.read_text(encoding="utf-8-sig"), newline="")))
    return [list(each) for each in openpyxl.load_workbook(path).worksheets[0].iter_rows(values_only=True)]


@BOTH
def test_a_row_is_made_found_again_and_replaced(tmp_path: Path, name: str) -> None:
    path = tmp_path / "deep" / name
    update_rows(path, [row("runs/a", top1=0.5), row("runs/b", top1=0.25)])
    update_rows(path, [row("runs/a", top1=0.75, f1=0.125)])
    update_rows(path, [row("runs/a", top1=0.875) | {"split": "test"}])
    header, *rows = cells(path)
    assert header == ["run", "directory", "split", "top1", "f1"]
    assert [each[1:3] for each in rows] == [["runs/a", "val"], ["runs/b", "val"], ["runs/a", "test"]]
    assert [float(each[3]) for each in rows] == [0.75, 0.25, 0.875]
    assert [each[4] or None for each in rows] == ["0.125" if name.endswith("csv") else 0.125, None, None]
    assert [each.name for each in path.parent.iterdir()] == [name]


def test_a_row_that_says_the_same_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    values = row("runs/a", top1=0.1 + 0.2, step=3, epoch=1.0, loss=math.nan)
    update_rows(path, [values])
    before = path.stat()
    update_rows(path, [values])
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_csv_numbers_come_back_bit_for_bit(tmp_path: Path) -> None:
    path, loss = tmp_path / "table.csv", 1.2655001971265616
    update_rows(path, [row("a", loss=loss, tiny=5e-324, steps=12, bad=None, worse=-math.inf)])
    found = dict(zip(*cells(path), strict=True))
    assert float(found["loss"]) == loss
    assert float(found["tiny"]) == 5e-324
    assert (found["steps"], found["bad"], found["worse"]) == ("12", "nan", "nan")


def test_csv_stays_as_its_author_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(
        b'\xef\xbb\xbfnotes;directory;split;top1\r\n"good; ""really""\nso";a;val;0.5\r\n'
        b";b;val;0,25;a stray cell\r\nmean;;;0.4\r\n"
    )
    update_rows(path, [row("a", top1=0.75, f1=0.5), row("c", top1=1.0)])
    assert path.read_bytes().decode() == (
        "\ufeffnotes;directory;split;top1;;run;f1\r\n"
        '"good; ""really""\nso";a;val;0.75;;small;0.5\r\n'
        ";b;val;0,25;a stray cell;;\r\n"
        "mean;;;0.4;;;\r\n"
        ";c;val;1.0;;small;\r\n"
    )


@given(
    st.lists(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5), max_size=4)),
    st.sampled_from([",", ";", "\t"]),
)
@settings(max_examples=60, deadline=None)
def test_csv_keeps_every_cell_of_other_rows(others: list[list[str]], delimiter: str) -> None:
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, delimiter=delimiter, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerows([["split", "directory", "x"], *others])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "table.csv")
        path.write_bytes(stream.getvalue().encode())
        update_rows(path, [{"directory": "never there", "split": "val", "new": 0.5}])
        rows = list(csv.reader(io.StringIO(path.read_bytes().decode(), newline=""), delimiter=delimiter))
    while others and not any(others[-1]):
        others.pop()
    assert len(rows) == len(others) + 2
    for before, now in zip(others, rows[1:], strict=False):
        assert now[: len(before)] == before
        assert not any(now[len(before) :])
    assert rows[-1][rows[0].index("new")] == "0.5"


def hand_made(path: Path) -> None:
    book = openpyxl.Workbook()
    book.active.title = "about"
    sheet = book.create_sheet("ours")
    for line in (["directory", "notes", "split", "top1"], ["a", "look", "val", 0.5], ["b", "=D2*2", "val", 0.25]):
        sheet.append(line)
    sheet["D2"].fill, sheet["D2"].number_format = PatternFill("solid", fgColor="FFFFEE00"), "0.0%"
    sheet["D1"].font = Font(italic=True, bold=True)
    sheet["B2"].comment = Comment("why?", "me")
    sheet["B2"].value = CellRichText("look ", TextBlock(InlineFont(b=True), "here"))
    sheet.column_dimensions["B"].width = 41.0
    sheet["B9"], sheet["D9"] = "mean", "=AVERAGE(D2:D3)"
    book["about"]["A1"] = "other things"
    book.save(path)


def test_xlsx_keeps_what_people_made(tmp_path: Path) -> None:
    path = tmp_path / "table.xlsx"
    hand_made(path)
    update_rows(path, [row("a", top1=0.75, f1=0.5), row("c", top1=1.0)])
    book = openpyxl.load_workbook(path, rich_text=True)
    assert (book.sheetnames, book["about"]["A1"].value) == (["about", "ours"], "other things")
    sheet = book["ours"]
    assert [cell.value for cell in sheet[1]] == ["directory", "notes", "split", "top1", "run", "f1"]
    assert [cell.value for cell in sheet[3]][:4] == ["b", "=D2*2", "val", 0.25]
    assert (sheet["B9"].value, sheet["D9"].value) == ("mean", "=AVERAGE(D2:D3)")
    assert [cell.value for cell in sheet[10]] == ["c", None, "val", 1, "small", None]
    assert (sheet["D2"].value, sheet["D2"].number_format, sheet["D2"].fill.fgColor.rgb) == (0.75, "0.0%", "FFFFEE00")
    assert sheet["B2"].comment.text == "why?"
    assert sheet["B2"].value[1].font.b
    assert sheet.column_dimensions["B"].width == 41.0


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "=HYPERLINK(1)", "#N/A", "12", "a\x07b"])
def test_xlsx_text_is_never_a_formula_nor_a_number(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.xlsx"
    update_rows(path, [row(text, note=text)])
    update_rows(path, [row(text, note=text, top1=0.5)])
    sheet = openpyxl.load_workbook(path).active
    assert sheet.max_row == 2
    for cell in (sheet["B2"], sheet["D2"]):
        assert (cell.value, cell.data_type) == (text.replace("\x07", "\\x07"), "s")
        assert bool(cell.quotePrefix) == text.startswith(("=", "+", "-", "@"))
    assert sheet["E2"].data_type == "n"


@pytest.mark.parametrize("text", ["=1+1", "+a", "-1", "@SUM(A1)", "=HYPERLINK(1)", "'=1"])
def test_csv_text_is_never_a_formula(tmp_path: Path, text: str) -> None:
    """Neither in a row nor as the name of a column; and the row is found again."""
    path = tmp_path / "table.csv"
    values: dict[str, str | int | float | None] = {"directory": text, "split": "val", text: -0.5}
    update_rows(path, [values])
    update_rows(path, [{**values, text: -0.25}])
    header, *rows = cells(path)
    expected = text if text == "-1" else f"'{text}"
    assert header == ["directory", "split", expected]
    assert rows == [[expected, "val", "-0.25"]]


def write_two_rows(path: Path, number: int, go: Any) -> None:
    go.wait()
    for split in ("val", "test"):
        update_rows(path, [{"directory": str(number), "split": split, "metric": 0.5, f"own{number}": 1}])


@BOTH
def test_rows_of_processes_that_end_together_are_all_there(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    update_rows(path, [row("earlier", metric=1.5)])
    fork = multiprocessing.get_context("fork")
    go = fork.Event()
    writers = [fork.Process(target=write_two_rows, args=(path, number, go), daemon=True) for number in range(8)]
    for writer in writers:
        writer.start()
    go.set()
    for writer in writers:
        writer.join(timeout=60)
    assert [writer.exitcode for writer in writers] == [0] * 8
    header, *rows = cells(path)
    assert sorted(tuple(each[1:3]) for each in rows) == sorted(
        [("earlier", "val"), *((str(number), split) for number in range(8) for split in ("val", "test"))]
    )
    for each in rows[1:]:
        assert float(each[header.index(f"own{each[1]}")]) == 1
    assert list(tmp_path.iterdir()) == [path]


def be_killed_at(moment: str, path: Path) -> None:
    setattr(os, moment, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    update_rows(path, [row("a", top1=1.0)])


@BOTH
@pytest.mark.parametrize("moment", ["write", "fsync", "replace"])
def test_a_kill_in_the_middle_leaves_the_old_file(tmp_path: Path, name: str, moment: str) -> None:
    path = tmp_path / name
    update_rows(path, [row("a", top1=0.5)])
    before = path.read_bytes()
    killed = multiprocessing.get_context("fork").Process(target=be_killed_at, args=(moment, path), daemon=True)
    killed.start()
    killed.join(timeout=60)
    assert killed.exitcode == -signal.SIGKILL
    assert path.read_bytes() == before
    update_rows(path, [row("a", top1=0.75)])
    assert float(cells(path)[1][3]) == 0.75
    assert list(tmp_path.iterdir()) == [path]


@BOTH
def test_a_full_disk_leaves_the_old_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    update_rows(path, [row("a", top1=0.5)])
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(DataError, match=f"{name}: cannot be written: File too large"):
            update_rows(path, [row("a", top1=1.0)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def packed(**changes: bytes | None) -> bytes:
    """A sound workbook with some parts added or replaced."""
    sound, stream = io.BytesIO(), io.BytesIO()
    book = openpyxl.Workbook()
    book.active.append(["directory", "split", "top1"])
    book.active.append(["a", "val", 0.5])
    book.save(sound)
    with zipfile.ZipFile(sound) as old, zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as new:
        for name, content in {**{name: old.read(name) for name in old.namelist()}, **changes}.items():
            if content is not None:
                new.writestr(name, content)
    return stream.getvalue()


def sheet_with(text: str, before: str = "</sheetData>") -> bytes:
    sheet = zipfile.ZipFile(io.BytesIO(packed())).read("xl/worksheets/sheet1.xml").decode()
    assert before in sheet
    return packed(**{"xl/worksheets/sheet1.xml": sheet.replace(before, text).encode()})


def other_workbook() -> bytes:
    stream = io.BytesIO()
    book = openpyxl.Workbook()
    book.active.append(["city", "inhabitants"])
    book.save(stream)
    return stream.getvalue()


def spoiled() -> bytes:
    """A workbook in whose sheet one byte is another."""
    content = packed()
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        part = archive.getinfo("xl/worksheets/sheet1.xml")
    place = part.header_offset + 30 + len(part.filename) + part.compress_size // 2
    return content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :]


REFUSED: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "noise": ("t.xlsx", lambda: bytes(range(256)) * 9, "not a complete XLSX"),
    "a password": ("t.xlsx", lambda: bytes.fromhex("d0cf11e0a1b11ae1") + bytes(600), "password-protected"),
    "cut short": ("t.xlsx", lambda: packed()[:-300], "not a complete XLSX"),
    "a flipped bit": ("t.xlsx", spoiled, "damaged"),
    "torn xml": ("t.xlsx", lambda: packed(**{"xl/workbook.xml": b"<workbook><sheets>"}), "damaged"),
    "no workbook": ("t.xlsx", lambda: packed(**{"xl/workbook.xml": None}), "damaged"),
    "a cell far away": (
        "t.xlsx",
        lambda: sheet_with('<row r="1048576"><c r="XFD1048576"><v>1</v></c></row></sheetData>'),
        "1,048,576 rows and 16,384 columns",
    ),
    "a slicer": ("t.xlsx", lambda: packed(**{"xl/slicers/slicer1.xml": b"<a/>"}), "would lose content.*slicer1"),
    "an extension": (
        "t.xlsx", lambda: sheet_with('</sheetData><extLst><ext uri="{1}"/></extLst>'), "would lose content",
    ),
    "a key cell merged": (
        "t.xlsx",
        lambda: sheet_with('</sheetData><mergeCells count="1"><mergeCell ref="A1:A3"/></mergeCells>'),
        "MergedCell",
    ),
    "another table": ("t.xlsx", other_workbook, "not a results table"),
    "another CSV": ("t.csv", lambda: b"city,inhabitants\nUlm,128000\n", 'its first line, "city,inhabitants", lacks'),
    "Latin-1": ("t.csv", lambda: "directory,split\nÄpfel,val\n".encode("latin-1"), r"not UTF-8 text \(byte 16\)"),
    "an open quote": ("t.csv", lambda: b'directory,split,top1\na,val,"0.5\n', "cannot be read as CSV"),
    "an endless cell": ("t.csv", lambda: b"directory,split\n" + b"x" * (1 << 18), "cannot be read as CSV"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_damaged_or_foreign_is_refused_by_name_and_left_alone(tmp_path: Path, case: str) -> None:
    name, make, messages = REFUSED[case]
    path, content = tmp_path / name, make()
    path.write_bytes(content)
    with pytest.raises(DataError, match=messages) as refused:
        update_rows(path, [row("a", top1=1.0), row("b", top1=1.0)])
    assert str(refused.value).startswith(str(path))
    assert len(str(refused.value).splitlines()) == 1
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    os.mkfifo(tmp_path / "pipe.csv")
    for name in ("folder.csv", "pipe.csv"):
        with pytest.raises(DataError, match=f"{name}: .* not a file"):
            update_rows(tmp_path / name, [row("a")])
    with pytest.raises(UsageError, match=r"table.ods: expected a file with the extension .csv or .xlsx"):
        update_rows(tmp_path / "table.ods", [row("a")])
    assert sorted(each.name for each in tmp_path.iterdir()) == ["folder.csv", "pipe.csv"]


@BOTH
def test_what_is_read_only_is_left_alone_and_other_modes_stay(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    update_rows(path, [row("a", top1=0.5)])
    before = path.read_bytes()
    path.chmod(0o444)
    with pytest.raises(DataError, match="is read-only"):
        update_rows(path, [row("a", top1=1.0)])
    assert path.read_bytes() == before
    path.chmod(0o660)
    update_rows(path, [row("a", top1=1.0)])
    assert stat.S_IMODE(path.stat().st_mode) == 0o660


def test_a_link_to_a_table_stays_one(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    link = tmp_path / "table.csv"
    link.symlink_to(Path("shared", "all.csv"))
    update_rows(link, [row("a", top1=0.5)])
    update_rows(link, [row("b", top1=0.5)])
    assert link.is_symlink()
    assert len(cells(tmp_path / "shared" / "all.csv")) == 3


def measured(folder: Path, *events: Evaluated, state: str = "finished", **more: Any) -> LoggerGroup:
    """A run directory as training leaves it, written by what writes it then."""
    folder.mkdir(parents=True, exist_ok=True)
    sinks: list[Any] = [StatusFile(folder / "status.json", 8), JsonlLogger(folder / "metrics.jsonl")]
    logger = LoggerGroup([*sinks, *more.get("sinks", [])])
    logger.emit(Started("small", folder, "cpu", 1, 8, 4))
    for event in events:
        logger.emit(event)
    logger.emit(Ended(state, events[-1].step, events[-1].epoch))
    logger.close()
    return logger


def evaluated(step: int, split: str = "val", **metrics: float) -> Evaluated:
    return Evaluated(step, step / 4, split, metrics, 20, 1)


def test_results_are_the_last_of_each_split_or_those_of_the_best_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    measured(run, evaluated(4, top1=0.75), evaluated(8, top1=0.5, loss=math.inf), evaluated(8, "test", top1=0.25))
    val, test = read_results(run, ABOUT)
    assert (val.split, val.state, val.step, val.epoch, val.num_samples, val.num_skipped) == (
        "val", "finished", 8, 2.0, 20, 1,
    )  # fmt: skip
    assert (val.metrics, test.metrics) == ({"top1": 0.5, "loss": None}, {"top1": 0.25})
    assert read_results(run, ABOUT, best=True) == []
    (run / "best").symlink_to(Path("checkpoints", "step-00000004"))
    assert [(each.split, each.step, each.metrics) for each in read_results(run, ABOUT, best=True)] == [
        ("val", 4, {"top1": 0.75})
    ]


def test_a_metric_cannot_replace_what_tells_a_row_from_others(tmp_path: Path) -> None:
    record = {"step": 4, "epoch": 1.0, "split": "val", "run": 3.0, "directory": 4.0, "top1": 0.5, "words": "no"}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    write_results(tmp_path / "table.csv", read_results(tmp_path / "run", ABOUT))
    header, only = cells(tmp_path / "table.csv")
    found = dict(zip(header, only, strict=True))
    assert (found["run"], found["directory"], found["top1"], found["state"]) == ("small", "run", "0.5", "unknown")
    assert "words" not in found


def test_directories_are_distinguished_from_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(tmp_path / "runs" / "a", evaluated(4, top1=0.5))
    table = tmp_path / "tables" / "all.csv"
    for place, folder in ((tmp_path, Path("runs/a")), (tmp_path / "runs", Path("a")), (Path("/"), tmp_path / "runs/a")):
        monkeypatch.chdir(place)
        write_results(table, read_results(folder, ABOUT))
    assert [each[1] for each in cells(table)] == ["directory", "../runs/a"]


@BOTH
def test_a_run_updates_its_row_when_it_is_finished_and_when_it_went_on(tmp_path: Path, name: str) -> None:
    run, table = tmp_path / "runs" / "a", tmp_path / name
    messages: list[str] = []
    sink = ResultsRow(table, run, ABOUT, messages.append)
    measured(run, evaluated(4, top1=0.25), state="stopped", sinks=[sink])
    assert not table.exists()
    measured(run, evaluated(8, top1=0.5), sinks=[sink])
    measured(run, evaluated(12, "test", top1=0.75), sinks=[sink])  # val was measured before it was stopped
    header, *rows = cells(table)
    assert [(each[2], int(each[header.index("step")]), float(each[header.index("top1")])) for each in rows] == [
        ("val", 8, 0.5), ("test", 12, 0.75),
    ]  # fmt: skip
    assert messages == []


def test_a_table_that_cannot_be_written_is_reported_and_ends_nothing(tmp_path: Path) -> None:
    run, table = tmp_path / "run", tmp_path / "table.xlsx"
    table.write_bytes(b"precious")
    messages: list[str] = []
    measured(run, evaluated(4, top1=0.25), sinks=[ResultsRow(table, run, ABOUT, messages.append)])
    assert len(messages) == 1
    assert "table.xlsx: is not a complete XLSX file" in messages[0]
    assert messages[0].endswith(f"paceline results {run} --out {table}")
    assert table.read_bytes() == b"precious"
    assert [each.metrics for each in read_results(run, ABOUT)] == [{"top1": 0.25}]
