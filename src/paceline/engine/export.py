"""A trained model as files that other programs load: safetensors, an ExportedProgram, ONNX.

Each file is loaded again and compared with the model on real samples before it is kept.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from paceline.checkpoint.files import TensorFile, read_tensors, write_file
from paceline.checkpoint.weights import to_half
from paceline.core.atomic_write import partial_path, sync_folder
from paceline.core.errors import DataError, ExportError, UsageError
from paceline.data.skip_list import UNREADABLE
from paceline.data.split_loader import SplitLoader
from paceline.data.transforms.batch import Normalize
from paceline.engine.export_graph import Graph, Outputs, open_onnx, open_program, save_onnx, trace
from paceline.engine.run import Run
from paceline.tasks.task import Task

Format = Literal["safetensors", "pt2", "onnx"]
InputKind = Literal["normalized", "float", "uint8"]
TOLERANCE = 1e-4
NUM_SAMPLES = 20
_BATCH_SIZE = 4  # of the samples; a graph is traced with 2
_LARGEST = {"float": 1.0, "uint8": 255.0}
_WRITTEN = "preprocessing.json"


@dataclass(frozen=True)
class ExportedFile:
    """A file that was written and checked."""

    path: Path
    size: int
    num_samples: int
    max_difference: float
    """Of its outputs from the model's; where values are larger than 1, as a share of the largest."""


class ExportOptions(NamedTuple):
    """What to export."""

    formats: Sequence[Format] = ("safetensors", "pt2", "onnx")
    dtype: torch.dtype | None = None
    """What floats in the safetensors file are rounded to; None: not at all."""
    input: InputKind = "normalized"
    """What graphs take: images as the model takes them, or pixels, from 0 to 1 or of uint8."""


class Samples(NamedTuple):
    """Real samples, one by one: [1, C, H, W], or [1, C, T, H, W] for clips."""

    inputs: list[Tensor]
    """As the exported graph takes them."""
    images: list[Tensor]
    """As the model takes them."""


class ImageNormalize(nn.Module):
    """(pixel / largest − mean) / std by channel, inside a graph."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], largest: float, ndim: int) -> None:
        super().__init__()
        shape = [-1] + [1] * (ndim - 2)
        self.factor: Tensor
        self.offset: Tensor
        pairs = list(zip(mean, std, strict=True))
        self.register_buffer("factor", torch.tensor([1 / (largest * each) for each in std]).view(shape))
        self.register_buffer("offset", torch.tensor([-middle / each for middle, each in pairs]).view(shape))

    def forward(self, pixels: Tensor) -> Tensor:
        return pixels.float() * self.factor + self.offset


def export_outputs(task: Task) -> Callable[[nn.Module, Tensor], Outputs]:
    """What a task gives of a model's outputs; a task of your own need not say."""
    return getattr(task, "export_outputs", partial(Task.export_outputs, task))


class ExportedModel(nn.Module):
    """A model that takes images or pixels, and gives named tensors."""

    def __init__(self, model: nn.Module, task: Task, normalize: nn.Module) -> None:
        super().__init__()
        self.model, self.normalize = model, normalize
        self._outputs = export_outputs(task)

    def forward(self, images: Tensor) -> Outputs:
        return self._outputs(self.model, self.normalize(images))


def read_samples(loader: SplitLoader, kind: InputKind, number: int = NUM_SAMPLES) -> Samples:
    """Samples from all over a split, or as many as there are; those that cannot be read are passed over."""
    samples = Samples([], [])
    size = len(loader.dataset)
    spread = np.unique(np.linspace(0, size - 1, min(size, number)).astype(np.int64))
    for index in [*spread, *np.setdiff1d(np.arange(size), spread)]:
        if len(samples.images) == number:
            break
        with suppress(*UNREADABLE):
            fetched = loader.fetch(0, np.array([index]))
            image = _first_view(loader.transform_batch(fetched, 0, torch.device("cpu"))["image"])
            samples.images.append(image)
            samples.inputs.append(image if kind == "normalized" else _pixels(loader, fetched["image"], kind))
    if not samples.images:
        raise DataError(
            f"none of {size} samples can be read to check the exported model on; give others with --samples"
        )
    return samples


def _pixels(loader: SplitLoader, images: Tensor, kind: InputKind) -> Tensor:
    first = loader.batch_transforms[:1]
    if images.dtype != torch.uint8 or any(not isinstance(each, Normalize) for each in first):
        raise UsageError(
            f"--input {kind}: the evaluation's transforms do more with the pixels of a batch than normalize; export"
            " with --input normalized, and apply them yourself"
        )
    pixels = _first_view(images)
    return pixels if kind == "uint8" else pixels.float() / 255


def _first_view(images: Tensor) -> Tensor:
    """One clip of each video, if there are several."""
    return images[:, 0] if images.ndim == 6 else images


def normalization(loader: SplitLoader, channels: int) -> tuple[list[float], list[float]]:
    """The mean and std of each channel that evaluation normalizes with: 0 and 1 if it does not."""
    for transform in loader.batch_transforms:
        if isinstance(transform, Normalize):
            repeat = 1 if len(transform.mean) == channels else channels
            return [*transform.mean] * repeat, [*transform.std] * repeat
    return [0.0] * channels, [1.0] * channels


