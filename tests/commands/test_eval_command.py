"""`paceline eval` of weights files and of several test sets, held against what torch itself computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from torch import nn

from paceline.cli import main
from paceline.loggers.jsonl import read_records

SETS = {"easy": 4, "hard-ones": 6}
Answer = Callable[..., Any]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gray images of two classes that differ in brightness: a training set and two test sets, and a recipe."""
    folder = tmp_path_factory.mktemp("project")
    generator = np.random.default_rng(0)
    for place, number in {"train": 8, **SETS}.items():
        for label in range(2):
            (folder / place / "ab"[label]).mkdir(parents=True)
            for index in range(number // 2):
                image = generator.integers(0, 128, (8, 8), dtype=np.uint8) + np.uint8(100 * label)
                cv2.imwrite(str(folder / place / "ab"[label] / f"{index}.png"), image)
    part = {"dataset": "image_folder", "transforms": [{"name": "normalize", "mean": [0.5], "std": [0.25]}]}
    recipe = {
        "name": "own",
        "task": "classification",
        "model": {"name": "convnet", "widths": [4]},
        "data": {
            "batch_size": 4,
            "num_workers": 0,
            "train": {**part, "root": "train"},
            "test": {name: {**part, "root": name} for name in SETS},
        },
        "losses": ["cross_entropy"],
        "optimizer": {"name": "sgd", "lr": 0.1},
        "train": {"steps": 2, "device": "cpu"},
        "expect": {"easy.loss": 1000.0},
        "logging": {"images": True, "tensorboard": False, "results": "table.csv"},
    }
    (folder / "own.json").write_text(json.dumps(recipe))
    return folder


@pytest.fixture
def answer(project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Answer:
    """Runs a command in the project: what it printed, parsed if it is JSON; or what it said when it failed."""
    monkeypatch.chdir(project)

    def run(*words: str, code: int = 0) -> Any:
        assert main(list(words)) == code, capfd.readouterr().err
        captured = capfd.readouterr()
        if code:
            return captured.err
        return json.loads(captured.out) if "--json" in words else captured.out

    return run


@pytest.fixture(scope="module")
def net(project: Path) -> nn.Module:
    """The recipe's model with weights of its own."""
    from paceline import build

    torch.manual_seed(3)
    model = build(project / "own.json").model
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model.eval()


def expected_top1(net: nn.Module, project: Path, name: str) -> float:
    """The accuracy on one test set, by torch and OpenCV alone."""
    paths = sorted((project / name).rglob("*.png"))
    images = np.stack([np.asarray(cv2.imread(str(path), cv2.IMREAD_UNCHANGED)) for path in paths])
    with torch.no_grad():
        channels = next(net.parameters()).shape[1]
        batch = torch.from_numpy((images / 255 - 0.5) / 0.25).float()[:, None].expand(-1, channels, -1, -1)
        found = net(batch).argmax(1)
    return float((found == torch.tensor([path.parent.name == "b" for path in paths])).float().mean())


@pytest.mark.parametrize("key", [None, "net_state", "ema.shadow"])
def test_a_weights_file_is_measured_under_any_key(
    project: Path, net: nn.Module, answer: Answer, tmp_path: Path, key: str | None
) -> None:
    content: dict[str, Any] = net.state_dict()
    for word in reversed(key.split(".") if key else []):
        content = {word: content, "epoch": 3}
    torch.save(content, tmp_path / "model.pth")
    words = ["eval", "own.json", "--checkpoint", str(tmp_path / "model.pth")]
    if key:
        refused = answer(*words, code=4)
        assert f"{key} ({len(net.state_dict())} tensors)" in refused
        assert "model.weights.key" in refused
        words.append(f"model.weights.key={key}")
    found = answer(*words, "--json")
    assert (found["step"], found["num_samples"]) == (None, SETS)
    for name in SETS:
        assert found["metrics"][name]["top1"] == pytest.approx(expected_top1(net, project, name))
    in_recipe = {"file": str(tmp_path / "model.pth"), "key": key}
    again = answer("eval", "own.json", f"model.weights={json.dumps(in_recipe)}", "--json")
    assert again["metrics"] == found["metrics"]


def test_weights_that_leave_some_of_the_model_random_are_refused(
    net: nn.Module, answer: Answer, tmp_path: Path
) -> None:
    without_head = {name: value for name, value in net.state_dict().items() if not name.startswith("head")}
    torch.save(without_head, tmp_path / "backbone.pth")
    assert "head" in answer("eval", "own.json", "--checkpoint", str(tmp_path / "backbone.pth"), code=4)
    other = {name: torch.cat([value, value]) if name.startswith("head") else value for name, value in
             net.state_dict().items()}  # fmt: skip
    torch.save(other, tmp_path / "four.pth")
    refused = answer("eval", "own.json", f"model.weights={tmp_path / 'four.pth'}", code=4)
    assert "[4, 4] → [2, 4]" in refused


def test_a_key_that_is_not_there(net: nn.Module, answer: Answer, tmp_path: Path) -> None:
    torch.save({"net": net.state_dict(), "epoch": 1}, tmp_path / "model.pth")
    refused = answer("eval", "own.json", "--checkpoint", str(tmp_path / "model.pth"), "model.weights.key=nett", code=4)
    assert "no key 'nett'" in refused
    assert f"net ({len(net.state_dict())} tensors)" in refused


def test_all_test_sets_are_measured_at_the_end_and_by_one_command(project: Path, answer: Answer) -> None:
    answer("train", "own.json", "--fresh")
    records = {each["split"]: each for each in read_records(project / "runs/own/metrics.jsonl")}
    assert {split: each["num_samples"] for split, each in records.items() if split != "train"} == {
        "test.easy": 4, "test.hard-ones": 6,
    }  # fmt: skip
    log = (project / "runs/own/logs/rank-0.log").read_text()
    assert "expected     easy.loss 1000: reached" in log
    found = answer("eval", "runs/own", "--json")
    for name in SETS:
        record = records[f"test.{name}"]
        assert found["metrics"][name] == {key: record[key] for key in found["metrics"][name]}
    header, easy, hard = answer("eval", "runs/own").splitlines()
    assert header.split()[:2] == ["loss", "top1"]
    assert easy.split()[:3] == ["easy", f"{records['test.easy']['loss']:.4f}", f"{records['test.easy']['top1']:.4f}"]
    assert hard.split()[0] == "hard-ones"
    only = answer("eval", "runs/own", "--split", "test.easy", "--json")
    assert (only["split"], only["metrics"]) == ("test.easy", found["metrics"]["easy"])
    assert "data.test.hard-ones" in answer("eval", "runs/own", "--split", "val", code=2)
    images = {path.name for path in (project / "runs/own/images").iterdir()}
    assert "test.hard-ones-confusion-00000002.png" in images


def test_weights_on_the_command_line_are_measured_although_there_is_a_run(
    net: nn.Module, project: Path, answer: Answer, tmp_path: Path
) -> None:
    answer("train", "own.json", "--fresh")
    torch.save(net.state_dict(), tmp_path / "other.pth")
    words = ("eval", "own.json", "--json")
    named = answer(*words, "--checkpoint", str(tmp_path / "other.pth"))
    for reference in ("own.json", "runs/own"):
        found = answer("eval", reference, "--json", f"model.weights={tmp_path / 'other.pth'}")
        assert found == named
    assert answer(*words)["metrics"] != named["metrics"]
    assert answer(*words, "model.weights=null")["metrics"] == answer(*words)["metrics"]


def test_several_test_sets_have_their_rows_in_results(project: Path, answer: Answer) -> None:
    answer("train", "own.json")
    rows = answer("results", "--json")["runs"]
    assert [(row["split"], row["num_samples"]) for row in rows] == [("test.easy", 4), ("test.hard-ones", 6)]
    assert [row["split"] for row in answer("results", "--split", "test.easy", "--json")["runs"]] == ["test.easy"]
    table = (project / "table.csv").read_text()
    assert "test.easy" in table
    assert "test.hard-ones" in table


def test_a_run_that_is_trained_again_measures_a_pending_test_once(project: Path, answer: Answer) -> None:
    """Killed between the two test sets: both are measured again, and each is recorded once."""
    answer("train", "own.json", "--fresh")
    run = project / "runs/own"
    records = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(records[:-1]))
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps(status | {"state": "running"}))
    answer("train", "own.json")
    again = [each for each in read_records(run / "metrics.jsonl") if each["split"] != "train"]
    before = [json.loads(line) for line in records if json.loads(line)["split"] != "train"]
    assert [{**each, "clock": 0} for each in again] == [{**each, "clock": 0} for each in before]


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ({"root": "easy"}, "data.test.dataset: required, but missing"),
        ({"a": {"root": "easy"}}, "data.test.a.dataset: required, but missing"),
        ({"a": {"dataset": "image_foldr"}}, 'data.test.a.dataset: unknown dataset "image_foldr"; did you mean'),
        ({"a": {"dataset": "image_folder", "root": "x", "splt": 1}}, "data.test.a.splt: unknown key; did you mean"),
        (
            {"a": {"dataset": "image_folder", "root": "x", "transforms": [{"name": "resiz"}]}},
            'data.test.a.transforms.0.name: unknown transform "resiz"',
        ),
        ({"a": {"dataset": "image_folder", "root": "x"}, "b": 3}, "data.test.dataset: required, but missing"),
        (3, "data.test: expected a name, a mapping or null, got 3"),
    ],
)
def test_mistakes_in_test_sets_are_named_with_their_place(answer: Answer, test: object, message: str) -> None:
    refused = answer("show", "own.json", "data.test=null", f"data.test={json.dumps(test)}", code=2)
    assert f"command line: {message}" in refused
