"""Computes with exported models, without Paceline. Argument: a folder with KIND/model.pt2, .onnx and .safetensors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

folder = Path(sys.argv[1])
found: dict[str, NDArray[Any]] = {}
for place in sorted(folder.iterdir()):
    about = json.loads((place / "preprocessing.json").read_text())
    shape = [5, *about["input"]["shape"][1:-2], *about["size"]]
    images = np.random.default_rng(0).integers(0, 256, shape)
    images = images.astype(np.uint8) if about["input"]["dtype"] == "uint8" else (images / 64 - 2).astype(np.float32)
    found[f"{place.name}/images"] = images
    program = torch.export.load(place / "model.pt2").module()
    with torch.no_grad():
        for name, value in program(torch.from_numpy(images)).items():
            found[f"{place.name}/pt2/{name}"] = value.numpy()
    session = onnxruntime.InferenceSession(str(place / "model.onnx"), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    for name, array in zip(names, session.run(None, {"images": images}), strict=True):
        found[f"{place.name}/onnx/{name}"] = array
    if place.name == "saliency":
        (found["saliency/larger"],) = session.run(None, {"images": np.zeros((1, 3, 96, 128), np.float32)})
    assert load_file(place / "model.safetensors")
assert "paceline" not in sys.modules
np.savez(folder / "outputs.npz", **found)  # type: ignore[arg-type]
