"""torchvision's published detection recipes take the steps of torchvision's own training loop.

Beside each recipe runs references/detection/train.py as a plain loop of public API: the builder with the backbone's
weights, which freezes layers and BatchNorm; its own transform, which normalizes, resizes and pads; SGD, LinearLR for
warm-up and MultiStepLR. Two drawn images are an epoch of one step, so 20 steps go through warm-up and, in most
recipes, past the first milestone.

Both have the layers of ResNet-50 and VGG16, but one block a stage and few channels, so that a step takes little time.
What is random is taken out on both sides: every image is flipped, images have the size that they would be resized to
(torchvision resizes floats, the recipes resize bytes), and so many anchors and proposals may be sampled that all are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import paceline
from paceline.core.torchvision_ops import import_torchvision

SIZE = 32
NUM_CLASSES = 3
ALL_SAMPLED = {"rpn_batch_size_per_image": 4096, "rpn_post_nms_top_n_train": 8}
THIN_VGG = [8, 8, "M", 8, 8, "M", 8, 8, 8, "M", 8, 8, 512, "M", 8, 8, 512, "M"]


class Case(NamedTuple):
    """How a recipe is published, and how it is made small."""

    lr: float
    milestones: list[int]
    weight_decay: float = 1e-4
    steps: int = 20
    warmup: int = 10
    size: int = SIZE
    args: dict[str, int] = {}
    """Of both models."""
    changes: dict[str, Any] = {}
    """Of the recipe."""


CASES = {
    "fasterrcnn_resnet50_fpn": Case(0.02, [16, 22], args=ALL_SAMPLED),
    "retinanet_resnet50_fpn": Case(0.01, [16, 22]),
    "ssd300_vgg16": Case(0.002, [80, 110], 5e-4, size=300, steps=5, warmup=3),
}


@pytest.fixture(scope="module", autouse=True)
def _thin_backbones() -> Iterator[None]:
    models = import_torchvision().models
    build = models.resnet._resnet

    def build_thin(block: Any, layers: list[int], weights: Any, progress: bool, **args: Any) -> nn.Module:
        return build(block, [1, 1, 1, 1], weights, progress, width_per_group=4, **args)

    with patch.object(models.resnet, "_resnet", build_thin), patch.dict(models.vgg.cfgs, D=THIN_VGG):
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of noise with brighter boxes, in COCO's form, for every size; and stand-ins for published weights."""
    root = tmp_path_factory.mktemp("published")
    for size in {case.size for case in CASES.values()}:
        _draw(root / str(size), size)
    _write_weights(root / "hub/hub/checkpoints")
    return root


def _draw(folder: Path, size: int) -> None:
    random = np.random.default_rng(0)
    (folder / "images").mkdir(parents=True)
    images, annotations = [], []
    for number in (1, 2):
        pixels = random.integers(0, 120, (size, size, 3), np.uint8)
        images.append({"id": number, "file_name": f"{number}.png", "width": size, "height": size})
        for index in range(3):
            left, top = random.uniform(0, size * 0.5, 2).round(1)
            width, height = random.uniform(size * 0.25, size * 0.5, 2).round(1)
            pixels[int(top) : int(top + height), int(left) : int(left + width), index] += 120
            box = [left, top, width, height]
            annotations.append(
                {"id": len(annotations) + 1, "image_id": number, "category_id": index + 1, "iscrowd": 0, "bbox": box}
            )
        Image.fromarray(pixels).save(folder / f"images/{number}.png")
    categories = [{"id": index + 1, "name": name} for index, name in enumerate(["cat", "dog", "person"])]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "train.json").write_text(json.dumps(content), encoding="utf-8")


def _write_weights(folder: Path) -> None:
    """Files where torch.hub keeps what it has downloaded: random weights, with statistics of BatchNorm."""
    models = import_torchvision().models
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    resnet = models.resnet50().state_dict()
    for name, tensor in resnet.items():
        if name.endswith("running_mean"):
            tensor.normal_(std=0.02)
        elif name.endswith("running_var"):
            tensor.uniform_(0.8, 1.2)
        elif name.endswith("bn3.weight"):
            tensor.fill_(0.2)
    torch.save(resnet, folder / _file_name(models.ResNet50_Weights.IMAGENET1K_V1))
    vgg = models.vgg16(init_weights=False).features
    tensors = {f"features.{name}": tensor for name, tensor in vgg.state_dict().items()}
    for name, shape in {"0": (4096, 25088), "3": (4096, 4096), "6": (1000, 4096)}.items():
        tensors[f"classifier.{name}.weight"] = torch.zeros(()).expand(shape)  # one number in the file
        tensors[f"classifier.{name}.bias"] = torch.zeros(()).expand(shape[0])
    torch.save(tensors, folder / _file_name(models.VGG16_Weights.IMAGENET1K_FEATURES))


def _file_name(weights: Any) -> str:
    return weights.url.rpartition("/")[2]


