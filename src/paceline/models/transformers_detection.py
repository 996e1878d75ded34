"""Transformer detectors of Hugging Face's transformers, under the contract of all detectors.

Models, their configurations and what they predict are the library's. Losses are computed by `detr_losses`, so that they
are divided by the objects of the global batch and the host reads once in a micro-batch. Whatever else in the library
waits for a GPU, or has no deterministic gradient on one, is replaced in the instance; the library stays unchanged.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from paceline.core.arguments import Count, Share
from paceline.core.errors import ArgumentError, UsageError, missing_extra
from paceline.core.registry import Library, register
from paceline.core.torchvision_ops import import_torchvision
from paceline.core.world import constant
from paceline.models.bilinear_sampling import grid_sample
from paceline.models.detector import Detections, LossParts, Target
from paceline.models.detr_denoising import denoising_queries
from paceline.models.detr_families import FAMILIES
from paceline.models.detr_losses import DetrLosses
from paceline.models.detr_matching import to_corners
from paceline.models.model_errors import is_allocation_error

_HEAD = re.compile(r"(score_head|\.class_embed|class_embed\.\d+|denoising_class_embed)$")
ConfigArgs = Mapping[str, bool | int | float | str | Sequence[bool | int | float | str] | None]


@register.model("transformers/", library=Library("transformers", lambda: sorted(FAMILIES)))
def build_transformers_detector(
    name: str,
    num_classes: int,
    in_channels: int,
    config: Annotated[
        str | None, Field(description="A folder with a config.json, or a model of the hub that was downloaded before.")
    ] = None,
    args: Annotated[ConfigArgs | None, Field(description="Fields of the model's configuration class.")] = None,
    backbone_args: Annotated[ConfigArgs | None, Field(description="Fields of the backbone's configuration.")] = None,
    score_thresh: Annotated[Share, Field(description="Detections with lower scores are left out.")] = 0.0,
    detections_per_img: Count = 100,
) -> TransformersDetector:
    """A detector of Hugging Face's transformers; load published weights with `model.weights`."""
    if name not in FAMILIES:
        raise ValueError(f"there is no detector transformers/{name}; there are {', '.join(sorted(FAMILIES))}")
    library: Any = import_transformers()
    configuration = _configuration(library, name, num_classes, in_channels, config, args, backbone_args)
    try:
        detector = library.AutoModelForObjectDetection.from_config(configuration)
    except (RuntimeError, TypeError, ValueError, LookupError, ArithmeticError, AssertionError) as error:
        if is_allocation_error(error):
            raise
        reason = " ".join((str(error) or type(error).__name__).split())
        raise ArgumentError("args", f"{name} cannot be built from args and backbone_args: {reason}") from error
    for module in detector.modules():
        if isinstance(module, nn.BatchNorm2d):  # as published; the library starts it near 0
            nn.init.ones_(module.weight)
    return TransformersDetector(detector, score_thresh, detections_per_img)


def import_transformers() -> ModuleType:
    """The transformers package; one line with the command to run if it is not installed."""
    if missing := missing_extra("transformers"):
        raise UsageError(f"models of transformers: {missing}")
    import_torchvision()  # the library imports it, which fails without its compiled operators
    return importlib.import_module("transformers")


def _configuration(
    library: Any,
    name: str,
    num_classes: int,
    in_channels: int,
    source: str | None,
    args: ConfigArgs | None,
    backbone_args: ConfigArgs | None,
) -> Any:
    """The library's configuration object: its defaults or those of a file, changed by arguments. Needs no network."""
    kind = library.CONFIG_MAPPING[name]
    made = kind() if source is None else read_config(library, source)
    if not isinstance(made, kind):
        raise ArgumentError("config", f"{source} is of a model {made.model_type!r}, not of {name!r}")
    own, backbone = (_fields(each, library.PreTrainedConfig) for each in (made, made.backbone_config))
    for key, given, known in (("args", args, own), ("backbone_args", backbone_args, backbone)):
        if unknown := [each for each in given or {} if each not in known]:
            raise ArgumentError(f"{key}.{unknown[0]}", f"{name} has no such field; it has {', '.join(sorted(known))}")
    own |= args or {}
    if own.get("projector_scale_factors") == []:  # the library's default, with which there is no projector
        own["projector_scale_factors"] = [1.0]
    if isinstance(number := own["num_queries"], int) and number < 1:
        raise ArgumentError("args.num_queries", f"expected a number of at least 1, got {number}")
    labels = {"id2label": {number: str(number) for number in range(num_classes)}, "label2id": None}
    backbone |= {"num_channels": in_channels, **(backbone_args or {})}
    from huggingface_hub.errors import StrictDataclassError

    try:
        return kind(**own | labels | {"backbone_config": type(made.backbone_config)(**backbone)})
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise ArgumentError("args", " ".join(str(error).split())) from error


