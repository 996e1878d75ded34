"""Weights of any origin are read by content, and a file that brings code is refused without running it."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from paceline.checkpoint.store import Store
from paceline.checkpoint.weights import read_weights
from paceline.core.errors import CheckpointError

WEIGHTS = {"conv.weight": torch.arange(6.0).reshape(2, 3), "conv.count": torch.tensor(3)}


def same(found: dict[str, Tensor], expected: dict[str, Tensor] = WEIGHTS) -> bool:
    return found.keys() == expected.keys() and all(
        found[n].dtype == expected[n].dtype and found[n].equal(expected[n]) for n in expected
    )


def torch_file(path: Path, content: Any, zipped: bool = True) -> Path:
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    return path


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pth", "weights"])
def test_the_content_decides_not_the_extension(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    safetensors.torch.save_file(WEIGHTS, path)
    assert same(read_weights(path))
    for zipped in (True, False):
        assert same(read_weights(torch_file(path, WEIGHTS, zipped)))


@pytest.mark.parametrize(
    "content",
    [
        {"state_dict": WEIGHTS, "epoch": 3, "optimizer": {"lr": 0.1}},
        {"model": WEIGHTS},
        {"model_state_dict": OrderedDict(WEIGHTS), "loss": 0.5},
        {"model": {"state_dict": WEIGHTS}, "args": None},
        {f"module.{name}": tensor for name, tensor in WEIGHTS.items()},
        {"state_dict": {f"module.{name}": tensor for name, tensor in WEIGHTS.items()}},
        {name: nn.Parameter(tensor, requires_grad=tensor.is_floating_point()) for name, tensor in WEIGHTS.items()},
    ],
)
def test_the_usual_wrappings_come_off(tmp_path: Path, content: Any) -> None:
    found = read_weights(torch_file(tmp_path / "weights.pth", content))
    assert same(found)
    assert not any(tensor.requires_grad for tensor in found.values())


def test_a_prefix_that_not_all_share_is_part_of_the_names(tmp_path: Path) -> None:
    mixed = {"module.weight": torch.ones(2), "head.weight": torch.ones(3)}
    assert same(read_weights(torch_file(tmp_path / "weights.pth", mixed)), mixed)


def test_a_model_may_have_a_tensor_called_like_a_container(tmp_path: Path) -> None:
    named = {"model": torch.ones(2), "state_dict": torch.ones(3)}
    assert same(read_weights(torch_file(tmp_path / "weights.pth", named)), named)


def test_our_own_checkpoints_and_runs_are_read_after_verification(tmp_path: Path) -> None:
    run = tmp_path / "run"
    store = Store(run / "checkpoints", best="top1")
    first = store.save(1, WEIGHTS, {}, {"top1": 0.9}).path
    other = {"conv.weight": torch.zeros(1)}
    second = store.save(2, other, {"rest": torch.ones(3)}, {"top1": 0.1}).path
    assert same(read_weights(first))
    assert same(read_weights(first / "model.safetensors"))
    assert same(read_weights(run / "best"))
    assert same(read_weights(run), other)
    (second / "model.safetensors").write_bytes((first / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged"):
        read_weights(second)
    assert same(read_weights(run))


class Trap:
    """Creates a folder when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
@pytest.mark.parametrize("place", ["alone", "beside weights", "as a tensor"])
def test_a_file_that_brings_code_is_refused_and_not_run(tmp_path: Path, form: str, place: str) -> None:
    sprung = tmp_path / "sprung"
    trap = Trap(sprung)
    contents: dict[str, Any] = {
        "alone": trap,
        "beside weights": {"state_dict": WEIGHTS, "extra": trap},
        "as a tensor": {**WEIGHTS, "conv.bias": trap},
    }
    path = tmp_path / "weights.safetensors"
    if form == "pickle":
        path.write_bytes(pickle.dumps(contents[place], protocol=2))
    else:
        torch_file(path, contents[place], zipped=form == "zip")
    with pytest.raises(CheckpointError, match=r"weights\.safetensors: ") as caught:
        read_weights(path)
    assert not sprung.exists()
    if form != "pickle":
        assert "posix.mkdir" in str(caught.value)
        assert "weights_only" in str(caught.value)
    torch.load(torch_file(tmp_path / "trap.pth", trap), weights_only=False)
    assert sprung.exists(), "the trap itself must work"


