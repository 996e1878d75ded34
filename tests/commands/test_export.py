"""`paceline export`: files that other programs load in a process of their own, equal to the model; else nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from numpy.typing import NDArray
from PIL import Image
from support.sample_recipes import KINDS, settings_kept, write_sample
from torch import Tensor, nn

import paceline
from paceline import cli
from paceline.core.errors import ExportError
from paceline.core.registry import register
from paceline.models.torchvision_detection import build_detection
from paceline.tasks.detection import Detection

SCRIPT = Path(__file__).resolve().parent / "scripts" / "load_exported.py"
MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.25, 0.3]
OUTPUTS: dict[str, dict[str, Any]] = {
    "classification": {"logits": ["batch", 2]},
    "detection": {"boxes": None, "scores": None},
    "keypoints": {"heatmaps": None},
    "masked_autoencoder": {"features": ["batch", 24]},
    "saliency": {"logits": ["batch", 1, "height", "width"]},
    "segmentation": {"logits": ["batch", 4, "height", "width"]},
    "video": {"logits": ["batch", 4]},
}


@pytest.fixture(autouse=True, scope="module")
def _settings() -> Iterator[None]:
    with settings_kept():
        yield


def image_recipe(folder: Path, task: str, model: Any, **more: Any) -> Path:
    """A recipe for a few small images of two classes."""
    root = folder / "images"
    for index in range(12):
        path = root / "all" / "ab"[index % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(index).integers(0, 256, (20, 24, 3)).astype(np.uint8)).save(path)
    transforms: list[dict[str, Any]] = [
        {"name": "resize", "size": [16, 16]},
        {"name": "normalize", "mean": MEAN, "std": STD},
    ]
    if task == "masked_autoencoder":
        transforms.append({"name": "random_masking", "num_patches": 16})
    split = {"dataset": "image_folder", "root": str(root), "split": "all", "transforms": transforms}
    recipe = {
        "name": task, "task": task, "model": model, "data": {"batch_size": 6, "train": split, "val": split},
        "losses": ["masked_mse" if task == "masked_autoencoder" else "cross_entropy"],
        "optimizer": {"name": "sgd", "lr": 0.1}, "train": {"epochs": 1, "device": "cpu", **more},
        "logging": {"images": False, "tensorboard": False},
    }  # fmt: skip
    path = folder / f"{task}.json"
    path.write_text(json.dumps(recipe))
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of each task, and in `exported/KIND` what the command made of it."""
    folder = tmp_path_factory.mktemp("export")
    encoder = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 1, "num_heads": 2}
    masked = {"name": "masked_autoencoder", "encoder": "timm/vit_tiny_patch16_224", "encoder_args": encoder}
    recipes = {kind: write_sample(kind, folder) for kind in KINDS if kind != "instance_segmentation"}
    recipes["classification"] = image_recipe(
        folder, "classification", {"name": "convnet", "widths": [4, 8]}, averaging={"name": "ema"}, precision="bf16"
    )
    recipes["masked_autoencoder"] = image_recipe(
        folder, "masked_autoencoder", {**masked, "decoder_dim": 16, "decoder_depth": 1, "decoder_heads": 2}
    )
    for kind, recipe in recipes.items():
        short = ["model.backbone=timm/test_resnet", "train.steps=1", "evaluate.every_steps=9"] if kind in KINDS else []
        short += ["model.min_stride=16"] if kind == "detection" else []  # each level is traced anew
        assert cli.main(["train", str(recipe), *short, "--out", str(folder / "runs" / kind)]) == 0
        words = ["--input", "uint8"] if kind == "classification" else []
        out = str(folder / "exported" / kind)
        assert cli.main(["export", str(folder / "runs" / kind), "--out", out, *words]) == 0
    return folder