@pytest.mark.parametrize("name", CASES)
def test_20_steps_are_those_of_torchvisions_own_loop(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(data / "hub"))
    case, folder = CASES[name], data / str(CASES[name].size)
    run = _build(name, case, folder, tmp_path)
    plain = _published_model(name, case, run.model.detector)
    losses, weights = _plain_loop(plain, case, folder)
    run.freezing.train_mode(run.model)
    for step_batch, expected in zip(run.batches, losses, strict=False):
        found = paceline.train_step(run, step_batch).losses
        assert {each: found[each].item() for each in expected} == pytest.approx(expected, rel=1e-5, abs=1e-5), step_batch.step
    own = run.model.detector.state_dict()
    for each, tensor in weights.items():
        torch.testing.assert_close(own[each], tensor, rtol=1e-5, atol=1e-5, msg=each)


def _build(name: str, case: Case, folder: Path, out: Path) -> Any:
    part = {"data.{}.root": str(folder), "data.{}.annotations": "train.json", "data.{}.images": "images"}
    changes = {key.format(split): value for split in ("train", "val") for key, value in part.items()}
    changes |= {"data.batch_size": 2, "data.num_workers": 0, "train.threads": 1, "train.device": "cpu"}
    changes |= {"schedule.warmup_steps": case.warmup, "model.args": case.args or None}
    for index, transform in enumerate(paceline.Recipe.load(name).data.train.transforms):
        match transform.name:
            case "random_horizontal_flip":
                changes[f"data.train.transforms.{index}.p"] = 1.0
            case "resize" if isinstance(transform.size, int):
                changes[f"data.train.transforms.{index}.size"] = case.size
            case "random_photometric_distort" | "random_zoom_out":
                changes[f"data.train.transforms.{index}.p"] = 0.0
            case "random_iou_crop":
                changes[f"data.train.transforms.{index}.sampler_options"] = [1.0]
    return paceline.build(name, changes | case.changes, out)


def _published_model(name: str, case: Case, own: nn.Module) -> nn.Module:
    """The model as the reference builds it; the layers that no file has begin as those of the recipe's model."""
    models = import_torchvision().models
    builder = models.get_model_builder(f"{name}")
    backbone = models.VGG16_Weights.IMAGENET1K_FEATURES if "vgg" in name else models.ResNet50_Weights.IMAGENET1K_V1
    size = {} if name.startswith("ssd") else {"min_size": case.size, "max_size": 2 * case.size}
    model: nn.Module = builder(
        weights=None, weights_backbone=backbone, num_classes=_num_outputs(name), **size, **case.args
    )
    given, made = own.state_dict(), model.state_dict()
    for each in made:
        if each.startswith(("backbone.body", "backbone.features")):
            assert torch.equal(given[each], made[each]), each
    model.load_state_dict({each: given[each] for each in made})
    learning = {each for each, parameter in model.named_parameters() if parameter.requires_grad}
    assert learning == {each for each, parameter in own.named_parameters() if parameter.requires_grad}
    return model


def _num_outputs(name: str) -> int:
    return NUM_CLASSES + (not name.startswith("retinanet"))  # those with a class for the background


def _plain_loop(model: nn.Module, case: Case, folder: Path) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """The losses of each step and the last weights of the reference's loop, in which an epoch is one step."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(learning, lr=case.lr, momentum=0.9, weight_decay=case.weight_decay)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.001, total_iters=case.warmup)
    drops = torch.optim.lr_scheduler.MultiStepLR(optimizer, case.milestones, gamma=0.1)
    images, targets = _flipped(folder, shift=0 if type(model).__name__ == "RetinaNet" else 1)
    model.train()
    found = []
    for _ in range(case.steps):
        losses = model([image.clone() for image in images], [dict(target) for target in targets])
        optimizer.zero_grad()
        sum(losses.values()).backward()
        optimizer.step()
        warmup.step()
        drops.step()
        found.append({name: loss.item() for name, loss in losses.items()})
    return found, model.state_dict()


def _flipped(folder: Path, shift: int) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """The images and targets of a COCO file, flipped, by torchvision's transforms."""
    torchvision = import_torchvision()
    from torchvision.transforms.v2 import functional as flip

    content = json.loads((folder / "train.json").read_text(encoding="utf-8"))
    images, targets = [], []
    for entry in content["images"]:
        own = [each for each in content["annotations"] if each["image_id"] == entry["id"]]
        pixels = flip.pil_to_tensor(Image.open(folder / "images" / entry["file_name"]))
        images.append(flip.horizontal_flip(flip.to_dtype(pixels, torch.float32, scale=True)))
        corners = torchvision.ops.box_convert(torch.tensor([each["bbox"] for each in own]), "xywh", "xyxy")
        boxes = torchvision.tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=tuple(pixels.shape[1:]))
        labels = torch.tensor([each["category_id"] - 1 + shift for each in own])
        targets.append({"boxes": flip.horizontal_flip(boxes).as_subclass(Tensor), "labels": labels})
    return images, targets
