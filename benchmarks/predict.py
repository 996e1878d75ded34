"""`paceline predict` on a folder of photos, against bare inference with the same loader."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from benchmarks.measuring import interleave, spread
from benchmarks.photos import MEAN, SIZE, STD, Photos
from benchmarks.report import Section, at_least
from paceline import cli
from paceline.core.process import num_cores
from paceline.data.datasets.image_folder import UnlabeledFiles, find_files
from paceline.data.sampler import evaluation_slices
from paceline.data.skip_list import SkipList
from paceline.engine.predict import placeholder
from paceline.recipe.build_data import make_evaluations
from paceline.recipe.build_predictor import Predictor, load

GOAL = 0.9
_COUNT, _BROKEN = 1000, 3
_BARE, _DRAWN, _PLAIN = "bare inference", "predict", "predict --no-images"


def measure(is_quick: bool) -> Section:
    """Photos per second of the command's work, its start left out, over those of a plain loop."""
    rounds = 1 if is_quick else 3
    photos = Photos()
    folder = _add_broken(photos.root)
    with TemporaryDirectory(prefix="paceline-predict-") as name, contextlib.redirect_stderr(io.StringIO()):
        predictor = load(_train(Path(name), folder))
        turns = {
            _BARE: lambda: _bare(predictor, folder),
            _DRAWN: lambda: _predict(predictor, folder, Path(name) / "drawn", draws=True),
            _PLAIN: lambda: _predict(predictor, folder, Path(name) / "plain", draws=False),
        }
        measured = interleave(turns, rounds)
    rows, shares = [], {}
    for each in measured.values():
        ratios = [1 / ratio for ratio in each.ratios(measured[_BARE])]
        shares[each.name] = statistics.median(ratios)
        rows.append([each.name, f"{_COUNT / each.median:.1f}", f"{shares[each.name]:.2f}", spread(ratios)])
    return Section(
        "Predicting a folder of photos",
        f"{_COUNT} JPEG files of 500×375 pixels, {_BROKEN} of them broken: resize and center crop to {SIZE}, ResNet-18,"
        f" a batch on each core; {rounds} rounds. Bare inference reads the same files with the same loader and only"
        " calls the model; predict also writes its tables and, by default, an image with the prediction of each photo.",
        ["", "photos a second", "of bare inference", ""],
        rows,
        [at_least(f"{name}: photos a second, of bare inference's", shares[name], GOAL) for name in (_DRAWN, _PLAIN)],
    )


def _add_broken(root: Path) -> Path:
    """Bring the photos to their number, some of them cut short."""
    files = sorted(root.rglob("*.jpg"))
    for number in range(_COUNT - len(files)):
        content = files[number].read_bytes()
        is_broken = number < _BROKEN
        (root / f"more-{number:03}.jpg").write_bytes(content[: len(content) // 20] if is_broken else content)
    return root


def _train(folder: Path, photos: Path) -> Path:
    """A run of one step."""
    for index, path in enumerate(sorted(photos.glob("*/*.jpg"))[:8]):
        place = folder / "data" / "train" / "ab"[index % 2] / path.name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
    transforms = [
        {"name": "resize", "size": 256},
        {"name": "center_crop", "size": SIZE},
        {"name": "normalize", "mean": MEAN, "std": STD},
    ]
    split = {"dataset": "image_folder", "root": str(folder / "data"), "split": "train", "transforms": transforms}
    recipe = {
        "name": "photos", "task": "classification", "model": {"name": "timm/resnet18"},
        "data": {"batch_size": 8, "train": split, "val": split}, "losses": ["cross_entropy"],
        "optimizer": {"name": "sgd", "lr": 0.01}, "train": {"steps": 1, "device": "cpu"},
        "logging": {"images": False, "tensorboard": False},
    }  # fmt: skip
    (folder / "photos.json").write_text(json.dumps(recipe), encoding="utf-8")
    with contextlib.redirect_stdout(io.StringIO()):
        assert cli.main(["train", str(folder / "photos.json"), "--out", str(folder / "run")]) == 0
    return folder / "run"


def _predict(predictor: Predictor, photos: Path, out: Path, draws: bool) -> float:
    started = time.perf_counter()
    found = predictor.predict_files([photos], out, draws)
    assert (found.num_samples, found.num_skipped, found.problem) == (_COUNT - _BROKEN, _BROKEN, None)
    return time.perf_counter() - started


def _bare(predictor: Predictor, photos: Path) -> float:
    started = time.perf_counter()
    data = predictor.data
    files = find_files([photos], videos=False)
    dataset = UnlabeledFiles(files, data.classes, data.channels, placeholder(predictor.run.task))
    loader = predictor.loader(dataset, SkipList("inputs", len(dataset)))
    size = make_evaluations(predictor.builder, {"val": loader})["val"].batch_size
    model = predictor.run.model.eval()

    def infer(start: int, stop: int) -> int:
        with torch.inference_mode():
            batch = loader.transform_batch(loader.fetch(0, np.arange(start, stop)), 0, torch.device("cpu"))
            return len(model(batch["image"]))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with ThreadPoolExecutor(num_cores()) as pool:
        done = sum(pool.map(lambda cut: infer(cut.start, cut.stop), evaluation_slices(len(files), size)))
    torch.set_num_threads(threads)
    assert done == _COUNT - _BROKEN
    return time.perf_counter() - started