def export(
    run: Run, loader: SplitLoader, folder: Path, options: ExportOptions, about: Mapping[str, Any]
) -> list[ExportedFile]:
    """Write the files of a run's model into a folder, and beside them a JSON file on how to prepare images.

    All are written aside and checked first: if one cannot be, the folder stays as it was. `about` is added to the JSON.
    """
    samples = read_samples(loader, options.input)
    mean, std = normalization(loader, samples.images[0].shape[1])
    ndim, model = samples.images[0].ndim, run.model.eval()
    inner = nn.Identity() if options.input == "normalized" else ImageNormalize(mean, std, _LARGEST[options.input], ndim)
    exported = ExportedModel(model, run.task, inner).eval()
    aside = partial_path(folder)
    try:
        aside.mkdir(parents=True)
        with torch.no_grad():
            expected = _expected(run.task, model, samples, options)
            graph = trace(exported, samples.inputs[0]) if {"pt2", "onnx"} & {*options.formats} else None
            checked = [
                _write(aside, name, exported, graph, options.dtype, samples, expected) for name in options.formats
            ]
        described = {
            **about,
            **_describe(run.task, samples, graph, options, mean, std, expected),
            "files": {each.path.name: {**asdict(each), "path": each.path.name} for each in checked},
        }
        (aside / _WRITTEN).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        _move(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return [ExportedFile(folder / each.path.name, *list(asdict(each).values())[1:]) for each in checked]


def _expected(task: Task, model: nn.Module, samples: Samples, options: ExportOptions) -> list[Outputs]:
    """The model's own outputs; none if it can give weights alone, and no more is wanted."""
    try:
        return [export_outputs(task)(model, images) for images in _batches(samples.images)]
    except ExportError:
        if {*options.formats} == {"safetensors"}:
            return []
        raise


def _move(aside: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for path in sorted(aside.iterdir(), key=lambda path: path.name == _WRITTEN):
        path.replace(folder / path.name)
    sync_folder(folder)


def _batches(samples: Sequence[Tensor]) -> list[Tensor]:
    """The first sample alone, the others in batches of one shape."""
    found = [samples[0]]
    for _, group in groupby(samples[1:], key=lambda sample: sample.shape):
        together = torch.cat(list(group))
        found += [together[start : start + _BATCH_SIZE] for start in range(0, len(together), _BATCH_SIZE)]
    return found


def _write(
    folder: Path,
    name: Format,
    exported: ExportedModel,
    graph: Graph | None,
    dtype: torch.dtype | None,
    samples: Samples,
    expected: Sequence[Outputs],
) -> ExportedFile:
    path = folder / f"model.{name}"
    call: Callable[[Tensor], Outputs]
    if name == "safetensors":
        call = _save_weights(path, exported, dtype)
        found = _max_difference(call, samples.images, expected)
        limit = TOLERANCE if dtype is None else float("inf")  # half precision differs by what it rounds
    else:
        assert graph is not None
        if name == "pt2":
            torch.export.save(graph.program, path)
            call = open_program(path)
        else:
            save_onnx(graph, path)
            call = open_onnx(path, list(graph.outputs))
        found, limit = _max_difference(call, samples.inputs, expected), TOLERANCE
    if not found < limit:
        raise ExportError(
            f"{path.name}: its outputs differ from the model's by {found:.3g}, expected less than {limit:g}"
        )
    size = sum(each.stat().st_size for each in folder.glob(f"{path.name}*"))  # large weights are a file of their own
    return ExportedFile(path, size, len(samples.images), found)


def _save_weights(path: Path, exported: ExportedModel, dtype: torch.dtype | None) -> Callable[[Tensor], Outputs]:
    """Write the weights; returns the model with the weights of the file."""
    weights = exported.model.state_dict()
    if dtype is not None:
        weights = {name: to_half(path, name, tensor, dtype) for name, tensor in weights.items()}
    write_file(path, TensorFile(weights))
    loaded = copy.deepcopy(exported)
    loaded.normalize = nn.Identity()
    loaded.model.load_state_dict(read_tensors(path))
    return loaded


def _max_difference(call: Callable[[Tensor], Outputs], inputs: Sequence[Tensor], expected: Sequence[Outputs]) -> float:
    largest = 0.0
    for batch, wanted in zip(_batches(inputs), expected, strict=False):
        found = call(batch)
        for name, value in wanted.items():
            scale = max(1.0, float(value.abs().max()))
            differences = (found[name].double() - value.double()).abs()
            largest = max(largest, float(differences.nan_to_num(float("inf")).max()) / scale)
    return largest


def _describe(
    task: Task,
    samples: Samples,
    graph: Graph | None,
    options: ExportOptions,
    mean: list[float],
    std: list[float],
    expected: Sequence[Outputs],
) -> dict[str, Any]:
    """What a program must know to use the files."""
    image = samples.inputs[0]
    channels = image.shape[1]
    outputs = expected[0] if expected else {}
    shape = graph.input if graph else ["batch", *image.shape[1:]]
    return {
        "classes": task.classes,
        "input": {
            "name": "images",
            "dtype": str(image.dtype).removeprefix("torch."),
            "layout": "NCTHW" if image.ndim == 5 else "NCHW",
            "shape": shape,
            "channel_order": "RGB" if channels == 3 else "gray" if channels == 1 else channels,
            "pixels": options.input,
        },
        "size": list(image.shape[-2:]),
        "mean": mean,
        "std": std,
        "normalize_inside": options.input != "normalized",
        "outputs": graph.outputs if graph else {name: ["batch", *value.shape[1:]] for name, value in outputs.items()},
        **getattr(task, "export_details", dict)(),
    }
