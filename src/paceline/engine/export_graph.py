"""A model as a graph: traced by torch.export, written as ONNX, and loaded again."""

from __future__ import annotations

import logging
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from paceline.core.errors import ExportError, PacelineError, in_one_line

Outputs = dict[str, Tensor]
"""Tensors by name."""
Shape = list[int | str]
"""A number, or the name of a side that may have any length."""
_OPERATOR = re.compile(
    r"OpOverload\(op='([\w.:]+)'|(?:operator|function) (?:for )?'?((?:aten|torchvision|prims)[.:]+\w+)"
)
_TORCH = str(Path(torch.__file__).parent)
_INPUT = "images"


@dataclass(frozen=True)
class Graph:
    """A traced model."""

    program: ExportedProgram
    input: Shape
    outputs: dict[str, Shape]


def trace(model: nn.Module, example: Tensor) -> Graph:
    """The model's graph for batches of any size, and for images of any height and width if the model allows that."""
    images = torch.cat([example, example])  # a batch of one would be taken for a constant
    height, width = images.ndim - 2, images.ndim - 1
    batch = Dim("batch")
    try:
        program = _export(model, images, {0: batch, height: Dim.AUTO, width: Dim.AUTO})
        _check_other_size(program, model, images)
    except Exception:  # noqa: BLE001 - whatever tracing fails with, the size may be the reason
        program = _explained(lambda: _export(model, images, {0: batch}))
    return _graph(program, {0: "batch", height: "height", width: "width"})


def _export(model: nn.Module, images: Tensor, sides: dict[int, Any]) -> ExportedProgram:
    with _quiet():
        return torch.export.export(model, (images,), dynamic_shapes={_INPUT: sides})


def _check_other_size(program: ExportedProgram, model: nn.Module, images: Tensor) -> None:
    """Raise if the graph does not compute images of twice the size as the model does."""
    if all(isinstance(side, int) for side in _placeholder(program).shape[-2:]):
        return
    larger = images[:1].repeat(*[1] * (images.ndim - 2), 2, 2)
    found = program.module()(larger)
    for name, expected in model(larger).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-3, atol=1e-3)


def _explained(export: Callable[[], ExportedProgram]) -> ExportedProgram:
    try:
        return export()
    except PacelineError:
        raise
    except Exception as error:
        places = [each for each in traceback.extract_tb(error.__traceback__) if not _is_tracer(each.filename)]
        where = f"{Path(places[-1].filename).name}, line {places[-1].lineno}" if places else "the model"
        reason = f"{_operator(error)}{_first_line(error)}"
        if "Constraints violated (batch)" in reason:  # len() gives a number, which the graph keeps
            reason = "the number of images is a constant in it; write images.shape[0] in place of len(images)"
        raise ExportError(f"torch.export cannot trace {where}: {reason}") from error


def _is_tracer(file: str) -> bool:
    return file.startswith(_TORCH) or file == __file__ or Path(file).name == "contextlib.py"


def _placeholder(program: ExportedProgram) -> Tensor:
    (found,) = [node for node in program.graph.nodes if node.op == "placeholder" and node.name == _INPUT]
    value: Tensor = found.meta["val"]
    return value


def _graph(program: ExportedProgram, sides: dict[int, str]) -> Graph:
    shape = _placeholder(program).shape
    names = {str(shape[side]): name for side, name in sides.items() if not isinstance(shape[side], int)}
    outputs = {}
    results = {node.name: node.meta["val"] for node in program.graph.nodes if "val" in node.meta}
    named = program.module_call_graph[0].signature.out_spec.context
    for name, result in zip(named, program.graph_signature.user_outputs, strict=True):
        outputs[str(name)] = _named(results[str(result)].shape, names)
    return Graph(program, _named(shape, names), outputs)


def _named(shape: Any, names: dict[str, str]) -> Shape:
    """A shape with our names of the sides that may have any length."""
    texts = [re.sub(r"\bs\d+\b", lambda found: names.get(found[0], found[0]), str(side)) for side in shape]
    return [int(text) if text.isdecimal() else text for text in texts]


def save_onnx(graph: Graph, path: Path) -> None:
    """Write the graph as ONNX."""
    import onnx_ir

    try:
        with _quiet():
            program = torch.onnx.export(
                graph.program, input_names=[_INPUT], output_names=list(graph.outputs), verbose=False
            )
            assert program is not None
            values = [*program.model.graph.inputs, *program.model.graph.outputs]
            for value, shape in zip(values, [graph.input, *graph.outputs.values()], strict=True):
                value.shape = onnx_ir.Shape(shape)  # with our names of sides
            program.save(str(path))
    except Exception as error:
        raise ExportError(
            f"ONNX cannot express this model: {_operator(error)}{_first_line(error)}; leave it out with"
            " --format safetensors pt2"
        ) from error


def open_program(path: Path) -> Callable[[Tensor], Outputs]:
    """The program of a file."""
    with _quiet():
        loaded: Callable[[Tensor], Outputs] = torch.export.load(path).module()
    return loaded


def open_onnx(path: Path, names: list[str]) -> Callable[[Tensor], Outputs]:
    """The model of a file, as onnxruntime computes it."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> Outputs:
        found = session.run(names, {_INPUT: images.numpy()})
        return {name: torch.from_numpy(value) for name, value in zip(names, found, strict=True)}

    return run


def _operator(error: BaseException) -> str:
    """The operator that an error, or one that it came from, is about."""
    cause: BaseException | None = error
    while cause is not None:
        if found := _OPERATOR.search(str(cause)):
            return f"operator {found[1] or found[2]}: "
        cause = cause.__cause__
    return ""


def _first_line(error: BaseException) -> str:
    """The first line of the error at the bottom."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return in_one_line(lines[0].rstrip(".;") if lines else type(error).__name__)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's and onnxscript's notes for their own developers from the user."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
