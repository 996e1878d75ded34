"""`paceline predict`: the same as evaluation saves for the same files, without labels and without the training data."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask
from support import forkserver
from support.sample_recipes import KINDS, NUM_VAL, NUMBER, predictions, settings_kept, write_sample

import paceline
from paceline import cli
from paceline.recipe.build_predictor import build_predictor, check_run

STEPS = ["train.steps=3", "evaluate.every_steps=3"]
# Whole images: new ones have no boxes to crop people from.
MORE = {
    "keypoints": ["data.val.transforms.0={name: resize, size: [64, 64]}"],
    "segmentation": ["evaluate.original_size=true"],
}


@pytest.fixture(autouse=True, scope="module")
def _settings() -> Iterator[None]:
    with settings_kept():
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained run of each task, `runs/KIND`, and its data, moved to `moved/KIND` after training."""
    folder = tmp_path_factory.mktemp("predict")
    for kind in KINDS:
        recipe = write_sample(kind, folder)
        spread_category_ids(folder / kind)
        words = [*STEPS, *MORE.get(kind, [])]
        assert cli.main(["train", str(recipe), *words, "--out", str(folder / "runs" / kind)]) == 0
    classes = folder / "classification"
    for index in range(12):
        path = classes / "train" / "ab"[index % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(index).integers(0, 256, (20, 24, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(path)
    recipe = folder / "classification.json"
    resize = {"name": "resize", "size": [16, 16]}
    split = {"dataset": "image_folder", "root": str(classes), "split": "train", "transforms": [resize]}
    recipe.write_text(json.dumps({
        "name": "classification", "task": "classification", "model": {"name": "convnet", "widths": [4, 8]},
        "data": {"batch_size": 6, "train": split, "val": split}, "losses": ["cross_entropy"],
        "optimizer": {"name": "sgd", "lr": 0.1}, "train": {"epochs": 1, "device": "cpu", "averaging": {"name": "ema"}},
        "evaluate": {"batch_size": 5, "save_predictions": True}, "logging": {"images": False, "tensorboard": False},
    }))  # fmt: skip
    assert cli.main(["train", str(recipe), "--out", str(folder / "runs" / "classification")]) == 0
    (folder / "moved").mkdir()
    for kind in [*KINDS, "classification"]:
        (folder / kind).rename(folder / "moved" / kind)
    return folder


def spread_category_ids(data: Path) -> None:
    """Give the categories of COCO files ids with gaps, as COCO's own have."""
    for file in data.glob("*.json"):
        content = json.loads(file.read_text())
        for each in content["categories"]:
            each["id"] = each["id"] * 10 + 7
        for each in content["annotations"]:
            each["category_id"] = each["category_id"] * 10 + 7
        file.write_text(json.dumps(content))


def val_files(runs: Path, kind: str) -> list[Path]:
    """The files of the validation split, in its order."""
    data = runs / "moved" / kind
    if kind == "video":
        return [data / line.split(",")[0] for line in (data / "val.csv").read_text().splitlines()]
    if kind == "classification":
        return sorted(data.rglob("*.png"))
    return [data / "images" / f"image_{index:04d}.jpg" for index in range(NUMBER - NUM_VAL, NUMBER)]


def predict(runs: Path, kind: str, out: Path, *words: str) -> int:
    files = [str(path) for path in val_files(runs, kind)]
    return cli.main(["predict", str(runs / "runs" / kind), *files, "--out", str(out), *words])


@pytest.mark.parametrize("kind", ["saliency", "segmentation"])
def test_maps_are_those_of_the_evaluation(kind: str, runs: Path, tmp_path: Path) -> None:
    assert predict(runs, kind, tmp_path / "out") == 0
    saved = predictions(runs / "runs" / kind)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out" / "masks").rglob("*.png")} == saved
    assert len(saved) == NUM_VAL == len(list((tmp_path / "out" / "images").iterdir()))


def test_detections_are_those_of_the_evaluation(runs: Path, tmp_path: Path) -> None:
    assert predict(runs, "detection", tmp_path) == 0
    saved = json.loads(predictions(runs / "runs" / "detection")["val.json"])
    found = json.loads((tmp_path / "predictions.json").read_text())

    def rows(results: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        return [(Path(each["file_name"]).name, each["category_id"], *each["bbox"], each["score"]) for each in results]

    assert rows(found) == rows(saved)
    assert {each["category_id"] for each in found} <= {17, 27, 37}
    assert len(found) > NUM_VAL


def test_instances_are_those_of_the_evaluation(runs: Path, tmp_path: Path) -> None:
    assert predict(runs, "instance_segmentation", tmp_path) == 0
    run = runs / "runs" / "instance_segmentation"
    saved = predictions(run)
    expected = json.loads(saved.pop("val.json"))
    found = json.loads((tmp_path / "predictions.json").read_text())
    keys = ("category_id", "bbox", "score", "segmentation")
    assert [[each[key] for key in keys] for each in found] == [[each[key] for key in keys] for each in expected]
    assert {path.name: path.read_bytes() for path in (tmp_path / "masks").iterdir()} == saved
    (first,) = paceline.load(run).predict(val_files(runs, "instance_segmentation")[:1])
    assert first is not None
    runs_of_first = [each["segmentation"] for each in found if each["image_id"] == found[0]["image_id"]]
    assert np.array_equal(first["masks"].transpose(1, 2, 0), mask.decode(runs_of_first))


def test_keypoints_are_those_of_the_evaluation(runs: Path, tmp_path: Path) -> None:
    assert predict(runs, "keypoints", tmp_path) == 0
    saved = json.loads(predictions(runs / "runs" / "keypoints")["val.json"])  # a person a row, so an image twice
    expected = {Path(each["file_name"]).name: (each["keypoints"], each["score"]) for each in saved}
    found = json.loads((tmp_path / "predictions.json").read_text())
    assert {Path(each["file_name"]).name: (each["keypoints"], each["score"]) for each in found} == expected
    assert len(found) == NUM_VAL == len(list((tmp_path / "images").iterdir()))
    (first,) = paceline.load(runs / "runs" / "keypoints").predict(val_files(runs, "keypoints")[:1])
    assert first is not None
    assert first["names"][13] == "head_top"
    assert first["keypoints"][0, 0] == pytest.approx(found[0]["keypoints"][0] + 0.5, abs=1e-3)


@pytest.mark.parametrize("kind", ["video", "classification"])
def test_classes_are_those_of_the_evaluation(kind: str, runs: Path, tmp_path: Path) -> None:
    assert predict(runs, kind, tmp_path, "--no-images") == 0
    saved = list(csv.DictReader(io.StringIO(predictions(runs / "runs" / kind)["val.csv"].decode())))
    found = list(csv.DictReader((tmp_path / "predictions.csv").open()))
    files = [row["path"] for row in found[:2]]
    assert [Path(row.pop("path")).name for row in found] == [Path(row.pop("path")).name for row in saved]
    assert found == [{name: value for name, value in row.items() if name != "label"} for row in saved]
    assert [each and each["predicted"] for each in paceline.load(runs / "runs" / kind).predict(files)] == [
        row["predicted"] for row in found[:2]
    ], "one label is a name"
    assert not (tmp_path / "images").exists()


def test_two_processes_write_the_same_files(runs: Path, tmp_path: Path) -> None:
    assert predict(runs, "detection", tmp_path / "one") == 0
    files = [str(path) for path in val_files(runs, "detection")]
    words = ["predict", str(runs / "runs" / "detection"), *files, "--out", str(tmp_path / "two"), "--procs", "2"]
    done = forkserver.paceline(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / name).rglob("*.*")} for name in ("one", "two"))
    assert one == two


def test_broken_files_are_named_and_skipped(runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "photos"
    shutil.copytree(runs / "moved" / "classification", folder)
    (folder / "broken.png").write_bytes(b"not an image")
    (folder / "notes.md").write_text("no image")
    run = str(runs / "runs" / "classification")
    assert cli.main(["predict", run, str(folder), "--out", str(tmp_path / "out")]) == 0
    printed = capfd.readouterr()
    assert "broken.png" in printed.err
    assert f"inputs: skipped sample 0 ({folder / 'broken.png'}): " in printed.err
    assert "12 inputs predicted, 1 skipped" in printed.out
    assert cli.main(["predict", run, str(folder / "broken.png"), "--out", str(tmp_path / "none")]) == 3
    assert cli.main(["predict", run, str(tmp_path / "absent.png"), "--out", str(tmp_path / "none")]) == 2
    assert cli.main(["predict", run, str(tmp_path / "out" / "predictions.csv"), "--out", str(tmp_path / "none")]) == 3
    assert cli.main(["predict", str(folder), str(folder), "--out", str(tmp_path / "none")]) == 2


def test_a_second_prediction_replaces_the_first_and_nothing_else(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, files, out = str(runs / "runs" / "saliency"), val_files(runs, "saliency"), tmp_path / "out"
    assert cli.main(["predict", run, str(files[0]), str(files[1]), "--out", str(out)]) == 0
    (out / "notes.txt").write_text("mine")
    assert cli.main(["predict", run, str(files[1]), "--out", str(out)]) == 0
    stem = files[1].stem
    left = {path.relative_to(out).as_posix() for path in out.rglob("*.*")}
    assert left == {"notes.txt", "predict.json", f"masks/{stem}.png", f"images/{stem}.jpg"}
    assert json.loads((out / "predict.json").read_text())["run"] == run
    assert cli.main(["predict", run, str(files[1]), "--out", str(out), "--no-images"]) == 0
    assert not (out / "images").exists()
    (tmp_path / "data" / "masks").mkdir(parents=True)
    (tmp_path / "data" / "masks" / "truth.png").write_bytes(b"")
    assert cli.main(["predict", run, str(files[1]), "--out", str(tmp_path / "data")]) == 2
    assert "it holds masks" in capfd.readouterr().err
    assert [path.name for path in (tmp_path / "data").rglob("*.*")] == ["truth.png"]


def test_lists_averages_and_flipped_images(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(runs / "runs" / "classification")
    names = tmp_path / "names.csv"
    names.write_text("path\n" + "".join(f"{path}\n" for path in val_files(runs, "classification")[:3]))
    found = {}
    for name, words in {"plain": [], "average": ["--average"], "tta": ["--tta"]}.items():
        assert cli.main(["predict", run, str(names), "--out", str(tmp_path / name), "--no-images", *words]) == 0
        found[name] = list(csv.DictReader((tmp_path / name / "predictions.csv").open()))
        assert len(found[name]) == 3
    assert found["plain"] != found["average"]
    assert found["plain"] != found["tta"]
    unfit = tmp_path / "unfit"
    unfit.mkdir()
    capsys.readouterr()
    assert cli.main(["recipes", "mae_fashion"]) == 0
    (unfit / "recipe.yaml").write_text(capsys.readouterr().out)
    assert cli.main(["predict", str(unfit), str(names), "--out", str(tmp_path), "--tta"]) == 2
    assert "--tta" in capsys.readouterr().err


def test_the_least_score_of_detections(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, scores = str(val_files(runs, "detection")[0]), {}
    for name, words in {"all": [], "best": ["--score", "0.2"]}.items():
        run = str(runs / "runs" / "detection")
        assert cli.main(["predict", run, file, "--out", str(tmp_path / name), *words]) == 0
        scores[name] = [each["score"] for each in json.loads((tmp_path / name / "predictions.json").read_text())]
    assert 0 < len(scores["best"]) < len(scores["all"])
    assert scores["best"] == [score for score in scores["all"] if score >= 0.2]
    other = str(runs / "runs" / "classification")
    assert cli.main(["predict", other, file, "--out", str(tmp_path / "none"), "--score", "0.2"]) == 2
    assert "--score" in capsys.readouterr().err
    for score in ("2", "-0.1", "nan"):
        assert cli.main(["predict", run, file, "--out", str(tmp_path / "none"), "--score", score]) == 2
        assert capsys.readouterr().err.startswith(f"--score {score}: ")


@pytest.mark.parametrize("kind", ["detection", "saliency"])
def test_with_tta_predictions_of_a_flipped_image_are_flipped(kind: str, runs: Path) -> None:
    run = runs / "runs" / kind
    image = np.asarray(Image.open(val_files(runs, kind)[0]))
    pair = [image, np.ascontiguousarray(image[:, ::-1])]
    plain = paceline.load(run).predict(pair)
    both = build_predictor(check_run(run, flips=True), run).predict(pair)
    assert _flip_distance(plain, image.shape[1]) > 2 * _flip_distance(both, image.shape[1])
    assert _flip_distance(both, image.shape[1]) < 1


def _flip_distance(results: list[dict[str, Any] | None], width: int) -> float:
    """How far the second result is from the first one flipped: levels of a map, or pixels of the best boxes."""
    first, second = results
    assert first is not None
    assert second is not None
    if "mask" in first:
        return float(np.abs(first["mask"].astype(float) - second["mask"][:, ::-1]).mean())
    best, other = first["boxes"][:5], second["boxes"][:5]
    flipped = np.stack([width - other[:, 2], other[:, 1], width - other[:, 0], other[:, 3]], 1)
    return float(np.abs(best - flipped).max())


def test_progress_counts_up_to_the_number_of_inputs(runs: Path, tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    predictor = paceline.load(runs / "runs" / "classification")
    predictor.predict_files(
        val_files(runs, "classification"), tmp_path, False, lambda number, total: steps.append((number, total))
    )
    assert sorted(steps) == [(2, 12), (5, 12), (5, 12)]  # batches of 5; those of several threads in any order


def test_predict_from_python(runs: Path) -> None:
    predictor = paceline.load(runs / "runs" / "classification")
    files = val_files(runs, "classification")[:3]
    by_file, by_array = predictor.predict(files), predictor.predict([np.asarray(Image.open(path)) for path in files])
    assert by_file == by_array
    assert by_file[0] is not None
    again = predictor.predict([files[1], files[0], files[1]])
    assert again == [by_file[1], by_file[0], by_file[1]], "one for each input"
    assert set(by_file[0]["probabilities"]) == set(predictor.classes) == {"a", "b"}
    (mask,) = paceline.load(runs / "runs" / "saliency").predict(val_files(runs, "saliency")[:1])
    assert mask is not None
    assert mask["mask"].shape == np.asarray(Image.open(val_files(runs, "saliency")[0])).shape[:2]