@pytest.fixture(scope="module")
def loaded(runs: Path) -> dict[str, NDArray[np.float32]]:
    """What a process without Paceline computes with the files, for batches of five: KIND/FORMAT/OUTPUT."""
    done = subprocess.run([sys.executable, str(SCRIPT), str(runs / "exported")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(np.load(runs / "exported" / "outputs.npz"))


def describe(folder: Path) -> Any:
    return json.loads((folder / "preprocessing.json").read_text())


@pytest.mark.parametrize("kind", sorted(OUTPUTS))
def test_files_work_in_another_process(kind: str, runs: Path, loaded: dict[str, NDArray[np.float32]]) -> None:
    about = describe(runs / "exported" / kind)
    files = about["files"]
    assert about["task"] == kind
    assert set(files) == {"model.safetensors", "model.pt2", "model.onnx"}
    assert all(each["max_difference"] < 1e-4 for each in files.values())
    (number,) = {each["num_samples"] for each in files.values()}
    assert (
        7 <= number <= 20 if kind == "keypoints" else number == (7 if kind in KINDS else 12)
    )  # its samples are persons
    assert list(about["outputs"]) == list(OUTPUTS[kind])
    assert all(expected in (None, about["outputs"][name]) for name, expected in OUTPUTS[kind].items())
    predictor = paceline.load(runs / "runs" / kind)
    images = torch.from_numpy(loaded[f"{kind}/images"])
    if kind == "classification":  # its graph takes pixels; the formula is that of the recipe
        mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
        images = (images.double() / 255 - mean) / std
    run = predictor.run
    with torch.no_grad():
        expected = run.task.export_outputs(run.model.float().eval(), images.float())
    assert len(images) == 5
    for name, value in expected.items():
        for format_name in ("pt2", "onnx"):
            found = loaded[f"{kind}/{format_name}/{name}"]
            assert found.shape == value.shape
            assert np.abs(found - value.numpy()).max() < 1e-4 * max(1.0, float(value.abs().max()))


def test_the_model_takes_other_sizes_where_it_can(runs: Path, loaded: dict[str, NDArray[np.float32]]) -> None:
    shapes = {kind: describe(runs / "exported" / kind)["input"]["shape"] for kind in OUTPUTS}
    assert shapes["classification"] == shapes["saliency"] == shapes["detection"] == ["batch", 3, "height", "width"]
    assert shapes["masked_autoencoder"] == ["batch", 3, 16, 16]  # its position embeddings have a size
    assert shapes["video"][:3] == ["batch", 3, 4]
    assert loaded["saliency/larger"].shape == (1, 1, 96, 128)


def test_boxes_are_those_that_detections_are_selected_from(runs: Path, loaded: dict[str, NDArray[np.float32]]) -> None:
    about = describe(runs / "exported" / "detection")
    assert about["selection"] == {"score_thresh": 0.05, "nms_thresh": 0.6, "detections_per_img": 100}
    model = paceline.load(runs / "runs" / "detection").run.model.eval()
    with torch.no_grad():
        (first, *_) = model(torch.from_numpy(loaded["detection/images"]))
    boxes, scores = (torch.from_numpy(loaded[f"detection/onnx/{name}"][0]) for name in ("boxes", "scores"))
    best = scores.flatten().argmax()
    torch.testing.assert_close(first.scores[0], scores.flatten()[best], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(first.boxes[0], boxes[best // scores.shape[1]], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp32", torch.float32)]
)
def test_weights_are_those_of_the_checkpoint(name: str, dtype: torch.dtype, runs: Path, tmp_path: Path) -> None:
    run = runs / "runs" / "classification"
    words = ["export", str(run), "--out", str(tmp_path), "--format", "safetensors", "--dtype", name]
    assert cli.main(words) == 0
    found = safetensors.torch.load_file(tmp_path / "model.safetensors")
    checkpoint = safetensors.torch.load_file(run / "best" / "model.safetensors")
    assert found.keys() == checkpoint.keys()
    for key, tensor in checkpoint.items():
        expected = tensor.to(dtype) if tensor.is_floating_point() else tensor
        assert found[key].dtype == expected.dtype
        assert torch.equal(found[key], expected), key
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "preprocessing.json"]


def test_average_and_answer_as_json(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(runs / "runs" / "classification")
    words = ["--format", "safetensors", "--average", "--json", "--samples", str(runs / "images" / "all" / "a")]
    assert cli.main(["export", run, "--out", str(tmp_path), *words]) == 0
    answer = json.loads(capsys.readouterr().out)["files"]
    assert answer[str(tmp_path / "model.safetensors")]["num_samples"] == 6
    found = safetensors.torch.load_file(tmp_path / "model.safetensors")
    plain = safetensors.torch.load_file(runs / "runs" / "classification" / "best" / "model.safetensors")
    assert any(not torch.equal(found[name], plain[name]) for name in plain)
    assert describe(tmp_path)["average"] is True


class Bessel(nn.Module):
    """Uses an operator that ONNX does not have."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.linear(torch.special.bessel_j0(images).mean((2, 3)))
        return logits


class Branching(Bessel):
    """Computes bright images in another way, which no graph can."""

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.linear(images.mean((2, 3)))
        return logits * 2 if logits.sum() > 0 else logits


@pytest.fixture
def own_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two names more, for one test."""
    models = register.kind("model")
    monkeypatch.setattr(models, "_entries", dict(models._entries))
    register.model("bessel")(Bessel)
    register.model("branching")(Branching)


@pytest.mark.usefixtures("own_models")
@pytest.mark.parametrize(("model", "operator"), [("bessel", "bessel_j0"), ("branching", "test_export.py, line")])
def test_what_a_format_lacks_is_named_and_nothing_is_written(
    model: str, operator: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = image_recipe(tmp_path, "classification", {"name": model})
    run = tmp_path / "run"
    assert cli.main(["train", str(recipe), "--out", str(run)]) == 0
    before = sorted(run.iterdir())
    capsys.readouterr()
    assert cli.main(["export", str(run)]) == 1
    printed = capsys.readouterr().err
    assert operator in printed.splitlines()[-1]
    assert "Traceback" not in printed
    assert sorted(run.iterdir()) == before
    assert cli.main(["export", str(run), "--format", "safetensors"]) == 0
    (run / "export" / "model.onnx").write_text("an earlier one")
    kept = {path.name: path.read_bytes() for path in (run / "export").iterdir()}
    assert cli.main(["export", str(run)]) == 1
    assert {path.name: path.read_bytes() for path in (run / "export").iterdir()} == kept


def test_detectors_of_torchvision_are_refused_by_their_operator() -> None:
    model = build_detection("ssdlite320_mobilenet_v3_large", 2, 3)
    with pytest.raises(ExportError, match="torchvision::nms"):
        Detection(model, ["a", "b"]).export_outputs(model, torch.zeros(1, 3, 64, 64))


def test_instance_segmentation_is_exported_as_weights_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, run = write_sample("instance_segmentation", tmp_path), tmp_path / "run"
    assert cli.main(["train", str(recipe), "train.steps=1", "evaluate.every_steps=9", "--out", str(run)]) == 0
    capsys.readouterr()
    assert cli.main(["export", str(run)]) == 1
    printed = capsys.readouterr().err.splitlines()[-1]
    assert "MaskRCNN selects boxes inside the model, by the operator torchvision::nms" in printed
    assert not (run / "export").exists()
    assert cli.main(["export", str(run), "--format", "safetensors"]) == 0


def test_what_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, run = image_recipe(tmp_path, "classification", {"name": "convnet", "widths": [4]}), tmp_path / "run"
    assert cli.main(["train", str(recipe), "--out", str(run)]) == 0
    (tmp_path / "images").rename(tmp_path / "moved")
    assert cli.main(["export", str(run), "--out", str(tmp_path / "out")]) == 3
    assert "--samples" in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path)]) == 2
    assert cli.main(["export", str(run), "--checkpoint", str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 4
    (tmp_path / "file").write_text("")
    assert cli.main(["export", str(run), "--out", str(tmp_path / "file")]) == 2
    assert not (tmp_path / "out").exists()


def test_without_onnx_the_other_files_are_written(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)  # as if it were not installed
    words = ["export", str(runs / "runs" / "classification"), "--out", str(tmp_path / "out")]
    assert cli.main([*words, "--json"]) == 0
    printed = capsys.readouterr()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "model.safetensors", "model.pt2", "preprocessing.json",
    }  # fmt: skip
    assert list(json.loads(printed.out)["left_out"]) == ["onnx"]
    assert "pip install 'paceline[onnx]'" in printed.err
    assert cli.main([*words, "--format", "safetensors", "onnx"]) == 2
    assert "pip install 'paceline[onnx]'" in capsys.readouterr().err
