"""`paceline show` without what a recipe names, and `paceline recipes`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import paceline
from paceline.cli import main
from paceline.core.torchvision_ops import import_torchvision
from paceline.recipe.load import shipped_recipes


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without any data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PACELINE_DATA", raising=False)


def test_show_needs_no_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model is that of the library, with the classes that are assumed."""
    assert main(["show", "image_folder", "train.epochs=2", "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    (missing,) = found["missing"]
    assert "data.train.root" in missing
    assert "10 classes" in missing
    assert f"warning: {missing}" in captured.err
    expected = sum(
        parameter.numel() for parameter in import_torchvision().models.mobilenet_v2(num_classes=10).parameters()
    )
    assert found["model"]["parameters"] == expected
    assert found["model"]["flops_per_sample"] > 0
    assert found["batch"]["total_steps"] == 2 * found["batch"]["steps_per_epoch"]
    assert list(tmp_path.iterdir()) == []


_TASKS = ("segmentation", "detection", "keypoints", "video")


def shown_flops(capsys: pytest.CaptureFixture[str], *words: str) -> int:
    assert main(["show", *words, "--json"]) == 0
    found: int = json.loads(capsys.readouterr().out)["model"]["flops_per_sample"]
    return found


@pytest.mark.parametrize(
    "name", ["segmentation_sample", "detection_sample", "keypoints_sample", "video_sample", "lspet"]
)
def test_show_computes_a_sample_of_every_task_without_its_data(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown_flops(capsys, name, "model.weights=null") > 10**7


def test_flops_are_those_of_one_pass_of_the_plain_model(capsys: pytest.CaptureFixture[str]) -> None:
    """Also of a task that looks at an image several times."""
    task = "task={name: segmentation, aux_weight: 0.5, flip: true, scales: [0.5, 1.0]}"
    found = shown_flops(capsys, "fcn_resnet50", "model.weights=null", "data.train.transforms.2.size=96", task)
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        plain = import_torchvision().models.segmentation.fcn_resnet50(weights_backbone=None, aux_loss=True).eval()
        plain(torch.empty(1, 3, 96, 96))
    assert found == counter.get_total_flops()


def test_flops_are_those_that_are_published(capsys: pytest.CaptureFixture[str]) -> None:
    """R(2+1)D-18 by torchvision: 40.519 thousand million products of a clip of 16 × 112 × 112."""
    assert shown_flops(capsys, "r2plus1d_18") == pytest.approx(2 * 40.519e9, rel=0.001)


OWN_LOSS = """from paceline import register
from torch.nn import functional


@register.loss("my_loss")
def my_loss(output, target):
    return functional.cross_entropy(output, target)
"""


@pytest.mark.usefixtures("own_names")
def test_show_names_the_code_of_each_part(capsys: pytest.CaptureFixture[str]) -> None:
    """Each line that is named is the one on which the part begins, decorators included."""
    Path("shown_parts.py").write_text(OWN_LOSS)
    transforms = "data.train.transforms=[random_horizontal_flip, torchvision/gaussian_noise]"
    words = ["show", "image_folder", "--use", "shown_parts.py", "losses=[my_loss]", transforms, "model=timm/resnet18"]
    assert main([*words, "--json"]) == 0
    parts = {(part["kind"], part["name"]): part for part in json.loads(capsys.readouterr().out)["parts"]}
    own = {"kind": "loss", "name": "my_loss", "module": "shown_parts", "file": "shown_parts.py", "line": 5}
    assert parts["loss", "my_loss"] == own
    expected = {
        ("model", "timm/resnet18"): ("timm/models/resnet.py", "class ResNet("),
        ("optimizer", "sgd"): ("torch/optim/sgd.py", "class SGD("),
        ("transform", "torchvision/gaussian_noise"): ("torchvision/transforms/v2/_misc.py", "class GaussianNoise("),
        ("transform", "random_horizontal_flip"): ("paceline/data/transforms/geometric.py", "@register.transform("),
        ("dataset", "image_folder"): ("paceline/data/datasets/image_folder.py", "@register.dataset("),
        ("task", "classification"): ("paceline/tasks/classification.py", "@register.task("),
        ("schedule", "cosine"): ("paceline/optim/decays.py", "@register.schedule("),
        ("strategy", "auto"): ("paceline/engine/strategies/ddp.py", "@register.strategy("),
        ("averaging", "none"): ("paceline/optim/averaging.py", "@register.averaging("),
    }
    for part, (file, first) in expected.items():
        assert parts[part]["file"] == file
        assert parts[part]["module"].replace(".", "/") == file.removesuffix(".py")
        roots = [Path(str(package.__file__)).parents[1] for package in (paceline, torch)]
        source = next(root / file for root in roots if (root / file).exists())
        assert source.read_text().splitlines()[parts[part]["line"] - 1].startswith(first)
    assert main(words) == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    for (kind, name), part in parts.items():
        assert [kind, name, part["module"], f"{part['file']}:{part['line']}"] in printed


def test_show_needs_no_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "hymenoptera", "model.num_classes=2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert ["data.train" in note for note in found["missing"]] == [True, False]
    assert "model.weights" in found["missing"][1]
    assert found["weights"] is None
    assert found["recipe"]["model"]["weights"] is not None


def test_a_wrong_recipe_is_still_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "image_folder", "data.train.transforms=[{name: resize, size: 0}]"]) == 2
    assert "data.train.transforms.0.size" in capsys.readouterr().err


def test_one_recipe_is_printed_as_it_ships(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "quickstart"]) == 0
    assert capsys.readouterr().out == shipped_recipes()["quickstart"].read_text(encoding="utf-8")
    assert main(["recipes", "quickstrat"]) == 2
    assert 'did you mean "quickstart"' in capsys.readouterr().err


def test_recipes_are_listed_in_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--json"]) == 0
    tasks = {each["name"]: each["task"] for each in json.loads(capsys.readouterr().out)["recipes"]}
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (start,) = {line.index(f"  {tasks[line.split()[0]]}  ") for line in lines}
    end = start + 2 + max(map(len, tasks.values()))
    assert {line[end : end + 2] for line in lines} == {"  "}, "no task reaches into the next column"
