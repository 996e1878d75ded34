from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from paceline.loggers.events import Evaluated, Event, Logged, Visualized
from paceline.loggers.jsonl import JsonlLogger, read_records
from paceline.loggers.tensorboard import TensorBoardLogger, _checksum, rebuild, scalars_of
from paceline.visualize.image import save_png


def logged(step: int, loss: float) -> Logged:
    smoothed = {"loss": {"median": loss / 2, "mean": 9.0}, "lr": {"median": 0.1}}
    clock = {"time": 1000.0 + step, "samples_per_second": 64.0, "step_time": {"median": 0.5}}
    return Logged(step, step / 10, {"loss": loss, "lr": 0.25}, smoothed, clock)


def evaluated(step: int, top1: float) -> Evaluated:
    return Evaluated(step, step / 10, "val", {"top1": top1}, 200, 0, {"time": 1000.5 + step})


def events_in(folder: Path) -> list[Any]:
    """All that TensorBoard itself reads from the files, one after the other by name."""
    files = sorted(folder.glob("events.out.tfevents.*"))
    return [event for path in files for event in LegacyEventFileLoader(str(path)).Load()]


def scalars_in(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    found: dict[str, list[tuple[int, float, float]]] = {}
    for event in events_in(folder):
        for value in event.summary.value:
            if value.HasField("simple_value"):
                found.setdefault(value.tag, []).append((event.step, value.simple_value, event.wall_time))
    return found


def images_in(folder: Path) -> dict[str, list[tuple[int, int, int, bytes]]]:
    found: dict[str, list[tuple[int, int, int, bytes]]] = {}
    for event in events_in(folder):
        for value in event.summary.value:
            if value.HasField("image"):
                image = value.image
                entry = (event.step, image.width, image.height, image.encoded_image_string)
                found.setdefault(value.tag, []).append(entry)
    return found


def image_file(path: Path) -> Path:
    save_png(np.zeros((5, 7, 3), dtype=np.uint8), path)
    return path


def test_metrics_and_images_are_read_back_by_tensorboard(tmp_path: Path) -> None:
    png = image_file(tmp_path / "confusion.png")
    sink = TensorBoardLogger(tmp_path / "tensorboard")
    sink.handle(logged(10, 0.5))
    sink.handle(evaluated(10, 0.75))
    sink.handle(Visualized(10, "val", {"confusion": png}))
    assert scalars_in(tmp_path / "tensorboard") == {  # there before the file is closed
        "train/loss": [(10, 0.5, 1010.0)],
        "train/lr": [(10, 0.25, 1010.0)],
        "train/loss_median": [(10, 0.25, 1010.0)],
        "clock/samples_per_second": [(10, 64.0, 1010.0)],
        "val/top1": [(10, 0.75, 1010.5)],
    }
    assert images_in(tmp_path / "tensorboard") == {"val/confusion": [(10, 7, 5, png.read_bytes())]}
    sink.close()
    assert events_in(tmp_path / "tensorboard")[0].file_version == "brain.Event:2"


def test_a_metric_that_is_not_finite_is_printed_as_such(tmp_path: Path) -> None:
    TensorBoardLogger(tmp_path).handle(logged(1, math.inf))
    assert math.isnan(scalars_in(tmp_path)["train/loss"][0][1])


def test_after_a_resume_each_step_is_there_once(tmp_path: Path) -> None:
    folder, metrics = tmp_path / "tensorboard", tmp_path / "metrics.jsonl"
    early = image_file(tmp_path / "early.png")
    whole, interrupted, kept = TensorBoardLogger(tmp_path / "whole"), TensorBoardLogger(folder), JsonlLogger(metrics)
    events: list[Event]
    drawn = Visualized(10, "val", {"confusion": early})
    events = [logged(10, 0.5), evaluated(10, 0.75), drawn, logged(20, 0.25), logged(30, 0.125)]
    for event in events:
        whole.handle(event)
        interrupted.handle(event)
    for event in events[:4]:  # the checkpoint was at 20: what followed was recorded, but is done again
        kept.handle(event)
    (tmp_path / "empty.png").touch()  # as after a power cut
    (tmp_path / "text.png").write_text("not an image, but as long as the start of one")
    odd = [(20, "val/odd", tmp_path / name) for name in ("no.png", "empty.png", "text.png", "whole")]
    rebuild(folder, read_records(metrics), [(10, "val/confusion", early), *odd])
    resumed = TensorBoardLogger(folder)
    resumed.handle(logged(30, 0.125))
    assert scalars_in(folder) == scalars_in(tmp_path / "whole")
    assert images_in(folder) == images_in(tmp_path / "whole")


def test_rebuild_leaves_what_others_wrote(tmp_path: Path) -> None:
    foreign = tmp_path / "events.out.tfevents.1234567890.host.1.0"
    foreign.write_bytes(b"")
    (tmp_path / "notes.txt").write_text("mine")
    TensorBoardLogger(tmp_path).handle(logged(1, 0.5))
    rebuild(tmp_path, [])
    assert sorted(path.name for path in tmp_path.iterdir()) == [foreign.name, "notes.txt"]


def test_an_image_that_is_gone_does_not_take_the_metrics_with_it(tmp_path: Path) -> None:
    sink = TensorBoardLogger(tmp_path)
    sink.handle(evaluated(1, 0.5))
    with pytest.raises(FileNotFoundError):
        sink.handle(Visualized(1, "val", {"confusion": tmp_path / "gone.png"}))
    assert scalars_in(tmp_path)["val/top1"][0][:2] == (1, 0.5)


@given(st.binary(max_size=300))
def test_checksums_are_those_of_tensorboard(data: bytes) -> None:
    assert int.from_bytes(_checksum(data), "little") == masked_crc32c(data)


def test_nothing_is_loaded_or_made_before_the_first_metric(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from paceline.loggers.console import Console
from paceline.loggers.events import Note
from paceline.loggers.tensorboard import TensorBoardLogger
sinks = [TensorBoardLogger(Path({str(tmp_path / "tensorboard")!r})), Console(sys.stderr)]
for sink in sinks:
    sink.handle(Note("hello"))
print(sorted({{"torch", "tensorboard", "google.protobuf", "rich", "PIL"}} & set(sys.modules)))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.stdout, ran.stderr) == ("[]\n", "hello\n")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_number_is_left_out() -> None:
    record = {"step": 1, "split": "val", "top1": 0.5, "loss": None, "note": "mine", "smoothed": {"loss": 3}}
    tags = dict(scalars_of({**record, "clock": {"time": "noon"}}))
    assert list(tags) == ["val/top1", "val/loss"]
    assert tags["val/top1"] == 0.5
