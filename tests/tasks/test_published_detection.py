"""torchvision's published detection recipes take the steps of torchvision's own training loop.

Beside each recipe runs references/detection/train.py as a plain loop of public API: the builder with the backbone's
weights, which freezes layers and BatchNorm; its own transform, which normalizes, resizes and pads; SGD, LinearLR for
warm-up and MultiStepLR. Two drawn images are an epoch of one step, so 20 steps go through warm-up and past the first
milestone (10 of the models with masks or keypoints and 5 of SSD, which take longer: through warm-up).

Both have the layers of ResNet-50 and VGG16, but one block a stage and few channels, so that a step takes little time.
What is random is taken out on both sides: every image is flipped, images have the size that they would be resized to
(torchvision resizes floats, the recipes resize bytes), pixels are 0 or 1 and not normalized (torchvision rounds
otherwise, and steps carry the last bit far), and so many anchors and proposals may be sampled that all are.
SSD's augmentation is off; tests/data holds it.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
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
ALL_SAMPLED = {"rpn_batch_size_per_image": 4096, "rpn_post_nms_top_n_train": 8}
ONLY_TRUTH = {**ALL_SAMPLED, "rpn_post_nms_top_n_train": 0}  # proposals are the ground truth, which is always added
THIN_VGG = [8, 8, "M", 8, 8, "M", 8, 8, 8, "M", 8, 8, 512, "M", 8, 8, 512, "M"]
_SIDES = ("eye", "ear", "shoulder", "elbow", "wrist", "hip", "knee", "ankle")
_COCO = ("nose", *(f"{side}_{part}" for part in _SIDES for side in ("left", "right")))
_MIRRORED = [0, *(index for pair in zip(range(2, 17, 2), range(1, 17, 2), strict=True) for index in pair)]


class Case(NamedTuple):
    """How a recipe is published, and how it is made small."""

    lr: float
    milestones: list[int]
    weight_decay: float = 1e-4
    steps: int = 20
    warmup: int = 10
    file: str = "instances"
    folder: str = "several"
    lr_scale: float = 1.0
    """Of both learning rates: at the full one, freshly drawn heads make a fifth digit of a float32's last bit."""
    args: dict[str, int] = {}
    """Of both models."""


CASES = {
    "fasterrcnn_resnet50_fpn": Case(0.02, [16, 22], args=ALL_SAMPLED),
    "retinanet_resnet50_fpn": Case(0.01, [16, 22]),
    "maskrcnn_resnet50_fpn": Case(0.02, [16, 22], lr_scale=0.02, args=ONLY_TRUTH, steps=10, warmup=5),
    "keypointrcnn_resnet50_fpn": Case(
        0.02, [36, 43], file="people", lr_scale=0.02, args=ONLY_TRUTH, steps=10, warmup=5
    ),
    "ssd300_vgg16": Case(0.002, [80, 110], 5e-4, folder="one", steps=5, warmup=3),
}


@pytest.fixture(scope="module", autouse=True)
def _thin_backbones() -> Iterator[None]:
    models = import_torchvision().models
    build = models.resnet._resnet

    def build_thin(block: Any, layers: list[int], weights: Any, progress: bool, **args: Any) -> Any:
        return build(block, [1, 1, 1, 1], weights, progress, width_per_group=4, **args)

    with patch.object(models.resnet, "_resnet", build_thin), patch.dict(models.vgg.cfgs, D=THIN_VGG):
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of noise with brighter boxes, in COCO's form, for every size; and stand-ins for published weights."""
    root = tmp_path_factory.mktemp("published")
    _draw(root / "several", [(32, 64), (32, 50)])  # torchvision pads either to 32 × 64
    _draw(root / "one", [(300, 300), (300, 300)])
    _write_weights(root / "hub/hub/checkpoints")
    return root


