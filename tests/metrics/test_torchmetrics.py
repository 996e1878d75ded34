"""torchmetrics' own classes as metrics of a recipe: bit-identical on 1 to 3 processes, and equal to a direct call."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from support.forkserver import paceline_ranks
from test_metric_adapter import batches, over_processes

from paceline import build, register
from paceline.cli import main
from paceline.core.torchvision_ops import import_torchvision
from paceline.data.batch import Batch
from paceline.metrics.adapter import as_metric
from paceline.tasks.segmentation import Segmentation

import_torchvision()  # torchmetrics imports it
torchmetrics: Any = pytest.importorskip("torchmetrics")

NAMES = (
    *("Accuracy", "F1Score", "AUROC", "Precision", "Recall", "Specificity", "CohenKappa", "MatthewsCorrCoef"),
    *("CalibrationError", "JaccardIndex"),
)
MODULE = f"""
import torchmetrics
from paceline import register
for name in {NAMES}:
    register.metric("tm_" + name)(getattr(torchmetrics, name))

@register.metric("num_seen")
class NumSeen(torchmetrics.classification.MulticlassConfusionMatrix):
    def compute(self):
        return super().compute().sum()
"""
RECIPE: dict[str, Any] = {
    "name": "all",
    "task": "classification",
    "model": {"name": "convnet", "widths": [4]},
    "data": {"batch_size": 50} | {split: {"dataset": "fashion_small", "split": "test"} for split in ("train", "val")},
    "losses": ["cross_entropy"],
    "optimizer": {"name": "sgd", "lr": 0.1},
    "train": {"steps": 4},
    "evaluate": {
        "batch_size": 300,
        "metrics": ["num_seen", *({"name": f"tm_{name}", "task": "multiclass"} for name in NAMES)],
    },
    "logging": {"images": False, "tensorboard": False, "results": None},
}


def test_all_in_one_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_names: None) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tm_parts.py").write_text(MODULE)
    (tmp_path / "all.json").write_text(json.dumps(RECIPE))
    assert main(["train", "all.json", "--use", "tm_parts"]) == 0
    words = ["eval", "all.json", "--checkpoint", "runs/all", "--use", "tm_parts", "--json"]
    ranks = [paceline_ranks(procs, tmp_path, *words)[0] for procs in (1, 2)]
    ranks += paceline_ranks(1, tmp_path, *words, "--procs", "3")
    assert [each.returncode for each in ranks] == [0, 0, 0], ranks[-1].stderr
    found = [json.loads(each.stdout)["metrics"] for each in ranks]
    assert found[0] == found[1] == found[2]
    assert found[0]["num_seen"] == 2000, "torchmetrics' own sum over processes would count samples again"

    run = build("runs/all")
    loader = run.evaluations["val"].loader
    fetched = [loader.fetch(0, torch.arange(start, min(start + 300, 2000)).numpy()) for start in range(0, 2000, 300)]
    samples = [loader.transform_batch(each, 0, torch.device("cpu")) for each in fetched]
    with torch.no_grad():
        logits = torch.cat([run.task.predict(run.model.eval(), batch) for batch in samples])
    labels = torch.cat([batch.target for batch in samples])
    for name in NAMES:
        direct = getattr(torchmetrics, name)(task="multiclass", num_classes=10)
        assert found[0][f"tm_{name}"] == pytest.approx(direct(logits, labels).item(), abs=1e-6), name


def test_keys_are_those_of_the_signature(own_names: None) -> None:
    for name in ("F1Score", "MeanSquaredError"):
        register.metric(name)(getattr(torchmetrics, name))
    register.metric("matrix")(torchmetrics.classification.MulticlassConfusionMatrix)
    f1, mse, matrix = (register.kind("metric").find(name) for name in ("F1Score", "MeanSquaredError", "matrix"))
    assert f1
    assert mse
    assert matrix
    assert f1.arguments.model_validate({"task": "multilabel", "num_labels": 3}).model_dump()["num_classes"] is None
    assert f1.arguments.model_validate({"task": "multiclass", "num_classes": 7}).model_dump()["num_classes"] == 7
    assert matrix.arguments.model_validate({}).model_dump()["num_classes"] is None, "filled in from the data"
    with pytest.raises(ValidationError, match="num_classes"):
        mse.arguments.model_validate({"num_classes": 7})


def test_segmentation_is_measured_on_maps() -> None:
    generator = torch.Generator().manual_seed(0)
    masks = torch.randint(0, 3, (5, 6, 8), generator=generator).to(torch.uint8)
    masks[:, :2] = 255
    jaccard = torchmetrics.JaccardIndex(task="multiclass", num_classes=3, ignore_index=255)
    task = Segmentation({}, {}, ["a", "b", "c"], extra_metrics=[as_metric("jaccard", jaccard)], ignore_index=255)
    batch = Batch(id=torch.arange(5), image=torch.randn(5, 3, 6, 8, generator=generator), mask=masks)
    with torch.no_grad():
        predictions = task.predict(torch.nn.Identity(), batch)
    computed: dict[str, Any] = {}
    for metric in task.metrics():
        computed |= metric.compute(metric.update(predictions, batch))
    assert computed["jaccard"] == pytest.approx(jaccard(torch.stack(predictions.maps), masks.long()).item(), abs=1e-6)
    assert computed["jaccard"] == pytest.approx(computed["miou"], abs=1e-6)


def test_squared_errors_on_any_number_of_processes() -> None:
    metric, given = as_metric("mse", torchmetrics.MeanSquaredError()), batches()
    values = [over_processes(metric, given, processes) for processes in (1, 2, 3)]
    preds, target = (torch.cat(each) for each in zip(*given, strict=True))
    assert values[0] == values[1] == values[2]
    assert values[0]["mse"] == pytest.approx(torchmetrics.MeanSquaredError()(preds[:, 0], target).item(), rel=1e-5)


def test_threads_do_not_mix_states() -> None:
    class Summed(torchmetrics.MeanSquaredError):  # type: ignore[misc]
        sums = ("sum_squared_error", "total")

    given = [(torch.full((4,), float(number)), torch.zeros(4)) for number in range(200)]
    samples = [(preds, Batch(id=torch.arange(4), target=target)) for preds, target in given]
    for made in (torchmetrics.MeanSquaredError(), Summed()):
        metric = as_metric("mse", made)
        with ThreadPoolExecutor(8) as pool:
            states = list(pool.map(lambda sample, metric=metric: metric.update(*sample), samples))
        assert [metric.compute(state)["mse"] for state in states] == [float(number**2) for number in range(200)]
