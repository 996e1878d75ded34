from __future__ import annotations

import json
import math
import os
import resource
from functools import partial
from pathlib import Path

import pytest

from paceline.core.errors import DataError
from paceline.loggers.events import Evaluated, Logged, Logger, LoggerGroup, Note, Saved, Snapshot
from paceline.loggers.files import AppendFile
from paceline.loggers.jsonl import JsonlLogger, read_records, truncate_after


def logged(step: int, loss: float = 0.5) -> Logged:
    smoothed = {"loss": {"median": loss, "mean": loss, "global_mean": loss, "max": loss, "latest": loss}}
    return Logged(step, step / 10, {"loss": loss, "lr": 0.1}, smoothed, {"time": 1.5, "samples_per_second": 99.0})


def evaluated(step: int, split: str = "val") -> Evaluated:
    return Evaluated(step, step / 10, split, {"top1": 0.9}, 200, 3, {"time": 2.5})


def written(path: Path, *steps: int) -> None:
    metrics = JsonlLogger(path)
    for step in steps:
        metrics.handle(logged(step))
    metrics.close()


def steps_in(path: Path) -> list[int]:
    return [record["step"] for record in read_records(path)]


def test_lines_hold_metrics_flat_and_wall_clock_apart(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = JsonlLogger(path)
    metrics.handle(logged(10))
    metrics.handle(Note("not a metric"))
    metrics.handle(evaluated(10))
    train, val = [json.loads(line) for line in path.read_text().splitlines()]  # there before the file is closed
    metrics.close()
    assert list(train) == ["step", "epoch", "split", "loss", "lr", "smoothed", "clock"]
    assert train["smoothed"]["loss"]["median"] == 0.5
    assert train["clock"] == {"time": 1.5, "samples_per_second": 99.0}
    assert val == {
        "step": 10,
        "epoch": 1.0,
        "split": "val",
        "top1": 0.9,
        "num_samples": 200,
        "num_skipped": 3,
        "clock": {"time": 2.5},
    }


def test_floats_come_back_bit_for_bit(tmp_path: Path) -> None:
    loss = 0.1 + 0.2
    JsonlLogger(tmp_path / "metrics.jsonl").handle(logged(1, loss))
    assert read_records(tmp_path / "metrics.jsonl")[0]["loss"] == loss


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    JsonlLogger(path).handle(Logged(1, 0.1, {"loss": math.nan, "lr": 0.1}, {"loss": {"max": math.inf}}, {}))

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is not JSON")

    record = json.loads(path.read_text(), parse_constant=refuse)
    assert record["loss"] is None
    assert record["smoothed"]["loss"]["max"] is None
    assert record["lr"] == 0.1


def test_a_metric_cannot_replace_the_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    JsonlLogger(path).handle(Evaluated(7, 0.7, "val", {"step": 99.0, "num_samples": 1.0}, 200))
    record = read_records(path)[0]
    assert (record["step"], record["num_samples"]) == (7, 200)


def test_truncate_keeps_the_lines_up_to_the_checkpoint_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, 10, 20, 30)
    first_two = b"".join(path.read_bytes().splitlines(keepends=True)[:2])
    truncate_after(path, 20)
    assert path.read_bytes() == first_two
    assert list(tmp_path.iterdir()) == [path]
    written(path, 30)
    assert steps_in(path) == [10, 20, 30]


def test_what_is_pending_at_the_step_is_taken_out_with_what_follows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = JsonlLogger(path)
    for event in (evaluated(10), logged(10), evaluated(20), logged(20), evaluated(20, "test"), evaluated(30)):
        metrics.handle(event)
    metrics.close()
    for pending, left in (("test",), 4), (("train", "test"), 3), (("val", "train", "test"), 2):
        truncate_after(path, 20, pending)
        assert [(record["step"], record["split"]) for record in read_records(path)] == [
            (10, "val"), (10, "train"), (20, "val"), (20, "train"),
        ][:left]  # fmt: skip


@pytest.mark.parametrize("torn", [b'{"step": 30, "epo', b"{", b"\0\0\0\0", b'{"epoch": 3}', b"\xff\xfe"])
def test_a_torn_last_line_is_no_record_and_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, 10, 20)
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert steps_in(path) == [10, 20]
    truncate_after(path, 100)
    assert path.read_bytes() == whole