def _draw(folder: Path, sizes: list[tuple[int, int]]) -> None:
    """Noise with three brighter objects an image, whose masks are L-shaped, and which are people with keypoints too."""
    random = np.random.default_rng(0)
    (folder / "images").mkdir(parents=True)
    images: list[dict[str, Any]] = []
    objects: list[dict[str, Any]] = []
    for number, (height, width) in enumerate(sizes, start=1):
        pixels = np.where(random.random((height, width, 3)) < 0.3, 255, 0).astype(np.uint8)
        images.append({"id": number, "file_name": f"{number}.png", "width": width, "height": height})
        for index in range(3):
            left, top = (int(random.uniform(0, side * 0.5)) for side in (width, height))
            across, down = (2 * int(random.uniform(side * 0.13, side * 0.25)) for side in (width, height))
            pixels[top : top + down, left : left + across, index] = 255
            right, bottom, middle = left + across, top + down, left + across // 2
            places = random.integers([left, top, 1], [right, bottom, 3], (17, 3))
            objects.append({
                "id": len(objects) + 1, "image_id": number, "category_id": index + 1, "iscrowd": 0,
                "bbox": [left, top, across, down], "keypoints": places.reshape(-1).tolist(), "num_keypoints": 17,
                "segmentation": [[left, top, middle, top, middle, bottom, left, bottom],
                                 [middle, top + down // 2, right, top + down // 2, right, bottom, middle, bottom]],
            })  # fmt: skip
        Image.fromarray(pixels).save(folder / f"images/{number}.png")
    classes = [{"id": index + 1, "name": name} for index, name in enumerate(["cat", "dog", "cow"])]
    people = [{"id": 1, "name": "person", "keypoints": list(_COCO), "skeleton": []}]
    for name, categories in {"instances": classes, "people": people}.items():
        # One person an image: the head for keypoints is what takes most time.
        found = [each | {"category_id": min(each["category_id"], len(categories))} for each in objects]
        found = found if name == "instances" else found[::3]
        content = {"images": images, "annotations": found, "categories": categories}
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


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
    return str(weights.url.rpartition("/")[2])


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_torchvisions_own_loop(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(data / "hub"))
    case, folder = CASES[name], data / CASES[name].folder
    run = _build(name, case, folder, tmp_path)
    if case.args == ALL_SAMPLED:  # else scores begin as nearly equal, and rounding chooses proposals
        run.model.detector.rpn.head.cls_logits.weight.data *= 10
    plain = _published_model(name, case, run.model.detector)
    losses, weights = _plain_loop(plain, case, folder, _first_label(name))
    run.freezing.train_mode(run.model)
    for step_batch, expected in zip(run.batches, losses, strict=False):
        found = paceline.train_step(run, step_batch).losses
        assert {each: found[each].item() for each in expected} == pytest.approx(expected, rel=1e-5, abs=1e-5), (
            step_batch.step
        )
    own = run.model.detector.state_dict()
    for each, tensor in weights.items():
        torch.testing.assert_close(own[each], tensor, rtol=1e-5, atol=1e-5, msg=each)


def _build(name: str, case: Case, folder: Path, out: Path) -> Any:
    part = {"data.{}.root": str(folder), "data.{}.annotations": f"{case.file}.json", "data.{}.images": "images"}
    changes: dict[str, Any] = {key.format(split): value for split in ("train", "val") for key, value in part.items()}
    changes |= {"data.batch_size": 2, "data.num_workers": 0, "train.threads": 1, "train.device": "cpu"}
    recipe: Any = paceline.Recipe.load(name)
    assert recipe.optimizer.lr == case.lr
    changes |= {
        "optimizer.lr": case.lr * case.lr_scale,
        "schedule.warmup_steps": case.warmup,
        "model.args": case.args or None,
    }
    for index, transform in enumerate(recipe.data.train.transforms):
        match transform.name:
            case "normalize":
                changes[f"data.train.transforms.{index}.mean"] = [0.0] * 3
                changes[f"data.train.transforms.{index}.std"] = [1.0] * 3
            case "random_horizontal_flip":
                changes[f"data.train.transforms.{index}.p"] = 1.0
            case "resize" if isinstance(transform.size, int):
                changes[f"data.train.transforms.{index}.size"] = SIZE
            case "random_shortest_size":
                changes[f"data.train.transforms.{index}.min_size"] = SIZE
            case "random_photometric_distort" | "random_zoom_out":
                changes[f"data.train.transforms.{index}.p"] = 0.0
            case "random_iou_crop":
                changes[f"data.train.transforms.{index}.sampler_options"] = [1.0]
    return paceline.build(name, changes, out)


def _published_model(name: str, case: Case, own: nn.Module) -> Any:
    """The model as the reference builds it; the layers that no file has begin as those of the recipe's model."""
    models = import_torchvision().models
    builder = models.get_model_builder(name)
    backbone = models.VGG16_Weights.IMAGENET1K_FEATURES if "vgg" in name else models.ResNet50_Weights.IMAGENET1K_V1
    size = {} if name.startswith("ssd") else {"min_size": SIZE, "max_size": 2 * SIZE}
    num_outputs = (1 if case.file == "people" else 3) + _first_label(name)
    model: Any = builder(weights=None, weights_backbone=backbone, num_classes=num_outputs, **size, **case.args)
    normalize: Any
    *_, normalize = paceline.Recipe.load(name).data.train.transforms
    assert normalize.mean == pytest.approx(model.transform.image_mean)
    assert normalize.std == pytest.approx(model.transform.image_std)
    model.transform.image_mean, model.transform.image_std = [0.0] * 3, [1.0] * 3
    given, made = own.state_dict(), model.state_dict()
    for each in made:
        if each.startswith(("backbone.body", "backbone.features")):
            assert torch.equal(given[each], made[each]), each
    model.load_state_dict({each: given[each] for each in made})
    learning = {each for each, parameter in model.named_parameters() if parameter.requires_grad}
    assert learning == {each for each, parameter in own.named_parameters() if parameter.requires_grad}
    return model


def _first_label(name: str) -> int:
    return int(not name.startswith("retinanet"))  # the others have a class for the background


def _plain_loop(
    model: nn.Module, case: Case, folder: Path, first_label: int
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """The losses of each step and the last weights of the reference's loop, in which an epoch is one step."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(learning, lr=case.lr * case.lr_scale, momentum=0.9, weight_decay=case.weight_decay)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.001, total_iters=case.warmup)
    drops = torch.optim.lr_scheduler.MultiStepLR(optimizer, case.milestones, gamma=0.1)
    images, targets = _flipped(folder, case.file, first_label)
    model.train()
    found = []
    with _mask_targets_of_torchvision():
        for _ in range(case.steps):
            losses = model([image.clone() for image in images], [dict(target) for target in targets])
            optimizer.zero_grad()
            sum(losses.values()).backward()
            optimizer.step()
            warmup.step()
            drops.step()
            found.append({name: loss.item() for name, loss in losses.items()})
    return found, model.state_dict()


@contextmanager
def _mask_targets_of_torchvision() -> Iterator[None]:
    """Inside, torchvision has its own function, which Paceline replaces by one that needs less memory."""
    heads = import_torchvision().models.detection.roi_heads
    spec = importlib.util.find_spec(heads.__name__)
    assert spec
    assert spec.loader
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    with patch.object(heads, "project_masks_on_boxes", fresh.project_masks_on_boxes):
        yield


def _flipped(folder: Path, file: str, first_label: int) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """The images and targets of a COCO file, flipped, by torchvision's transforms."""
    torchvision = import_torchvision()
    from torchvision.transforms.v2 import functional

    content = json.loads((folder / f"{file}.json").read_text(encoding="utf-8"))
    images, targets = [], []
    for entry in content["images"]:
        own = [each for each in content["annotations"] if each["image_id"] == entry["id"]]
        pixels = functional.pil_to_tensor(Image.open(folder / "images" / entry["file_name"]))
        images.append(functional.horizontal_flip(functional.to_dtype(pixels, torch.float32, scale=True)))
        height, width = pixels.shape[1:]
        corners = torchvision.ops.box_convert(torch.tensor([each["bbox"] for each in own]).float(), "xywh", "xyxy")
        boxes = torchvision.tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=(height, width))
        target = {"boxes": functional.horizontal_flip(boxes).as_subclass(Tensor)}
        target["labels"] = torch.tensor([each["category_id"] - 1 + first_label for each in own])
        target["masks"] = functional.horizontal_flip(torch.stack([_mask(each, height, width) for each in own]))
        target["keypoints"] = torch.tensor([each["keypoints"] for each in own]).float().view(-1, 17, 3)
        target["keypoints"][..., :2] += 0.5  # the middles of pixels, where the recipes have them
        target["keypoints"][..., 0] = width - target["keypoints"][..., 0]
        target["keypoints"] = target["keypoints"][:, _MIRRORED]
        targets.append(target)
    return images, targets


def _mask(annotation: dict[str, Any], height: int, width: int) -> Tensor:
    """The mask of an object whose outlines are rectangles, from the left upper corner clockwise."""
    mask = torch.zeros(height, width, dtype=torch.uint8)
    for left, top, _, _, right, bottom, _, _ in annotation["segmentation"]:
        mask[top:bottom, left:right] = 1
    return mask
