"""What the page is given: values of the run directory, each with its own source."""

from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from sample_runs import write_images, write_recipe, write_run, write_worst_samples

from paceline.core.errors import DataError, UsageError
from paceline.core.file_lock import lock_file
from paceline.loggers.jsonl import truncate_after
from paceline.report.page import different_keys, write_report
from paceline.report.run_reader import read_run

BYTES = 1_000_000


def read(folder: Path) -> dict[str, Any]:
    return read_run(folder, BYTES)


def column(run: dict[str, Any], split: str, metric: str) -> dict[int, float]:
    (found,) = [each for each in run["series"] if (each["split"], each["metric"]) == (split, metric)]
    return dict(zip(found["x"], found["y"], strict=True))


def test_curves_are_those_of_the_records(tmp_path: Path) -> None:
    run = read(write_run(tmp_path / "run"))
    assert column(run, "train", "loss") == {step: float(f"{1 / step:.6g}") for step in range(2, 41, 2)}
    assert column(run, "val", "top1") == {step: float(f"{step / (step + 10):.6g}") for step in (10, 20, 30, 40)}
    assert set(column(run, "train", "data_wait").values()) == {0.25}
    assert column(run, "train", "samples_per_second")[40] == 140
    names = {(each["split"], each["metric"]) for each in run["series"]}
    assert ("train", "cross_entropy") not in names  # the only loss is "loss" itself
    assert run["steps_per_epoch"] == 10


def test_the_verdict_names_the_best_and_not_the_last(tmp_path: Path) -> None:
    run = read(write_run(tmp_path / "run", top1={20: 0.9, 30: 0.9, 40: 0.7}, expect={"top1": 0.8}))
    assert run["best"] == {"value": 0.9, "step": 20, "epoch": 2.0, "split": "val"}
    assert run["expect"] == [{"metric": "top1", "expected": 0.8, "reached": 0.7, "is_met": False}]


@pytest.mark.parametrize(
    ("expect", "is_met"), [({"top1": 0.7}, True), ({"top1": 0.71}, False), ({"other": 1}, None), ({}, "none")]
)
def test_expectations(tmp_path: Path, expect: dict[str, float], is_met: bool | str | None) -> None:
    run = read(write_run(tmp_path / "run", top1={40: 0.7}, expect=expect))
    assert [each["is_met"] for each in run["expect"]] == ([] if is_met == "none" else [is_met])


def test_tables_images_recipe_and_starts(tmp_path: Path) -> None:
    run = read(write_run(tmp_path / "run", optimizer={"lr": 0.1}))
    assert [(each["step"], each["num_samples"], each["num_skipped"]) for each in run["evaluations"]] == [
        (10, 34, 1), (20, 64, 1), (30, 94, 1), (40, 124, 1),
    ]  # fmt: skip
    assert run["evaluations"][-1]["metrics"] == {"loss": 0.05, "top1": 0.8}
    assert run["classes"] == {"val": {"ap.cat": 0.5, "ap.dog": 0.25}}
    assert run["confusion"]["val"]["counts"] == [[40, 1, 0], [2, 40, 1], [0, 0, 40]]
    assert {(each["name"], each["step"]) for each in run["images"]} == {
        (name, step) for name in ("confusion", "predictions") for step in (10, 20, 30, 40)
    }
    assert all(each["uri"].startswith("data:image/webp;base64,") for each in run["images"])
    assert ('optimizer: {"lr": 0.1}', "recipe.yaml:4:3") in run["recipe"]
    assert ("seed: 0", "default") in run["recipe"]
    start, end = run["starts"]
    assert (start["step"], start["processes"], start["setup"]) == (0, 2, ["model    convnet"])
    assert (end["step"], end["state"]) == (40, "finished")
    assert run["skipped"] == {"counts": {}, "samples": []}


