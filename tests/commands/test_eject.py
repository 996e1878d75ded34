"""`paceline eject`: the written file gives the bits of the recipe, on one process and two, and after kill -9."""

from __future__ import annotations

import hashlib
import inspect
import shutil
import signal
import struct
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from support.forkserver import Running, paceline, paceline_ranks, script_ranks
from support.sample_recipes import records

from paceline.cli import main
from paceline.commands import ejected_training
from paceline.commands.python_source import WIDTH
from paceline.data.datasets.idx import fashion_small
from paceline.engine.run import Run

SHORT = [
    *("train.epochs=null", "train.steps=3", "schedule.warmup_epochs=null", "schedule.warmup_steps=1"),
    *("evaluate.every_epochs=null", "evaluate.every_steps=2", "logging.every_steps=1", "logging.images=false"),
    *("checkpoint.every_epochs=null", "checkpoint.every_steps=1", "checkpoint.keep_last=9", "train.device=cpu"),
]
SMALL = [*SHORT, "model.widths=[4,8]", "data.batch_size=24", "evaluate.batch_size=500"]
SAMPLES = {
    "classification": ["model.widths=[4,8]"],
    "detection": ["model.width=8", "model.depth=1"],
    "keypoints": ["model.widths=[8,8,8]"],
    "saliency": [],
    "segmentation": [],
    "video": [],
}


def written_file(folder: Path, *words: str) -> Path:
    """The file that the command writes."""
    done = paceline(folder, "eject", *words)
    assert done.returncode == 0, done.stderr
    file = folder / "train.py"
    file.write_text(done.stdout, encoding="utf-8")
    return file


def digests(run: Path) -> list[str]:
    """SHA-256 of the weights of the last checkpoint, of each process's part."""
    files = sorted(max(run.glob("checkpoints/step-*")).glob("model*.safetensors"))
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


def assert_same(folder: Path, written: str = "written") -> None:
    """The run of the file has the weights and the metrics of the recipe's."""
    assert digests(folder / "recipe") == digests(folder / written) != []
    assert records(folder / "recipe") == records(folder / written)


def compare(folder: Path, *words: str, procs: int = 1) -> Path:
    """Train a recipe by its name and by the file that is written for it, and compare; the file."""
    file = written_file(folder, *words)
    runs = [
        *paceline_ranks(procs, folder, "train", *words, "--out", "recipe"),
        *script_ranks(procs, file, "--out", "written"),
    ]
    assert [done.returncode for done in runs] == [0] * 2 * procs, [done.stderr for done in runs]
    assert_same(folder)
    return file


@pytest.mark.parametrize("task", SAMPLES)
def test_recipes_with_sample_data_give_the_same_bits(task: str, tmp_path: Path) -> None:
    assert main(["sample", task, str(tmp_path / "data" / f"{task}_sample"), "--number", "24"]) == 0
    compare(tmp_path, f"{task}_sample", *SHORT, *SAMPLES[task])


def test_recipes_for_fashion_give_the_same_bits(tmp_path: Path) -> None:
    """Masked autoencoding, and a linear probe with its weights, on images of the embedded data."""
    write_fashion(tmp_path / "data" / "fashion_mnist")
    words = [*SHORT, "data.batch_size=8"]
    compare(tmp_path, "mae_fashion", *words)
    (tmp_path / "runs").mkdir()
    (tmp_path / "recipe").rename(tmp_path / "runs" / "mae_fashion")
    shutil.rmtree(tmp_path / "written")
    file = compare(tmp_path, "mae_fashion_linear_probe", *words, "data.train.samples_per_class=1")
    assert 'weights = read_weights("runs/mae_fashion/checkpoints/step-' in file.read_text(encoding="utf-8")


