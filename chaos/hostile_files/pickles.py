"""Pickles in disguise, which run a command when somebody unpickles them."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from chaos.hostile_files.case import CANARY, Cases
from chaos.hostile_files.commands import check_image, check_text, check_weights, evaluate_checkpoint

case = Cases()


class Evil:
    """Whoever unpickles it runs a command."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {CANARY.absolute()}",)


@case("a pickle as .pth", 4)
def _() -> list[str]:
    return check_weights(pickle.dumps({"weight": Evil()}, protocol=2))


@case("a pickle of the first protocol as .pth", 4)
def _() -> list[str]:
    return check_weights(pickle.dumps({"weight": Evil()}, protocol=0))


@case("a torch archive that holds code", 4)
def _() -> list[str]:
    import torch

    content = io.BytesIO()
    torch.save({"weight": torch.zeros(2), "evil": Evil()}, content)
    return check_weights(content.getvalue())


@case("an old torch file that holds code", 4)
def _() -> list[str]:
    import torch

    content = io.BytesIO()
    torch.save({"weight": torch.zeros(2), "evil": Evil()}, content, _use_new_zipfile_serialization=False)
    return check_weights(content.getvalue())


@case("a pickle as .safetensors", 4)
def _() -> list[str]:
    return check_weights(pickle.dumps(Evil()), "weights.safetensors")


@case("a pickle as a .json recipe", 2)
def _() -> list[str]:
    return check_text(pickle.dumps(Evil()), "recipe.json")


@case("a pickle as a .yaml recipe", 2)
def _() -> list[str]:
    return check_text(pickle.dumps(Evil(), protocol=0))


@case("a .npy file of objects as weights", 4)
def _() -> list[str]:
    content = io.BytesIO()
    np.save(content, np.array([Evil()], dtype=object), allow_pickle=True)
    return check_weights(content.getvalue(), "weights.npy")


@case("a .npy file of objects as an image", 3)
def _() -> list[str]:
    content = io.BytesIO()
    np.save(content, np.array([Evil()], dtype=object), allow_pickle=True)
    return check_image(content.getvalue())


@case("a pickle as a checkpoint's manifest", 4)
def _() -> list[str]:
    command = evaluate_checkpoint()
    Path("checkpoint/manifest.json").write_bytes(pickle.dumps(Evil()))
    return command


@case("a distributed checkpoint whose metadata is a pickle", 4)
def _() -> list[str]:
    command = evaluate_checkpoint()
    Path("checkpoint/.metadata").write_bytes(pickle.dumps(Evil()))
    return command


@case("a TorchScript program as weights", 4)
def _() -> list[str]:
    import torch

    module = torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2))  # type: ignore[no-untyped-call]
    module.save("weights.pth")
    return check_weights(Path("weights.pth").read_bytes())
