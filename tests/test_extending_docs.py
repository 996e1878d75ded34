"""The page on a user's own parts: every example runs, and depth estimation as a user would add it."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from support.forkserver import paceline_ranks, script_ranks

from paceline.checkpoint.reader import open_checkpoint
from paceline.cli import main
from paceline.core.contracts import RegistrationError

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = (DOCS / "extending.md").read_text(encoding="utf-8")
FILES = {
    name: text for text in re.findall(r"```(?:python|yaml)\n(.*?)```", PAGE, flags=re.DOTALL)
    for name in re.findall(r"^# (\S+)\n", text)[:1]
}  # fmt: skip
SECTIONS = sorted({Path(name).stem for name in FILES})


def test_every_kind_has_an_example_that_is_whole() -> None:
    assert SECTIONS == ["my_dataset", "my_loss", "my_metric", "my_model", "my_task", "my_transform"]
    assert set(FILES) == {f"{stem}{suffix}" for stem in SECTIONS for suffix in (".py", ".yaml")}


@pytest.mark.usefixtures("own_names")
@pytest.mark.parametrize("section", SECTIONS)
def test_examples_pass_the_check(
    section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for suffix in (".py", ".yaml"):
        (tmp_path / f"{section}{suffix}").write_text(FILES[f"{section}{suffix}"], encoding="utf-8")
    # What the page appends for a model: keys that name its parts.
    appended = [word for word in PAGE.split() if word.startswith(("model.freeze=[p", "train.activation"))]
    assert len(appended) == 2
    words = ["check", f"{section}.yaml", "--use", f"{section}.py", "train.threads=1", "--json"]
    assert main([*words, *(appended if section == "my_model" else ())]) == 0, capsys.readouterr().err
    report = json.loads(capsys.readouterr().out)
    assert report["step"]["loss"] > 0
    if section == "my_metric":
        assert "calibration_gap" in report["metrics"]


def test_the_message_printed_is_the_message_given(tmp_path: Path) -> None:
    (printed,) = re.findall(r"^my_parts\.py:(\d+): (.*)$", PAGE, flags=re.MULTILINE)
    lines = ["from paceline import register"] + [""] * (int(printed[0]) - 2)
    lines += ["@register.metric('mae')", "class Mae:", "    def update(self, preds, target): ..."]
    (tmp_path / "my_parts.py").write_text("\n".join(lines))
    with pytest.raises(RegistrationError) as caught:
        runpy.run_path(str(tmp_path / "my_parts.py"))
    assert str(caught.value).endswith(f"my_parts.py:{printed[0]}: {printed[1]}")


@pytest.fixture
def depth(tmp_path: Path) -> Path:
    """A folder with the example and its scenes."""
    for name in ("depth.py", "depth.yaml"):
        shutil.copy(DOCS / "examples" / name, tmp_path)
    (done,) = script_ranks(1, tmp_path / "depth.py", "scenes")
    assert done.returncode == 0, done.stderr
    return tmp_path


def run(processes: int, folder: Path, *words: str) -> str:
    """What the command prints, in processes that share a run."""
    done = paceline_ranks(processes, folder, *words, "--use", "depth.py", OMP_NUM_THREADS="1")
    assert [each.returncode for each in done] == [0] * processes, done[0].stderr
    assert "cannot draw" not in done[0].stderr
    return done[0].stdout


def test_the_example_is_short() -> None:
    assert len((DOCS / "examples" / "depth.py").read_text(encoding="utf-8").splitlines()) <= 150


SHORT = [
    *("train.epochs=null", "train.micro_batch_size=8", "train.reproducible=world"),
    *("checkpoint.every_steps=4", "evaluate.every_epochs=1"),
]


@pytest.mark.usefixtures("own_names")
def test_depth_trains_on_two_processes_resumes_and_is_measured_alike_on_any_number(
    depth: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # In two parts on two processes; by `world`, the weights are those of one process that was never stopped.
    for steps in (4, 8):
        run(2, depth, "train", "depth.yaml", *SHORT, f"train.steps={steps}")
    monkeypatch.chdir(depth)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["train", "depth.yaml", *SHORT, "train.steps=8", "--out", "whole", "--use", "depth.py"]) == 0
    parts, whole = (open_checkpoint(depth / out / "checkpoints/step-00000008") for out in ("runs/depth", "whole"))
    assert all(torch.equal(parts.model[name], whole.model[name]) for name in whole.model)

    capsys.readouterr()
    assert main(["eval", "runs/depth", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    for processes in (2, 3):
        assert json.loads(run(processes, depth, "eval", "runs/depth", "--json")) == alone
    assert alone["num_samples"] == 25
    assert alone["metrics"].keys() == {"silog", "l1", "loss", "abs_rel", "delta1"}
    assert 0 < alone["metrics"]["abs_rel"] < 1

    with Image.open(depth / "runs/depth/images/val-predictions-00000008.png") as image:
        assert min(image.size) > 300