def _fields(config: Any, base: Any) -> dict[str, Any]:
    """What a configuration is made of, without what it derives from that."""
    own = {each.name for each in dataclasses.fields(config)} - {each.name for each in dataclasses.fields(base)}
    fields = {name: value for name, value in config.to_dict().items() if name in own and not name.startswith("_")}
    # Stages are chosen by number: names of a default configuration need not exist in a changed one.
    return fields | ({"out_indices": config.out_indices} if hasattr(config, "out_indices") else {})


def read_config(library: Any, source: str | Path) -> Any:
    """The configuration in a folder, or of a model in the hub's cache; ArgumentError if there is none."""
    file = Path(source) / "config.json"
    try:
        if file.is_file():
            json.loads(file.read_bytes())
    except ValueError as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise ArgumentError("config", f"{file}{line} is damaged: {error}; download it again") from error
    try:
        return library.AutoConfig.from_pretrained(str(source), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ArgumentError(
            "config",
            f"{source} has no config.json in a folder of this name or in the hub's cache; download it with"
            f" `hf download {source} config.json model.safetensors`, or with --local-dir into a folder to name here",
        ) from error


class TransformersDetector(nn.Module):
    """A detector of transformers that takes images as they are: the recipe's transforms resize and normalize them."""

    def __init__(self, detector: Any, score_thresh: float = 0.0, detections_per_img: int = 100) -> None:
        super().__init__()
        remove_ties(detector)
        for module in detector.modules():
            _replace_waits(module)
        family = FAMILIES[detector.config.model_type]
        self._losses: DetrLosses = family.losses(detector.config)
        detector.loss_function = self._losses
        self.detector = detector
        self.loss_names = tuple(self._losses.names)
        self.divisors = self._losses.divisors
        self.size_divisible: int = family.size_divisible(detector.config)
        self._score_thresh, self._detections_per_img = score_thresh, detections_per_img
        for name, parameter in self.named_parameters():
            if name.endswith(".mask_token"):  # used in pretraining alone
                parameter.requires_grad_(False)
        heads = [name for name, _ in self.named_modules() if _HEAD.search(name)]
        self.default_cfg = {
            "classifier": [each for each in heads if not isinstance(self.get_submodule(each), nn.ModuleList)]
        }  # replaced where weights have other classes

    def forward(
        self,
        images: Tensor,
        targets: Sequence[Target] | None = None,
        image_sizes: Sequence[Sequence[int]] | None = None,
    ) -> LossParts | list[Detections]:
        """The losses of images [N, C, H, W] beside their targets; without targets, what is detected in each image.

        `image_sizes` are height and width of each image without padding, if there is any.
        """
        if targets is None:
            return [self._select(*each) for each in zip(*self.candidates(images, image_sizes), strict=True)]
        padded, mask = self._pad(images, image_sizes)
        parts: LossParts = self.detector(padded, pixel_mask=mask, labels=_labels(targets, padded)).loss_dict
        embedding = getattr(self.detector.model, "denoising_class_embed", None)
        if embedding is not None and not any(len(each["labels"]) for each in targets):
            name = next(reversed(parts))  # so that every parameter has a gradient, on each process
            parts[name] = (parts[name][0] + 0 * embedding.weight.sum(), parts[name][1])
        return parts

    def candidates(self, images: Tensor, image_sizes: Sequence[Sequence[int]] | None = None) -> tuple[Tensor, Tensor]:
        """A box of every query [N, Q, 4], and its scores [N, Q, C]."""
        padded, mask = self._pad(images, image_sizes)
        found = self.detector(padded, pixel_mask=mask)
        boxes = to_corners(found.pred_boxes.float()) * _size(padded).float()
        return boxes, found.logits.float().sigmoid()

    def count(self, images: Any, targets: Sequence[Target]) -> dict[str, float]:
        """What each loss of a micro-batch counts; it depends on the targets alone."""
        numbers = [len(each["labels"]) for each in targets]
        return self._losses.count(numbers, self._losses.num_groups if self.training else 1)

    def _select(self, boxes: Tensor, scores: Tensor) -> Detections:
        """The best scores of all queries and classes, as the library's post-processing; nothing is suppressed."""
        number = min(self._detections_per_img, len(scores))
        best, index = scores.flatten().topk(number)
        kept = best > self._score_thresh
        index = index[kept]
        return Detections(boxes[index // scores.shape[1]], best[kept], index % scores.shape[1])

    def _pad(self, images: Tensor, sizes: Sequence[Sequence[int]] | None) -> tuple[Tensor, Tensor | None]:
        """Images whose sides are multiples of a number, and where they are no padding; None: nowhere."""
        height, width = images.shape[-2:]
        padding = (0, -width % self.size_divisible, 0, -height % self.size_divisible)
        if sizes is None and not any(padding):
            return images, None
        padded = F.pad(images, padding)
        ends = constant(sizes or [(height, width)] * len(images), images.device)[:, :, None]  # [N, 2, 1]
        rows, columns = (
            torch.arange(side, device=images.device) < ends[:, axis] for axis, side in enumerate(padded.shape[2:])
        )
        return padded, (rows[:, :, None] & columns[:, None]).long()


def remove_ties(detector: Any) -> None:
    """Remove heads that the decoder has too, so that each parameter has one name."""
    for name in ("class_embed", "bbox_embed"):
        if getattr(detector.model.decoder, name, None) is not None:
            delattr(detector, name)


def _labels(targets: Sequence[Target], images: Tensor) -> list[dict[str, Tensor]]:
    """Targets as the library has them: centers and sizes of boxes, in shares of the image."""
    size = _size(images)
    labels = []
    for target in targets:
        corners = target["boxes"].to(size) / size
        low, high = corners[:, :2], corners[:, 2:]
        labels.append({"class_labels": target["labels"], "boxes": torch.cat([(low + high) / 2, high - low], -1)})
    return labels


def _size(images: Tensor) -> Tensor:
    height, width = images.shape[-2:]
    dtype = torch.float64 if images.dtype == torch.float64 else torch.float32
    return constant([width, height, width, height], images.device, dtype)


class _Instead:
    """A module or package in which some names stand for other objects."""

    def __init__(self, original: Any, **others: Any) -> None:
        self._original = original
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class _Finite:
    """Stands for the answer that all values are finite: the run reports those that are not."""

    def all(self) -> bool:
        return True


def _as_tensor(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    return constant(values, device, dtype)


def _empty(size: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Room for numbers; the sizes of feature maps, which are written one by one, are kept on the host."""
    return torch.empty(size, dtype=dtype, device="cpu" if dtype == torch.long else device)


_TORCH = {"torch": _Instead(torch, as_tensor=_as_tensor, empty=_empty, isfinite=lambda _: _Finite())}
_SAMPLING = {"nn": _Instead(nn, functional=_Instead(F, grid_sample=grid_sample))}
_ATTENTION = "multi_scale_deformable_attention_v2"
_REPLACED: dict[str, dict[str, Any]] = {
    "grid_sample": _SAMPLING,
    "torch_compilable_check": {"torch_compilable_check": lambda *_: None},  # of shapes, by values on the device
    "get_contrastive_denoising_training_group": {"get_contrastive_denoising_training_group": denoising_queries},
    **dict.fromkeys(("as_tensor", "empty", "isfinite"), _TORCH),
}
"""What a function that uses a name finds in place of the library's own globals."""
_CACHED = ("_cached_generate_anchors", "_cached_build_2d_sinusoidal_position_embedding")


def _replace_waits(module: Any) -> None:
    """Have a module of the library use other functions where it waits for the device; it computes the same."""
    forward: Callable[..., Any] | None = _rebound(type(module).forward)
    if type(module).__name__.endswith("HybridEncoder"):
        forward = _with_own_list(forward or type(module).forward)
    if forward is not None:
        module.forward = MethodType(forward, module)
    if core := _rebound(getattr(module, "ms_deformable_attn_core", None)):
        module.ms_deformable_attn_core = core
    for name in _CACHED:  # a plan's fake tensors must not be kept for others
        if cached := getattr(type(module), name, None):
            setattr(module, name, inspect.unwrap(cached))


def _with_own_list(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a copy of the list that it changes, so that activation checkpointing can call it again."""

    def called(self: Any, features: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        return forward(self, list(features), *args, **kwargs)

    return called


@cache
def _rebound(function: Callable[..., Any] | None) -> FunctionType | None:
    """A copy of a function of the library with other globals; None if it uses nothing that has to be replaced."""
    plain: Any = inspect.unwrap(function) if function is not None else None
    if not isinstance(plain, FunctionType) or not plain.__module__.startswith("transformers."):
        return None
    names = plain.__code__.co_names
    others = {key: value for name, replaced in _REPLACED.items() if name in names for key, value in replaced.items()}
    if _ATTENTION in names and (attention := _rebound(plain.__globals__.get(_ATTENTION))):
        others[_ATTENTION] = attention
    if not others:
        return None
    copy = FunctionType(
        plain.__code__, {**plain.__globals__, **others}, plain.__name__, plain.__defaults__, plain.__closure__
    )
    copy.__kwdefaults__ = plain.__kwdefaults__
    return copy
