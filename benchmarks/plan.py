"""What `paceline plan` predicts, beside what real steps in fresh processes take."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import Goal, Section
from paceline.commands.measure_row import Measured, Trial, measure_row
from paceline.core.process import num_cores
from paceline.data import synthetic
from paceline.plan.grid import Grid, plan_rows
from paceline.plan.rows import Refused

_MEBI = 2**20
_SIDE_BY_SIDE = 4  # cases, at most: each takes some GiB
_CHECKPOINTING, _BF16 = "train.activation_checkpointing=blocks", "train.precision=bf16"


class Case(NamedTuple):
    """A recipe with overrides."""

    name: str
    recipe: str
    overrides: list[str]


def _images(name: str, model: str, size: int, batch: int, *more: str) -> Case:
    changes = [f"model.name={model}", f"data.train.transforms.0.size={size}", f"data.batch_size={batch}", *more]
    return Case(f"classification: {name}", "image_folder", changes)


def _minet(name: str, recipe: str, size: int, *more: str) -> Case:
    return Case(f"saliency: {name}", recipe, [f"data.train.transforms.0.size=[{size},{size}]", *more])


def _segmentation(name: str, recipe: str, batch: int, *more: str) -> Case:
    changes = ["data.train.transforms.2.size=160", "train.sync_bn=false", f"data.batch_size={batch}", *more]
    return Case(f"segmentation: {name}", recipe, changes)


def _video(name: str, model: str, size: int, *more: str) -> Case:
    changes = [f"model={{name: {model}}}", f"data.train.transforms.2.size=[{size},{size}]", "data.batch_size=4", *more]
    return Case(f"video: {name}", "video_sample", changes)


_MAE = "encoder_args={img_size: 96, patch_size: 8, embed_dim: 384, depth: 8, num_heads: 6}"
CASES = [
    _images("ResNet-18", "torchvision/resnet18", 128, 24),
    _images("ResNet-18, checkpointing", "torchvision/resnet18", 128, 24, _CHECKPOINTING),
    _images("ResNet-50, LAMB", "torchvision/resnet50", 128, 12, "optimizer={name: timm/lamb, lr: 0.001}"),
    _images("ResNet-50, EMA", "torchvision/resnet50", 128, 12, "train.averaging=ema"),
    _images("ResNet-50, bf16", "torchvision/resnet50", 96, 12, _BF16),
    _images("MobileNetV2", "torchvision/mobilenet_v2", 128, 16),
    _images("MobileNetV2, bf16, checkpointing, channels_last", "torchvision/mobilenet_v2", 160, 24, _BF16,
            _CHECKPOINTING, "train.channels_last=true"),
    _images("ResNet-18, 2 micro-batches", "torchvision/resnet18", 128, 32, "train.micro_batch_size=16"),
    _images("ViT-S/16, AdamW", "timm/vit_small_patch16_224", 224, 4, "optimizer={name: adamw, lr: 0.001}"),
    _images("ViT-S/16, checkpointing", "timm/vit_small_patch16_224", 224, 12, _CHECKPOINTING),
    _images("ViT-S/16, bf16", "timm/vit_small_patch16_224", 224, 4, _BF16),
    _minet("MINet-R50", "minet_resnet50", 128),
    _minet("MINet-R50, checkpointing", "minet_resnet50", 128, _CHECKPOINTING),
    _minet("MINet-R50, bf16", "minet_resnet50", 128, _BF16),
    _minet("MINet-R50, bf16, checkpointing", "minet_resnet50", 128, _BF16, _CHECKPOINTING),
    _minet("light MINet", "minet_light", 160),
    _minet("light MINet, multi-scale", "minet_multiscale", 160, "data.train.transforms.4.sizes=[96,128,160]",
           "data.batch_size=8", "train.activation_checkpointing=none"),
    Case("masked autoencoder: MAE ViT", "mae_vit_base", [
        "model.encoder=timm/vit_small_patch16_224", f"model.{_MAE}", "model.decoder_depth=2", "model.decoder_dim=256",
        "data.train.transforms.0.size=96", "data.train.transforms.3.num_patches=144",
        "data.val.transforms.3.num_patches=144", "train.precision=fp32", "data.batch_size=32",
        "train.micro_batch_size=32",
    ]),
    Case("masked autoencoder: MAE ViT, checkpointing", "mae_vit_base", [
        "model.encoder=timm/vit_small_patch16_224", f"model.{_MAE}", "model.decoder_depth=2", "model.decoder_dim=256",
        "data.train.transforms.0.size=96", "data.train.transforms.3.num_patches=144",
        "data.val.transforms.3.num_patches=144", "train.precision=fp32", "data.batch_size=32",
        "train.micro_batch_size=32", _CHECKPOINTING,
    ]),
    Case("detection: SSD300", "ssd300_pet", ["data.batch_size=2"]),
    Case("detection: FCOS", "ssd300_pet", [
        "model={name: fcos, backbone: timm/resnet18}", "data.batch_size=4",
    ]),
    _segmentation("FCN", "fcn_resnet50", 3),
    _segmentation("FCN, checkpointing", "fcn_resnet50", 3, _CHECKPOINTING),
    _segmentation("LR-ASPP", "lraspp_mobilenet_v3", 8),
    _video("R(2+1)D-18", "torchvision/video/r2plus1d_18", 64),
    _video("R3D-18, checkpointing", "torchvision/video/r3d_18", 64, _CHECKPOINTING),
]  # fmt: skip
QUICK = (0, 8)  # the places of those that a quick run takes


def measure(is_quick: bool) -> Section:
    """The errors of all cases."""
    cases = [CASES[place] for place in QUICK] if is_quick else CASES
    with _data():
        return _measure_errors(cases)


def _measure_errors(cases: Sequence[Case]) -> Section:
    rows, of_tensors, of_resident = [], [], []
    with ProcessPoolExecutor(min(_SIDE_BY_SIDE, num_cores()), multiprocessing.get_context("fork")) as pool:
        for case, (predicted, found) in zip(cases, pool.map(predict_and_measure, cases), strict=True):
            of_tensors.append(predicted / found.tensor_bytes - 1)
            of_resident.append(predicted / found.resident_bytes - 1)
            numbers = [f"{size / _MEBI:,.0f}" for size in (predicted, found.tensor_bytes, found.resident_bytes)]
            errors = f"{of_tensors[-1]:+.1%}", f"{of_resident[-1]:+.1%}"
            rows.append([case.name, numbers[0], numbers[1], errors[0], numbers[2], errors[1]])
            print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    most, mean = max(map(abs, of_tensors)), statistics.fmean(map(abs, of_tensors))
    most_resident = max(map(abs, of_resident))
    method = (
        "The peak that `paceline plan` predicts for a step, beside that of real steps on a CPU, each row in a fresh"
        " process. *Tensors* is the peak of live tensor bytes within a step; *resident* is the most that the process"
        " grew by since before the model was built. MiB. Data is drawn, or assumed as `plan` does."
    )
    goals = [
        Goal("each within 8 % of the peak tensor bytes", f"{most:.1%}", most <= 0.08),
        Goal("on average within 4 % of them", f"{mean:.1%}", mean <= 0.04),
        Goal("each within 20 % of the resident growth", f"{most_resident:.1%}", most_resident <= 0.2),
    ]
    header = ["recipe", "predicted", "tensors", "error", "resident growth", "error"]
    return Section("Planned memory", method, header, rows, goals)


def predict_and_measure(case: Case) -> tuple[int, Measured]:
    """Bytes by the plan, and what real steps took."""
    grid = Grid(case.recipe, case.overrides)
    (row,) = plan_rows(grid, [{"procs": "1"}])
    if isinstance(row, Refused):
        raise TypeError(f"{case.name}: {row.reason}")
    return row.step.memory.total, measure_row(replace(Trial.of(grid, row, []), steps=1, evaluates=False))


@contextmanager
def _data() -> Iterator[None]:
    """Drawn videos and images with boxes, where recipes look for them."""
    before = os.environ.get("PACELINE_DATA")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PACELINE_DATA"] = folder
        try:
            for name, write in (("video", synthetic.write_video), ("detection", synthetic.write_detection)):
                place = Path(folder) / f"{name}_sample"
                place.mkdir()
                write(place, 8, 0)
            yield
        finally:
            if before is None:
                del os.environ["PACELINE_DATA"]
            else:
                os.environ["PACELINE_DATA"] = before