def test_skipped_samples_are_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    lines = [{"split": "train", "sample": number, "path": f"{number}.jpg", "reason": "empty"} for number in range(3)]
    (folder / "skipped.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"split": "tr')
    assert read(folder)["skipped"] == {"counts": {"train": 3}, "samples": lines}


def test_worst_samples_are_read_with_their_images_as_far_as_they_fit(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    assert read(folder)["worst"] == {}
    write_worst_samples(folder)
    found = read_run(folder, BYTES)["worst"]["val"]
    assert (found["step"], found["error"]) == (40, "cross-entropy")
    rows = [(each["sample"], each["path"], each["error"], each["captions"]) for each in found["samples"]]
    caption = "<i>dog</i>, not cat"
    assert rows == [
        ("0", "photos/0.jpg", 4.5, [caption]),
        ("10", "photos/10.jpg", 3.5, []),
        ("20", "photos/20.jpg", 2.5, [caption]),
    ]
    first, none, last = (each["image"] for each in found["samples"])
    assert none is None
    assert first["uri"].startswith("data:image/webp;base64,")
    few = read_run(folder, 4 * len(first["uri"]))["worst"]["val"]["samples"]
    assert [each["image"] for each in few] == [first, None, None]
    assert last["width"] == first["width"]


def test_images_are_bounded_and_the_newest_stay(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=200)
    all_images = read_run(folder, BYTES)["images"]
    assert len(all_images) == 2 * 6
    room = sum(len(each["uri"]) for each in all_images) // 3
    few = read_run(folder, room)["images"]
    assert sum(len(each["uri"]) for each in few) <= room
    assert {each["step"] for each in few if each["name"] == "predictions"} >= {200}


def test_a_growing_run_is_read_on_and_a_resumed_one_again(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ends=False)
    before = read_run(folder, BYTES)
    metrics = folder / "metrics.jsonl"
    torn = b'{"step": 42, "epoch": 4.2, "split": "train", "loss": 0.5'
    with metrics.open("ab") as file:
        file.write(torn)
    assert column(read_run(folder, BYTES), "train", "loss") == column(before, "train", "loss")
    with metrics.open("ab") as file:
        file.write(b"}\n")
    write_images(folder, 42)
    assert column(read_run(folder, BYTES), "train", "loss")[42] == 0.5
    truncate_after(metrics, 20)
    assert max(column(read_run(folder, BYTES), "train", "loss")) == 20


def test_a_run_is_running_as_long_as_its_lock_is_held(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ends=False)
    lock = lock_file(folder / ".lock")
    assert read(folder)["state"] == "running"
    os.close(lock)
    assert read(folder)["state"] == "killed"


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lines[2] = b"not json\n"
    (folder / "metrics.jsonl").write_bytes(b"".join(lines))
    with pytest.raises(DataError, match=r"metrics\.jsonl:3: .*'not json"):
        read(folder)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="run directory"):
        read(tmp_path)
    with pytest.raises(UsageError, match="folder"):
        read(tmp_path / "nothing")


@pytest.mark.parametrize("side", [6_000, 20_000], ids=["larger than ours", "more than Pillow opens"])
def test_an_image_of_too_many_pixels_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str], side: int) -> None:
    folder = write_run(tmp_path / "run")
    path = folder / "images" / "val-predictions-00000050.png"
    header = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header)))
    assert {each["step"] for each in read_run(folder, BYTES)["images"]} == {10, 20, 30, 40}
    read_run(folder, BYTES)
    (reported,) = capsys.readouterr().err.splitlines()
    assert str(path) in reported


def test_hostile_files_do_no_harm(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    write_recipe(folder, {"expect": {"top1": float("inf")}})
    (folder / "recipe.yaml").write_text((folder / "recipe.yaml").read_text().replace("Infinity", ".inf"))
    (folder / "status.json").write_text(
        '{"state": 3, "step": "x", "reason": [], "epoch": NaN, "total_steps": 1' + "0" * 400 + "}"
    )
    (folder / "tables" / "val-confusion.json").write_text('{"step": 1, "classes": ["a"], "counts": [[1, 2]]}')
    (folder / "logs" / "starts.jsonl").write_text('{"time": 1, "step": 3, "x": NaN}\n[]\n{"time": 1}\n{')
    (folder / "images" / "val-predictions-00000050.png").write_bytes(b"no image")
    (folder / "worst").mkdir()
    (folder / "worst" / "val.json").write_text(
        '{"step": 1, "error": [], "samples": [3, {"error": NaN, "captions": 3}]}'
    )
    (folder / "worst" / "a.json").write_text('{"step": "x", "samples": []}')
    (folder / "worst" / "b.json").write_text("{")
    run = read(folder)
    assert (run["state"], run["step"], run["reason"], run["epoch"]) == ("unknown", None, None, None)
    assert run["confusion"] == {}
    (nothing,) = run["worst"].pop("val")["samples"]
    assert nothing == {"sample": "None", "path": "", "error": None, "captions": [], "image": None}
    assert run["worst"] == {}
    assert run["starts"] == [{"time": 1, "step": 3, "x": None}]
    assert run["expect"][0]["expected"] is None
    assert run["total_steps"] is None
    write_report([folder], tmp_path / "report.html")
    assert max(each["step"] for each in run["images"]) == 40


def test_the_keys_that_differ(tmp_path: Path) -> None:
    first = write_run(tmp_path / "first", optimizer={"lr": 0.1, "name": "sgd"}, losses=[{"name": "dice", "weight": 1}])
    second = write_run(
        tmp_path / "second", optimizer={"lr": 0.2, "name": "sgd"}, losses=[{"name": "dice", "weight": 2}]
    )
    third = write_run(tmp_path / "third", optimizer={"lr": 0.1, "name": "sgd"}, train={"epochs": 3})
    assert different_keys([first, second]) == [
        {"key": "optimizer.lr", "values": ["0.1", "0.2"]},
        {"key": "losses.dice.weight", "values": ["1", "2"]},
    ]
    assert {"key": "train.epochs", "values": [None, "3"]} in different_keys([first, third])
    assert different_keys([first]) == []
