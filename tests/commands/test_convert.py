"""Foreign weights become safetensors, completely or not at all, and nothing in them runs."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from paceline.cli import main


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(4, 3, generator=generator)
    return {"conv.weight": shared, "tied": shared.t(), "half": shared.bfloat16(), "count": torch.tensor(7)}


def same_as_weights(path: Path) -> bool:
    found = safetensors.torch.load_file(path)
    expected = weights()
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype and found[name].equal(tensor) for name, tensor in expected.items()
    )


@pytest.mark.parametrize("extension", [".pth", ".pt", ".bin"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda w: w,
        lambda w: {"state_dict": w, "epoch": 3},
        lambda w: {"model": {f"module.{name}": tensor for name, tensor in w.items()}, "args": argparse.Namespace(lr=1)},
    ],
)
def test_tensors_come_out_under_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], extension: str, wrap: Any
) -> None:
    source = tmp_path / f"theirs{extension}"
    torch.save(wrap(weights()), source)
    assert main(["convert", str(source)]) == 0
    out = tmp_path / "theirs.safetensors"
    assert same_as_weights(out)
    assert capsys.readouterr().out == f"{out}: 4 tensors, {out.stat().st_size:,} bytes\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == [source.name, out.name] or extension == ".pt"


def test_the_old_format_another_name_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "old", tmp_path / "new.safetensors"
    torch.save(weights(), source, _use_new_zipfile_serialization=False)
    assert main(["convert", str(source), "--out", str(out), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"file": str(source), "out": str(out), "tensors": 4, "bytes": out.stat().st_size}
    assert same_as_weights(out)


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_float_tensors_are_rounded_to_half_precision(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, dtype: torch.dtype
) -> None:
    source = tmp_path / "theirs.pth"
    torch.save(weights(), source)
    assert main(["convert", str(source), "--dtype", name]) == 0
    found = safetensors.torch.load_file(tmp_path / "theirs.safetensors")
    assert (found["conv.weight"].dtype, found["half"].dtype, found["count"].dtype) == (
        dtype,
        torch.bfloat16,
        torch.int64,
    )
    assert found["conv.weight"].equal(weights()["conv.weight"].to(dtype))
    assert found["half"].equal(weights()["half"])


def test_values_beyond_half_precision_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "large.pth"
    torch.save({"scale": torch.tensor([1.0, 7e4, float("inf")])}, source)
    message = refused(source, capsys, "--dtype", "fp16")
    assert [part for part in (str(source), "scale", "70000", "bf16") if part not in message] == []
    assert main(["convert", str(source), "--dtype", "bf16"]) == 0


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def refused(source: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    before = sorted(source.parent.iterdir())
    assert main(["convert", str(source), *options]) == 4
    assert sorted(source.parent.iterdir()) == before
    return capsys.readouterr().err


def test_code_is_named_and_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trap, source = tmp_path / "sprung", tmp_path / "trap.pth"
    torch.save({"weight": torch.ones(2), "more": Bomb(trap)}, source)
    message = refused(source, capsys)
    assert message.startswith(f"{source}: refused: ")
    assert "Path" in message or "getattr" in message
    source.write_bytes(pickle.dumps({"more": Bomb(trap)}, protocol=2))
    assert "refused" in refused(source, capsys)
    assert not trap.exists()


def test_what_is_larger_than_allowed_is_refused_before_it_takes_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "large.pth"
    torch.save({"weight": torch.zeros(1000)}, source)
    assert "--max-gb" in refused(source, capsys, "--max-gb", "1e-6")
    torch.save({"weight": torch.zeros(1).expand(10**13)}, source)
    assert f"{source}: expands to 4e+04 GB, more than the 20 GB" in refused(source, capsys)
    with zipfile.ZipFile(source, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(10_000_000))
    assert source.stat().st_size < 100_000
    assert "expands to 0.01 GB, more than the 0.001 GB" in refused(source, capsys, "--max-gb", "0.001")


def test_what_holds_itself_or_no_data_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "odd.pth"
    endless: dict[str, Any] = {}
    endless["model"] = endless
    for content, words in (
        (endless, "more than 8 deep"),
        ({"weight": torch.zeros(3, device="meta")}, "weight has a shape but no data"),
        ({"weight": torch.eye(3).to_sparse()}, "'weight' cannot be saved"),
        ({"spectrum": torch.zeros(2, dtype=torch.complex128)}, "safetensors has no such type"),
    ):
        torch.save(content, source)
        assert words in refused(source, capsys)


def test_nothing_is_overwritten_or_left_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "theirs.pth", tmp_path / "theirs.safetensors"
    assert "no such file" in refused(source, capsys)
    assert "is a folder" in refused(tmp_path, capsys)
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refused(tmp_path / "pipe", capsys)
    torch.save(weights(), source)
    assert "does not exist" in refused(source, capsys, "--out", str(tmp_path / "nowhere" / "x.safetensors"))
    out.write_text("mine")
    assert f"{out}: exists and is not overwritten" in refused(source, capsys)
    assert out.read_text() == "mine"
    source.write_bytes(source.read_bytes()[:300])
    assert "truncated" in refused(source, capsys, "--out", str(tmp_path / "other.safetensors"))
    assert main(["convert", str(source), "--max-gb", "0"]) == 2
