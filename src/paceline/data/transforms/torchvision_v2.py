"""Transforms as users have them: those of torchvision.transforms.v2, by name, and any other callable."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Sequence
from numbers import Number
from typing import Any, ClassVar, Literal, Union, get_args, get_origin

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.errors import DataError, RecipeError
from paceline.core.registry import Library, register
from paceline.core.torchvision_ops import import_torchvision
from paceline.core.user_code import user_code
from paceline.data.batch import Sample
from paceline.data.datasets.torch_dataset import image_array
from paceline.data.rng import seeded_generators
from paceline.data.transforms.base import BatchTransform, SampleTransform

_REASONS = {
    "take transforms: register a function that makes them": ("Compose", "RandomApply", "RandomChoice", "RandomOrder"),
    "work on whole batches: use mixup and cutmix": ("MixUp", "CutMix"),
    "take floats: use normalize": ("Normalize",),
    "give several images": ("FiveCrop", "TenCrop"),
    "change the type alone": ("ToTensor", "ToImage", "ToPILImage", "PILToTensor", "ToPureTensor"),
    "take a dtype; images become floats by themselves": ("ToDtype", "ConvertImageDtype"),
    "take objects of Python": ("Transform", "Lambda", "LinearTransformation"),
    "remove some fields of an object and not others": ("SanitizeBoundingBoxes", "SanitizeKeyPoints"),
    "change what boxes are given as": ("ConvertBoundingBoxFormat", "SetClampingMode"),
}
LEFT_OUT = {name: reason for reason, names in _REASONS.items() for name in names}
"""Why some have no name here."""

_TYPES: dict[Any, str] = {
    bool: "boolean", int: "integer", float: "number", str: "string", Number: "number", type(None): "null",
}  # fmt: skip


def v2_signatures() -> dict[str, dict[str, Any]]:
    """The arguments of each transform that a recipe can name, by its name in snake_case."""
    return {name: _signature(kind) for name, kind in sorted(v2_classes().items()) if kind.__name__ not in LEFT_OUT}


def v2_classes() -> dict[str, type]:
    """All transforms of the installed version, by their names in snake_case."""
    import_torchvision()
    from torchvision.transforms import v2

    kinds = [kind for kind in vars(v2).values() if inspect.isclass(kind) and issubclass(kind, v2.Transform)]
    names = [re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__.replace("IoU", "Iou")).lower() for kind in kinds]
    return dict(zip(names, kinds, strict=True))


def _signature(kind: type) -> dict[str, Any]:
    """JSON Schema of what a recipe can give; parameters that take objects of Python alone are left out."""
    nodes = {}
    for name, parameter in inspect.signature(kind, eval_str=True).parameters.items():
        found = _nodes(parameter.annotation, parameter.default)
        if found and name != "inplace":
            node, default = found[0] if len(found) == 1 else {"anyOf": found}, parameter.default
            if default is not parameter.empty:
                node = node | {"default": list(default) if isinstance(default, tuple) else default}
            nodes[name] = node
    return nodes


def _nodes(annotation: Any, default: Any) -> list[dict[str, Any]]:
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        found = [node for each in get_args(annotation) for node in _nodes(each, default)]
        unique = [node for place, node in enumerate(found) if node not in found[:place]]
        return [node for node in unique if node == _of_floats(node) or _of_floats(node) not in unique]
    if origin is Literal:
        return [{"type": "string", "enum": list(get_args(annotation))}]
    if inspect.isclass(origin or annotation) and issubclass(origin or annotation, Sequence) and annotation is not str:
        items = [node for each in get_args(annotation)[:1] for node in _nodes(each, None)] or [{"type": "number"}]
        length = {"minItems": len(default), "maxItems": len(default)} if isinstance(default, tuple | list) else {}
        return [{"type": "array", "items": items[0], **length}]
    if annotation is inspect.Parameter.empty:
        return [{"type": _TYPES[type(default)]}] if type(default) in _TYPES else []
    return [{"type": _TYPES[annotation]}] if annotation in _TYPES else []


def _of_floats(node: dict[str, Any]) -> dict[str, Any]:
    """The same for floats, which takes whole numbers too."""
    if node.get("type") == "array":
        return node | {"items": _of_floats(node["items"])}
    return {"type": "number"} if node == {"type": "integer"} else node


@register.transform("torchvision/", library=Library("torchvision", v2_signatures))
def torchvision_transform(
    name: str, num_classes: object = None, pairs: object = None, **arguments: Any
) -> TorchvisionTransform:
    """A transform of torchvision.transforms.v2."""  # which needs nothing of what the builder knows
    kinds = v2_classes()
    if name not in kinds:
        raise ValueError(f"the installed torchvision has no transform {name}")
    return TorchvisionTransform(f"torchvision/{name}", kinds[name](**arguments))


def as_transform(name: str, made: Any) -> SampleTransform | BatchTransform:
    """What was registered as a transform, if it has `draws`; else the same behind that contract."""
    if hasattr(made, "draws"):
        transform: SampleTransform | BatchTransform = made
        return transform
    if not callable(made):
        found = "nothing" if made is None else type(made).__name__
        raise RecipeError(f"transform {name}: its function gave {found}, expected a transform of torchvision's v2")
    return TorchvisionTransform(name, made)


class TorchvisionTransform:
    """A transform of v2, which is given a sample's image, mask and objects as tv_tensors; or any other callable.

    Another callable is given the image alone, as a tensor [C, H, W]. What it draws at random follows from (seed,
    epoch, sample) and its place among the transforms.
    """

    draws: ClassVar[int] = 1
    uses_global_rng: ClassVar[bool] = True

    def __init__(self, name: str, transform: Callable[..., Any]) -> None:
        import_torchvision()
        from torchvision.transforms.v2 import Transform

        self.name = name
        self._transform = transform
        self._takes_samples = isinstance(transform, Transform)

    def __call__(self, sample: Sample, draws: NDArray[np.float64]) -> Sample:
        given = _tv_tensors(sample)
        with user_code(f"transform {self.name}", DataError), seeded_generators(float(draws[0])):
            changed = (
                self._transform(given) if self._takes_samples else given | {"image": self._transform(given["image"])}
            )
            image = image_array(changed["image"])
            arrays = {name: changed[name].numpy() for name in given if name != "image"}
        if refusal := _refusal(sample, image, arrays):
            raise DataError(f"transform {self.name}: {refusal}; use one of ours")
        arrays.pop("keypoints", None)
        return {**sample, **arrays, "image": image}


def _tv_tensors(sample: Sample) -> dict[str, Any]:
    """The fields that may be moved, as the types by which v2 tells them apart."""
    from torchvision import tv_tensors

    image = sample["image"]
    size = image.shape[-3:-1]
    kind = tv_tensors.Image if image.ndim == 3 else tv_tensors.Video
    wrapped = {"image": kind(_tensor(np.moveaxis(image, -1, -3)))}
    wrapped |= {name: tv_tensors.Mask(_tensor(sample[name])) for name in ("mask", "masks") if name in sample}
    if "boxes" in sample:
        wrapped["boxes"] = tv_tensors.BoundingBoxes(_tensor(sample["boxes"]), format="XYXY", canvas_size=size)
    if "keypoints" in sample:
        wrapped["keypoints"] = tv_tensors.KeyPoints(_tensor(sample["keypoints"][..., :2]), canvas_size=size)
    return wrapped


def _refusal(sample: Sample, image: NDArray[Any], arrays: Sample) -> str | None:
    """What the transform did that other fields of the sample would not follow."""
    if "matrix" in sample and image.shape != sample["image"].shape:
        return "changes the size of images whose masks are kept as they were read"
    if "keypoints" in arrays and not np.array_equal(arrays["keypoints"], sample["keypoints"][..., :2]):
        return "moves keypoints, of which it does not exchange left and right"
    if "boxes" in arrays and len(arrays["boxes"]) != len(sample["boxes"]):
        return "removes boxes, but not the other fields of their objects"
    return None


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    # In memory of its own: what a data set keeps must not be written to.
    return torch.from_numpy(np.array(array, order="C"))