def write_fashion(folder: Path) -> None:
    """The first images of the embedded data, as IDX files."""
    folder.mkdir(parents=True)
    for prefix, data in {"train": fashion_small("train"), "t10k": fashion_small("test")}.items():
        fields = {"images-idx3-ubyte": data.images[:16, 0], "labels-idx1-ubyte": data.fields["label"][:16]}
        for name, values in fields.items():
            header = bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape)
            (folder / f"{prefix}-{name}").write_bytes(header + values.numpy().astype(np.uint8).tobytes())


def test_quickstart_is_short_plain_and_formatted(tmp_path: Path) -> None:
    lines = written_file(tmp_path, "quickstart").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    imported = [line for line in lines if line.startswith(("from ", "import "))]
    assert not [line for line in imported if "recipe" in line or "registry" in line or "register" in line]
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length", str(WIDTH), "--check", "train.py"]
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 0
    order = [sys.executable, "-m", "ruff", "check", "--isolated", "--line-length", str(WIDTH), "--select", "E,F,I"]
    assert subprocess.run([*order, "train.py"], cwd=tmp_path, check=False).returncode == 0


def test_the_file_ends_as_the_command_does(tmp_path: Path) -> None:
    """After a request to stop, and for mistakes that were edited in; those of plain Python keep their traceback."""
    file = written_file(tmp_path, "quickstart", *SMALL, "train.steps=100000")
    running = Running(tmp_path, [str(file), "--out", "stopped"], {})
    while not list(tmp_path.glob("stopped/checkpoints/step-*")):
        assert running.poll() is None, running.printed()
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    stopped = running.end()
    assert stopped.returncode == 75
    assert "on request (SIGINT); state is saved" in stopped.stderr.splitlines()[-1]
    assert "Traceback" not in stopped.stderr

    written = file.read_text(encoding="utf-8")
    for found, edited, code, words in (
        ("BATCH_SIZE = 24", "BATCH_SIZE = 0", 2, "samples: expected a step of at least 1 sample, got 0"),
        ("widths=[4, 8]", "widths=[4, 6]", 4, "stages.1"),
        ("BATCH_SIZE = 24", "BATCH_SIZE = SEEED", 1, "Traceback"),
    ):
        assert found in written
        file.write_text(written.replace(found, edited), encoding="utf-8")
        (done,) = script_ranks(1, file, "--out", "stopped")
        assert done.returncode == code, done.stderr
        assert words in done.stderr
        assert ("Traceback" in done.stderr) == (words == "Traceback")


def test_two_processes_give_the_same_bits_and_go_on_after_a_kill(tmp_path: Path) -> None:
    """The second run of the file is one process that is killed after its first checkpoint, and started again."""
    file = compare(tmp_path, "quickstart", *SMALL, procs=2)
    (tmp_path / "recipe").rename(tmp_path / "recipe_of_two")
    assert paceline(tmp_path, "train", "quickstart", *SMALL, "--out", "recipe").returncode == 0
    killed = Running(tmp_path, [str(file), "--out", "killed"], {})
    while not list(tmp_path.glob("killed/checkpoints/step-*")):
        assert killed.poll() is None, killed.printed()
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.end()
    for _ in range(2):  # the second time there is nothing left to do
        (done,) = script_ranks(1, file, "--out", "killed")
        assert done.returncode == 0, done.stderr
        assert_same(tmp_path, "killed")
    assert "is finished: 3 of 3 steps are done" in done.stderr


