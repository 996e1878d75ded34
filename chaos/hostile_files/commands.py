"""The commands that meet a hostile file: each function puts it where a recipe finds it, and gives the arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def recipe(**changes: Any) -> dict[str, Any]:
    """A sound recipe with some keys replaced."""
    changed = {name: value for name, value in changes.items() if name != "data"}
    data = {
        "batch_size": 4,
        "num_workers": 0,
        "train": {"dataset": "fashion_small", "split": "train"},
        **changes.get("data", {}),
    }
    model = {"name": "convnet", "widths": [4]}
    optimizer = {"name": "sgd", "lr": 0.1}
    sound = {"name": "hostile", "task": "classification", "model": model, "data": data, "losses": ["cross_entropy"]}
    return {**sound, "optimizer": optimizer, "train": {"steps": 1}, **changed}


def check(**changes: Any) -> list[str]:
    """The command that checks such a recipe."""
    Path("recipe.json").write_text(json.dumps(recipe(**changes)), encoding="utf-8")
    return ["check", "recipe.json"]


def check_text(text: str | bytes, name: str = "recipe.yaml") -> list[str]:
    """The command that checks a recipe of this content."""
    Path(name).write_bytes(text.encode() if isinstance(text, str) else text)
    return ["check", name]


def check_weights(content: bytes, name: str = "weights.pth") -> list[str]:
    """The command that checks a recipe which starts from a file of this content."""
    Path(name).write_bytes(content)
    return check(model={"name": "convnet", "widths": [4], "weights": name})


def check_image(content: bytes | None = None, **options: Any) -> list[str]:
    """The command that checks a recipe whose one image has this content."""
    Path("photos/one").mkdir(parents=True, exist_ok=True)
    if content is not None:
        Path("photos/one/photo.png").write_bytes(content)
    resize = {"name": "resize", "size": [16, 16]}
    train = {"dataset": "image_folder", "root": "photos", "transforms": [resize], **options}
    return check(data={"train": train})


def evaluate_checkpoint() -> list[str]:
    """The command that measures the checkpoint in the folder `checkpoint`."""
    data = {"val": {"dataset": "fashion_small", "split": "test"}}
    Path("recipe.json").write_text(json.dumps(recipe(data=data)), encoding="utf-8")
    Path("checkpoint").mkdir(exist_ok=True)
    return ["eval", "recipe.json", "--checkpoint", "checkpoint", "--procs", "1"]