def test_parsed_flags_beside_the_weights_are_plain_data(tmp_path: Path) -> None:
    flags = argparse.Namespace(lr=0.1, model="vit")
    assert same(read_weights(torch_file(tmp_path / "weights.pth", {"model": WEIGHTS, "args": flags})))
    flags.hook = Trap(tmp_path / "sprung")
    with pytest.raises(CheckpointError, match=r"refused: .* posix\.mkdir"):
        read_weights(torch_file(tmp_path / "weights.pth", {"model": WEIGHTS, "args": flags}))
    assert not (tmp_path / "sprung").exists()


def test_a_whole_pickled_model_is_refused(tmp_path: Path) -> None:
    path = torch_file(tmp_path / "model.pth", nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"refused: .* torch\.nn\.modules\.linear\.Linear"):
        read_weights(path)


def test_a_program_is_not_weights(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"model\.pt: is a TorchScript program"):
        read_weights(tmp_path / "model.pt")


def test_no_message_advises_to_switch_the_protection_off(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    for protocol in range(2, 6):
        path.write_bytes(pickle.dumps({"weight": [1.0]}, protocol=protocol))
        with pytest.raises(CheckpointError, match="not made by") as caught:
            read_weights(path)
        assert "False" not in str(caught.value)


def archive(name: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr(name, "x")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"x", "neither"),
        (b"version https://git-lfs.github.com/spec/v1\n", "b'version h'"),
        (b"<!DOCTYPE html><html>", "neither"),
        (b"\x80\x02}q\x00.", "damaged|no tensors"),
        (archive("word/document.xml"), "damaged"),
    ],
)
def test_other_files_are_distinguished(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "weights.pth"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"weights\.pth: .*({words})"):
        read_weights(path)


@pytest.mark.parametrize("form", ["safetensors", "zip", "legacy"])
def test_every_truncation_is_a_sentence(tmp_path: Path, form: str) -> None:
    path = tmp_path / "weights"
    if form == "safetensors":
        safetensors.torch.save_file(WEIGHTS, path)
    else:
        torch_file(path, WEIGHTS, zipped=form == "zip")
    whole = path.read_bytes()
    for length in range(1, len(whole), max(1, len(whole) // 60)):
        path.write_bytes(whole[:length])
        # An old torch file can end within the name of a class: half a name is not one of the known ones.
        with pytest.raises(CheckpointError, match=r"weights: (is |refused)"):
            read_weights(path)
    path.write_bytes(whole[:-10])
    with pytest.raises(CheckpointError, match=r"truncated|not a complete safetensors file"):
        read_weights(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([torch.ones(2)], "found a list"),
        (torch.ones(2), "found a Tensor"),
        ({"epoch": 3, **WEIGHTS}, "such as 'epoch'"),
        ({"state_dict": {"conv.weight": 1.0}}, r"such as 'conv\.weight'"),
        ({0: torch.ones(2)}, "such as 0"),
        ({"model": {}}, "contains no tensors"),
    ],
)
def test_what_is_not_tensors_by_name_is_refused(tmp_path: Path, content: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=rf"weights\.pth: .*{words}"):
        read_weights(torch_file(tmp_path / "weights.pth", content))


def test_missing_and_empty_places_are_distinguished(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: no such file"):
        read_weights(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        read_weights(tmp_path)


def test_arrays_of_numpy_are_not_weights(tmp_path: Path) -> None:
    np.savez(tmp_path / "weights.npz", weight=np.ones(3))
    with pytest.raises(CheckpointError, match=r"weights\.npz: is damaged"):
        read_weights(tmp_path / "weights.npz")
