"""The transforms of torchvision.transforms.v2 that recipes can name, and their arguments as JSON Schema."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Sequence
from numbers import Number
from typing import Any, Literal, Union, get_args, get_origin

from paceline.core.torchvision_ops import import_torchvision

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
    return {_snake_case(kind.__name__): kind for kind in kinds}


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.replace("IoU", "Iou")).lower()


def _signature(kind: type) -> dict[str, Any]:
    """JSON Schema of what a recipe can give; parameters that take objects of Python alone are left out."""
    nodes = {}
    for name, parameter in inspect.signature(kind, eval_str=True).parameters.items():
        found = _nodes(parameter.annotation, parameter.default)
        if found and name != "inplace":
            node = found[0] if len(found) == 1 else {"anyOf": found}
            nodes[name] = (
                node if parameter.default is parameter.empty else node | {"default": _plain(parameter.default)}
            )
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


def _plain(default: Any) -> Any:
    return list(default) if isinstance(default, tuple) else default