FEATURES = {
    "precision, accumulation, averaging, groups": [
        *("train.precision=bf16", "train.micro_batch_size=5", "train.averaging={name: ema, decay: 0.9}"),
        *("optimizer.layer_decay=0.8", "train.clip_grad_norm=0.5", "optimizer.base_batch_size=64"),
        "optimizer.param_groups=[{preset: no_decay_bias_norm}, {match: head, lr_scale: 10}]",
    ],
    "half weights, frozen layers, another optimizer and schedule": [
        *("train.precision=O2", "model.freeze=[all_but_head]", "optimizer.name=sgd", "optimizer.trust_ratio={}"),
        "model.unfreeze=[{match: ['stages.1*'], at_steps: 2}]",
        *("schedule.decay=multi_step", "schedule.milestone_steps=[2]", "schedule.momentum={start: 0.9, end: 0.5}"),
    ],
    "mixing, a library's transform, several test sets, activation checkpointing": [
        "data.train.transforms=[{name: torchvision/gaussian_blur, kernel_size: 3},"
        " {name: normalize, mean: [0.286], std: [0.353]}, {name: mixup_or_cutmix}]",
        "data.test={a-b: {dataset: fashion_small, split: test}}",
        *("train.activation_checkpointing=blocks", "evaluate.metrics=[auroc]", "data.on_error=skip"),
        *("train.reproducible=world", "checkpoint.best=auroc", "logging.lr_change_ratio=2"),
    ],
}


def test_shards_on_two_processes_give_the_same_bits(tmp_path: Path) -> None:
    compare(tmp_path, "quickstart", *SMALL, "train.strategy.name=fsdp", "train.clip_grad_norm=0.1", procs=2)


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_what_recipes_can_say_gives_the_same_bits(features: list[str], tmp_path: Path) -> None:
    compare(tmp_path, "quickstart", *SMALL, *features)


def test_every_field_of_a_run_is_written_or_left_to_its_default_on_purpose() -> None:
    """Settings (numbers, flags and texts) are written by themselves; so is what a run knows about itself."""
    left = {"heartbeat", "stop", "timer", "explain_nonfinite", "logger", "unread"}
    source = inspect.getsource(ejected_training)
    parts = [each.name for each in fields(Run) if each.type not in ("int", "float", "str", "bool")]
    assert [name for name in parts if name not in left and f'"{name}"' not in source] == []


OWN = """
import torch
from torch import nn

from paceline import Task, register


@register.model("net")
class Net(nn.Module):
    def __init__(self, num_classes, size=2):
        super().__init__()
        self.layers = nn.Sequential(nn.AdaptiveAvgPool2d(size), nn.Flatten(), nn.LazyLinear(num_classes))

    def forward(self, images):
        return self.layers(images)


@register.loss("smooth")
def smooth(output, target, strength=0.5):
    return nn.functional.cross_entropy(output, target, label_smoothing=strength)


@register.dataset("noise")
class Noise(torch.utils.data.Dataset):
    classes = ["a", "b"]

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((1, 8, 8), index / self.length), index % 2
"""
RECIPE = """
name: own
use: parts.py
task: classification
model: {name: net, size: 4}
data:
  batch_size: 4
  train: {dataset: noise, length: 12}
  val: {dataset: noise, length: 6}
losses: [{name: smooth, strength: 0.25}]
optimizer: {name: adamw, lr: 0.01}
train: {epochs: 1, device: cpu}
"""


def test_parts_of_a_users_own_are_imported_from_their_file(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(OWN, encoding="utf-8")
    (tmp_path / "own.yaml").write_text(RECIPE, encoding="utf-8")
    text = compare(tmp_path, "own.yaml").read_text(encoding="utf-8")
    assert f'sys.path.insert(0, "{tmp_path}")' in text
    assert "from parts import Net, Noise, smooth  # noqa: E402" in text
    assert 'as_dataset("noise", Noise(length=12))' in text


def test_what_only_commands_do_is_refused_by_its_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eject", "quickstart", "train.devices=[0]"]) == 2
    assert "command line: train.devices: cannot be ejected" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["minet_multiscale", "ssd300_pet", "mae_fashion_linear_probe"])
def test_recipes_whose_data_is_elsewhere_are_written_too(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PACELINE_DATA", raising=False)
    assert main(["eject", name]) == 0
    printed = capsys.readouterr()
    assert "as if data.train had" in printed.err
    compile(printed.out, f"{name}.py", "exec")
