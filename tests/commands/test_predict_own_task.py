"""What a task of one's own predicts is written, returned and drawn; what cannot be is refused."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

import paceline
from paceline import Task, register
from paceline.cli import main
from paceline.core.errors import UsageError
from paceline.data.batch import Batch
from paceline.visualize.grid import Panel

pytestmark = pytest.mark.usefixtures("own_names")

RECIPE = """\
name: own
task: {name: own_task}
model: {name: convnet, widths: [4], num_classes: 2}
data: {batch_size: 3, num_workers: 0, train: {dataset: own_data}, val: {dataset: own_data}}
losses: [own_loss]
optimizer: {name: sgd, lr: 0.1}
train: {steps: 1, threads: 1, device: cpu, channels_last: false}
evaluate: {save_predictions: true, every_steps: 1}
logging: {images: false, tensorboard: false}
"""


class Gray(Dataset[Any]):
    """Images of one shade, which is the target, twice."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return np.full((8, 8, 3), index * 100, np.uint8), torch.full((2,), index / 2)


class Drawn(Task):
    """Draws a red panel of a size of its own."""

    def draw(self, batch: Batch, predictions: Tensor | None, index: int) -> Sequence[Panel]:
        red = np.zeros((120, 200, 3), np.uint8)
        red[..., 0] = 255
        return [Panel(red, f"{batch.target[index]}" if batch.has_target else "")]


@pytest.fixture(autouse=True)
def _settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In a folder with a recipe and inputs; torch's settings, which commands change, are put back."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text(RECIPE)
    Path("photos").mkdir()
    for index in range(3):
        Image.fromarray(np.full((8, 8, 3), index * 100, np.uint8)).save(f"photos/{index}.png")
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def train(task: type[Task]) -> None:
    register.task("own_task")(task)
    register.dataset("own_data")(Gray)
    register.loss("own_loss")(nn.MSELoss)
    assert main(["train", "own.yaml"]) == 0


def test_vectors_are_tables_and_results_and_draw_is_used() -> None:
    train(Drawn)
    predictor = paceline.load("runs/own")
    images = torch.stack([torch.from_numpy(Gray()[index][0]).permute(2, 0, 1) for index in range(3)]).float() / 255
    predictor.run.model.eval()
    with torch.no_grad():
        expected = predictor.run.model(images).numpy()  # the model alone, beside all that is under test

    results = predictor.predict([f"photos/{index}.png" for index in range(3)])
    assert [list(result or ()) for result in results] == [["output"]] * 3
    np.testing.assert_allclose([result["output"] for result in results if result], expected, rtol=1e-4, atol=1e-6)

    assert main(["predict", "runs/own", "photos", "--out", "found"]) == 0
    rows = list(csv.DictReader(Path("found/predictions.csv").read_text().splitlines()))
    assert [(row["sample"], Path(row["path"]).name) for row in rows] == [(f"{i}", f"{i}.png") for i in range(3)]
    saved = list(csv.DictReader(Path("runs/own/predictions/val.csv").read_text().splitlines()))
    for table in (rows, saved):
        found = [[row["output_0"], row["output_1"]] for row in table]
        np.testing.assert_allclose(np.array(found, float), expected, rtol=1e-4, atol=1e-6)

    with Image.open("found/images/1.jpg") as drawn:
        red, green, blue = np.asarray(drawn, int).transpose(2, 0, 1)
    assert ((red > 200) & (green < 60) & (blue < 60)).sum() >= 110 * 190


def test_maps_are_arrays_and_names_are_kept() -> None:
    class Named(Task):
        def predict(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
            images = batch["image"]
            return {"mean": images.mean((1, 2, 3)), "map": images[:, :1] * 2}

        def metrics(self) -> Any:
            return []

    train(Named)
    assert main(["predict", "runs/own", "photos", "--out", "found", "--no-images"]) == 0
    rows = list(csv.DictReader(Path("found/predictions.csv").read_text().splitlines()))
    np.testing.assert_allclose([float(row["mean"]) for row in rows], np.arange(3) * 100 / 255, rtol=1e-6)
    np.testing.assert_allclose(np.load("found/outputs/map/2.npy"), np.full((1, 8, 8), 400 / 255), rtol=1e-6)
    (result,) = paceline.load("runs/own").predict("photos/1.png")
    assert result is not None
    assert result["map"].shape == (1, 8, 8)
    assert result["mean"] == pytest.approx(100 / 255)


def test_what_cannot_be_saved_or_drawn_says_what_to_return(capsys: pytest.CaptureFixture[str]) -> None:
    class NeedsTarget(Drawn):
        def draw(self, batch: Batch, predictions: Tensor | None, index: int) -> Sequence[Panel]:
            return [Panel(np.zeros((9, 9, 3), np.uint8), f"{batch.target[index]}")]

    train(NeedsTarget)
    capsys.readouterr()
    assert main(["predict", "runs/own", "photos", "--out", "found"]) == 2
    assert "task NeedsTarget: draw failed" in (printed := capsys.readouterr().err)
    assert "batch.has_target" in printed
    assert main(["predict", "runs/own", "photos", "--out", "found", "--no-images"]) == 0

    class InAList(Task):
        def predict(self, model: nn.Module, batch: Batch) -> list[Tensor]:
            return list(self.forward(model, batch))

    register.kind("task")._entries.pop("own_task")
    register.task("own_task")(InAList)
    with pytest.raises(UsageError, match=r"task InAList: predict gave list.* one row for each of the 1 samples"):
        paceline.load("runs/own").predict("photos/1.png")
