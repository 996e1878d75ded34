"""Checkpoints whose checksums are right and whose content is not: ways to spoil one that was saved soundly."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.files import dump_checksummed, load_checksummed
from paceline.checkpoint.shards import SaveRank, TensorShard
from paceline.checkpoint.store import Store

Spoil = Callable[[Path], object]
"""Changes the folder of a checkpoint in place."""

_DIGITS = "9" * 5000


def save_sound(root: Path, step: int, world: int) -> Path:
    """A checkpoint of one process, or of several that each hold a part."""
    store = Store(root)
    for rank in reversed(range(world)):
        rows = torch.full((2, 3), float(rank))
        weight = rows if world == 1 else TensorShard(rows, (2 * world, 3), 2 * rank)
        state = {"progress": {"step": step}, "moment": weight, "loss": float("nan")}
        store.save(step, {"weight": weight}, state, {"top1": 0.5}, SaveRank(rank, world, "a"))
    return store.path_of(step)


def rewrite_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the content of a manifest, and seal it again."""
    path = folder / "manifest.json"
    content = load_checksummed(path)
    change(content)
    path.write_bytes(dump_checksummed(content))


def replace(folder: Path, name: str, raw: bytes) -> None:
    """Put another content into a file, and have the manifest say so."""
    (folder / name).write_bytes(raw)
    entry = {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    rewrite_manifest(folder, lambda content: content["files"].update({name: entry}))


def _manifest(**changes: Any) -> Spoil:
    return lambda folder: rewrite_manifest(folder, lambda content: content.update(changes))


def _without(key: str) -> Spoil:
    return lambda folder: rewrite_manifest(folder, lambda content: content.pop(key))


def _entry(**changes: Any) -> Spoil:
    return lambda folder: rewrite_manifest(folder, lambda content: content["files"]["state.json"].update(changes))


def _file(name: str, raw: bytes | str) -> Spoil:
    return lambda folder: replace(folder, name, raw.encode() if isinstance(raw, str) else raw)


def _raw_manifest(text: str) -> Spoil:
    return lambda folder: (folder / "manifest.json").write_text(text)


def _state(text: str) -> Spoil:
    return _file("state.json", text)


def _nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def _part(change: Callable[[dict[str, Any]], object]) -> Spoil:
    """Change what the second of two processes says of its part."""

    def spoil(folder: Path) -> None:
        name = "part-00002-of-00002.json"
        content = load_checksummed(folder / name)
        change(content)
        replace(folder, name, dump_checksummed(content))

    return spoil


def _place(value: Any) -> Spoil:
    return _part(lambda content: content["places"]["model"].update(weight=value))


def _header(text: str, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text.encode() + data


ONE_PROCESS: dict[str, Spoil] = {
    "an infinite step": _manifest(step=float("inf")),
    "a step that is no number": _manifest(step=float("nan")),
    "a negative step": _manifest(step=-1),
    "a step of 80 bits": _manifest(step=2**80),
    "a step of 5,000 digits": _raw_manifest(f'{{"format": 1, "step": {_DIGITS}}}'),
    "a word for a step": _manifest(step="7"),
    "a truth for a step": _manifest(step=True),
    "half a step": _manifest(step=1.5),
    "no step": _without("step"),
    "a list of files": _manifest(files=["model.safetensors"]),
    "no files": _without("files"),
    "a file without an entry": _manifest(files={"model.safetensors": None}),
    "an infinite size": _entry(size=float("inf")),
    "a negative size": _entry(size=-1),
    "a size in words": _entry(size="17"),
    "a number for a checksum": _entry(sha256=17),
    "half a checksum": _entry(sha256="0" * 32),
    "a list of metrics": _manifest(metrics=[1]),
    "no metrics": _without("metrics"),
    "a metric of 400 digits": _manifest(metrics={"top1": 10**400}),
    "a metric that is a tensor": _manifest(metrics={"top1": {"$tensor": "weight"}}),
    "a metric that is a list": _manifest(metrics={"top1": [1]}),
    "a metric that is not finite in its own way": _manifest(metrics={"top1": {"$float": "much"}}),
    "metrics 300 deep": _manifest(metrics={"top1": _nested(300)}),
    "a manifest 900 deep": _raw_manifest('{"checksum": 1, "format": 1, "x": ' + "[" * 900 + "]" * 900 + "}"),
    "a manifest that is a list": _raw_manifest("[1]"),
    "a manifest that is nothing": _raw_manifest("null"),
    "the files of 99,999 processes": _manifest(
        files={"model-00001-of-99999.safetensors": {"size": 0, "sha256": "0" * 64}}
    ),
    "the files of no process": _manifest(files={"model-00000-of-00000.safetensors": {"size": 0, "sha256": "0" * 64}}),
    "a list for a state": _state("[]"),
    "nothing for a state": _state("null"),
    "a number for a state": _state("3"),
    "an empty state.json": _state(""),
    "half a state.json": _state('{"progress": '),
    "a state.json in no encoding": _file("state.json", b'{"a": "\xff\xfe"}'),
    "a state 900 deep": _state('{"a": ' + "[" * 900 + "]" * 900 + "}"),
    "a state 100,000 deep": _state('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"),
    "a state with 5,000 digits": _state(f'{{"a": {_DIGITS}}}'),
    "a tensor that is named by a list": _state('{"a": {"$tensor": ["weight"]}}'),
    "a tensor that is named by an object": _state('{"a": {"$tensor": {}}}'),
    "a tensor that is not there": _state('{"a": {"$tensor": "elsewhere"}}'),
    "a number that is a list": _state('{"a": {"$float": [1]}}'),
    "a number in words": _state('{"a": {"$float": "much"}}'),
    "empty tensors": _file("model.safetensors", b""),
    "tensors that are text": _file("state.safetensors", b"no tensors at all"),
    "tensors with a header of 2^63 bytes": _file("model.safetensors", (2**63).to_bytes(8, "little") + b"{}"),
    "a tensor of an unknown type": _file(
        "model.safetensors", _header('{"weight": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}', bytes(4))
    ),
    "a tensor of a huge shape": _file(
        "model.safetensors",
        _header(f'{{"weight": {{"dtype": "F32", "shape": [{2**62}, 8], "data_offsets": [0, 4]}}}}', bytes(4)),
    ),
}
"""Of a checkpoint that one process wrote."""

TWO_PROCESSES: dict[str, Spoil] = {
    "a part without places": _part(lambda content: content.pop("places")),
    "a part with a list of places": _part(lambda content: content.update(places=[])),
    "a part without the places of its model": _part(lambda content: content["places"].pop("model")),
    "a part in no place": _part(lambda content: content["places"]["model"].pop("weight")),
    "a part in a negative row": _place([[4, 3], -2]),
    "a part in a row of 80 bits": _place([[4, 3], 2**80]),
    "a part in an infinite row": _place([[4, 3], float("inf")]),
    "a part in a row in words": _place([[4, 3], "2"]),
    "a part of a negative shape": _place([[-4, 3], 2]),
    "a part of a huge shape": _place([[2**62, 3], 2]),
    "a part of a wider tensor": _place([[4, 5], 2]),
    "a part of no shape": _place([[], 2]),
    "a part of a number": _place([4, 2]),
    "a part with half a place": _place([[4, 3]]),
    "a part that is nothing": _place(None),
    "a part that comes twice": _place([[4, 3], 0]),
    "a part with a gap before it": _place([[6, 3], 4]),
    "a part with rows missing": _place([[6, 3], 2]),
    "a place without a part": _part(lambda content: content["places"]["model"].update(bias=[[4], 0])),
    "a part of another step": _part(lambda content: content.update(step=3)),
    "a part of an infinite step": _part(lambda content: content.update(step=float("inf"))),
}
"""Of one that two processes wrote together."""


def _moments(state: dict[str, Any]) -> dict[str, Any]:
    """Those of the first parameter."""
    found: dict[str, Any] = next(iter(state["optimizer"]["state"].values()))
    return found


def _data(**changes: Any) -> dict[str, Any]:
    """The fingerprint of a split."""
    return {"classes": [], "num_samples": 1, "digest": "", "groups": {}, **changes}


RUN_STATES: dict[str, Callable[[dict[str, Any]], object]] = {
    "an empty state": lambda state: state.clear(),
    "no progress": lambda state: state.pop("progress"),
    "a list for progress": lambda state: state.update(progress=[]),
    "infinite progress": lambda state: state["progress"].update(step=1e999),
    "negative progress": lambda state: state["progress"].update(step=-5),
    "progress of another step": lambda state: state["progress"].update(step=77),
    "no optimizer": lambda state: state.pop("optimizer"),
    "a list for an optimizer": lambda state: state.update(optimizer=[]),
    "an optimizer without groups": lambda state: state["optimizer"].pop("groups"),
    "an optimizer with a number for groups": lambda state: state["optimizer"].update(groups=3),
    "an optimizer with infinite shapes": lambda state: state["optimizer"].update(shapes={"a": [1e999]}),
    "an optimizer with a list for its moments": lambda state: state["optimizer"].update(state=[]),
    "a parameter without a moment": lambda state: _moments(state).pop("exp_avg"),
    "a list for a moment": lambda state: _moments(state).update(exp_avg=["a"]),
    "another parameter's moment": lambda state: _moments(state).update(exp_avg=_moments(state)["exp_avg_sq"]),
    "nothing for an average": lambda state: state.update(averaging=None),
    "an average of words": lambda state: state.update(averaging={"steps": 1, "count": 1, "average": {"a": "b"}}),
    "a negative average": lambda state: state.update(averaging={"steps": -1, "count": -1, "average": {}}),
    "nothing for precision": lambda state: state.update(precision=None),
    "a negative count of skipped steps": lambda state: state.update(finite_check={"in_a_row": -1}),
    "a count of skipped steps in words": lambda state: state.update(finite_check={"in_a_row": "3"}),
    "a list for meters": lambda state: state.update(meters=[]),
    "a meter of words": lambda state: state.update(meters={"loss": {"window": ["x"], "sum": 1.0, "count": 1}}),
    "a meter of nothing": lambda state: state.update(meters={"loss": None}),
    "a number for metrics": lambda state: state.update(metrics=0.5),
    "metrics of words": lambda state: state.update(metrics={"val": {"top1": "much"}}),
    "a number for what is pending": lambda state: state.update(pending=0),
    "something unknown that is pending": lambda state: state.update(pending=["launch"]),
    "no threads": lambda state: state.update(threads=0),
    "a billion threads": lambda state: state.update(threads=10**9),
    "an infinite micro-batch": lambda state: state.update(micro_batch_size=1e999),
    "a micro-batch of nothing": lambda state: state.update(micro_batch_size=0),
    "a world of nobody": lambda state: state.update(world=0),
    "a world in words": lambda state: state.update(world="2"),
    "channels of data in words": lambda state: state.update(data={"train": _data(channels="x")}),
    "keypoints of nothing": lambda state: state.update(data={"train": _data(joints="nan")}),
    "a number of files in words": lambda state: state.update(data={"train": _data(groups={"a": ["x", 1, "c"]})}),
    "a list for a recipe": lambda state: state.update(recipe=[]),
    "a recipe 900 deep": lambda state: state.update(recipe={"a": _nested(900)}),
}
"""Of what a run saved beside its model: changes to state.json."""


RECIPES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a batch size in words": lambda recipe: recipe["data"].update(batch_size="much\n"),
    "a batch size that is an object": lambda recipe: recipe["data"].update(batch_size={"a": {}}),
    "a batch size that is no number": lambda recipe: recipe["data"].update(batch_size={"$float": "nan"}),
    "a batch size 90 deep": lambda recipe: recipe["data"].update(batch_size=_nested(90)),
    "no data": lambda recipe: recipe.pop("data"),
    "an unknown key of a megabyte": lambda recipe: recipe.update({"x\n\x1b[31m" * 10**5: 1}),
}
"""Changes to the recipe in state.json that no recipe has."""


def spoil_state(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the state of a checkpoint, and have the manifest say so."""
    state = json.loads((folder / "state.json").read_bytes())
    change(state)
    replace(folder, "state.json", json.dumps(state).encode())