def test_a_last_line_that_lacks_only_its_newline_is_kept_and_finished(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, 10, 20)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    truncate_after(path, 100)
    assert path.read_bytes() == whole


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, 10, 20, 30)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"garbage\n" + lines[2])
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: expected a JSON object with a step, got 'garbage'"):
        read_records(path)


DIGITS = b"9" * 400


@pytest.mark.parametrize(
    "line",
    [
        b'{"step": ' + DIGITS + b', "split": "train"}',
        b'{"step": 20, "split": "train", "loss": ' + DIGITS + b"}",
        b'{"step": 20, "split": "train", "clock": {"time": -' + DIGITS + b"}}",
        b'{"step": ' + DIGITS * 20 + b', "split": "train"}',
        b'{"step": -1, "split": "train"}',
        b'{"step": true, "split": "train"}',
        b'{"step": 20}',
        b'{"step": 20, "split": "train", "smoothed": []}',
        b'{"step": 20, "split": "train", "clock": 3}',
        b'{"step": 20, "split": "train", "loss": ' + b"[" * 100_000,
    ],
)
def test_a_line_that_nothing_can_use_counts_as_damaged(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, 10, 30)
    first, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + line + b"\n" + last)
    for read in (read_records, lambda path: truncate_after(path, 30)):
        with pytest.raises(DataError, match=r"metrics\.jsonl:2: ") as caught:
            read(path)
        assert len(str(caught.value)) < 1000
    path.write_bytes(first + line)
    truncate_after(path, 30)
    assert path.read_bytes() == first


def test_no_file_has_no_records_and_needs_no_cutting(tmp_path: Path) -> None:
    truncate_after(tmp_path / "metrics.jsonl", 5)
    assert read_records(tmp_path / "metrics.jsonl") == []
    assert list(tmp_path.iterdir()) == []


def test_what_a_full_disk_refuses_is_taken_back_and_written_later(tmp_path: Path) -> None:
    file = AppendFile(tmp_path / "grows")
    file.append(b"first\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))  # the system now writes a part of what comes, then refuses
    try:
        with pytest.raises(OSError, match="grows"):
            file.append(b"the second piece\n")
        assert file.path.read_bytes() == b"first\n"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    file.append(b"third\n")
    file.close()
    assert file.path.read_bytes() == b"first\nthe second piece\nthird\n"


class Listener(Logger):
    def __init__(self) -> None:
        self.heard: list[object] = []

    def handle(self, event: object) -> None:
        self.heard.append(event)

    def tick(self, snapshot: Snapshot) -> None:
        self.heard.append(snapshot)

    def close(self) -> None:
        self.heard.append("closed")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_sink_that_cannot_write_is_reported_once_and_stops_nothing() -> None:
    before, after = Listener(), Listener()
    logger = LoggerGroup([before, JsonlLogger(Path("/dev/full")), after])
    first, second, saved = logged(1), logged(2), Saved(2, Path("step-2"))
    for event in (first, second, saved):
        logger.emit(event)
    logger.tick(Snapshot(3, 10, 0.3, 0.0))
    logger.close()
    notes = [event for event in before.heard if isinstance(event, Note)]
    assert [note.level for note in notes] == ["warning"]
    assert "/dev/full" in notes[0].text
    assert "No space left" in notes[0].text
    for listener in (before, after):
        others = [event for event in listener.heard if not isinstance(event, Note)]
        assert others == [first, second, saved, Snapshot(3, 10, 0.3, 0.0), "closed"]
    assert [event for event in after.heard if isinstance(event, Note)] == notes


def test_an_observer_without_sinks_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    logger = LoggerGroup()
    logger.emit(logged(1))
    logger.tick(Snapshot(1, 10, 0.1, 0.0))
    logger.close()
    assert list(tmp_path.iterdir()) == []
    assert logger._waiting == []  # nothing piles up either


def test_what_is_no_file_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, kind in (("pipe", "a pipe"), ("folder", "a directory")):
        for read in (read_records, partial(truncate_after, step=1)):
            with pytest.raises(DataError, match=f"{name}: .*{kind}"):
                read(tmp_path / name)


def test_what_is_no_file_is_never_appended_to(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    (tmp_path / "link").symlink_to("mine")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OSError, match=name):
            AppendFile(tmp_path / name).append(b"more")
    assert (tmp_path / "mine").read_text() == "kept"
