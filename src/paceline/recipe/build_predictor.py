"""A trained run as a predictor: built from its checkpoint, without the data that it was trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoint.reader import Checkpoint
from paceline.core.errors import CheckpointError, DataError, UsageError
from paceline.core.generators import unchanged_generators
from paceline.core.signatures import signature_of
from paceline.data.datasets.image_folder import UnlabeledArrays, UnlabeledFiles, find_files
from paceline.data.fingerprint import DataFingerprint
from paceline.data.skip_list import SkipList
from paceline.data.split_loader import Dataset, SplitLoader
from paceline.engine.evaluate import averaged
from paceline.engine.export import ExportedFile, ExportOptions, export
from paceline.engine.predict import (
    Predicted,
    ResultList,
    every_placeholder,
    placeholder,
    predict,
    prediction_writers,
)
from paceline.engine.predictions import PredictionWriter
from paceline.engine.run import Run
from paceline.recipe.build import Builder
from paceline.recipe.build_context import open_together, resolve
from paceline.recipe.build_data import add_transforms, make_evaluations, make_split_loader
from paceline.recipe.load import load as load_recipe
from paceline.recipe.load import run_recipe
from paceline.recipe.schema import DatasetPart
from paceline.recipe.user_modules import read_checked
from paceline.recipe.validate import CheckedRecipe, validate
from paceline.tasks.video import VideoClassification

_ALWAYS = ["train.activation_checkpointing=none", "train.compile=false", "model.weights=null"]
EXPORT = [
    "train.device=cpu",
    "train.devices=null",
    "train.precision=fp32",
    "train.loss_scale=null",
    "train.keep_norms_fp32=null",
    "train.strategy=auto",
    "train.sync_bn=false",
    "train.channels_last=false",
]
"""What a model is built with to be exported: its own weights in float32, on a CPU."""
_BLANK = 256  # pixels of the image that stands for the data while the model is built


@unchanged_generators()
def load(run_directory: str | Path, checkpoint: str | Path | None = None, average: bool = False) -> Predictor:
    """A trained run, ready for `predict`: its best checkpoint, or the one that is named."""
    named = None if checkpoint is None else Path(checkpoint)
    return build_predictor(check_run(Path(run_directory)), Path(run_directory), named, average)


def check_run(
    run_directory: Path,
    modules: Sequence[str] = (),
    flips: bool = False,
    min_score: float | None = None,
    overrides: Sequence[str] = (),
) -> CheckedRecipe:
    """The recipe of a run directory as prediction needs it: maps at the original size, perhaps of mirror images too."""
    recipe, always = str(run_recipe(run_directory)), [*_ALWAYS, *overrides]
    checked = read_checked(recipe, always, modules, is_run=True)
    name = checked.recipe.task.name
    task = resolve("task", name)
    if flips and "flip" not in signature_of(task).parameters:
        raise UsageError(f"--tta: task {name} cannot average over mirror images; leave it out")
    if min_score is not None and "min_score" not in signature_of(task).parameters:
        raise UsageError(f"--score: task {name} predicts nothing that has a score of its own; leave it out")
    is_original = hasattr(task, "maps") or hasattr(task, "keypoint_metric")
    further = {
        "task.flip=true": flips,
        f"task.min_score={min_score}": min_score is not None,
        "evaluate.original_size=true": is_original,
    }
    chosen = validate(load_recipe(recipe, [*always, *(each for each, is_needed in further.items() if is_needed)]))
    return replace(chosen, notes=[*checked.notes, *chosen.notes])


def build_predictor(
    checked: CheckedRecipe, run_directory: Path, checkpoint: Path | None = None, average: bool = False
) -> Predictor:
    """The predictor of a checkpoint; classes and channels are those that the checkpoint was trained with."""
    builder = Builder(checked, trains=False)
    found = open_together(builder.world, run_directory, checkpoint)
    trained_on = found.state["data"].get("train")
    if not trained_on:
        raise CheckpointError(f"{found.path} does not say which classes it was trained on; train it again")
    data = DataFingerprint.from_json(trained_on)
    split, part = _split(builder)
    run = builder.run(Path(), {"train": add_transforms(builder, split, part, _blank(builder, data), None)})
    run.state.load_model(found)
    run.state.load_average(found)
    if average:
        _check_average(run, found.path)
    return Predictor(run, builder, data, found, average)


def _split(builder: Builder) -> tuple[str, DatasetPart]:
    """The split whose transforms are those of evaluation."""
    splits = builder.recipe.data.splits()
    split = next(name for name in ("val", *splits) if name in splits and (name != "train" or len(splits) == 1))
    return split, splits[split]


def _reads_videos(builder: Builder) -> bool:
    task = resolve("task", builder.recipe.task.name)
    return isinstance(task, type) and issubclass(task, VideoClassification)


def _blank(builder: Builder, data: DataFingerprint) -> Dataset:
    """What stands for the data while the model is built."""
    if _reads_videos(builder):
        return UnlabeledFiles([Path()] * 2, data.classes, data.channels, every_placeholder, reads_videos=True)
    image = np.zeros((_BLANK, _BLANK, data.channels), np.uint8)
    images = UnlabeledArrays([image] * 2, data.classes, data.channels, every_placeholder)
    images.joints = data.joints
    return images


def _check_average(run: Run, checkpoint: Path) -> None:
    if not run.averaging.is_ready:
        raise UsageError(f"{checkpoint} has no average of the weights; train with train.averaging, or leave it out")
    if run.averaging.needs_statistics:
        raise UsageError(
            f"{checkpoint}: BatchNorm statistics of this average need the training data; predict without it, or train"
            " with train.averaging: ema"
        )


@dataclass
class Predictor:
    """A trained model with the transforms of its evaluation."""

    run: Run
    builder: Builder
    data: DataFingerprint
    """What the model was trained on."""
    checkpoint: Checkpoint
    average: bool = False

    @property
    def classes(self) -> list[str]:
        return list(self.data.classes)

    def predict(
        self, images: Sequence[str | Path | NDArray[np.uint8]] | str | Path | NDArray[np.uint8]
    ) -> list[dict[str, Any] | None]:
        """What is predicted for each image, a file or an array uint8 [H, W, C]; None for a file that cannot be read.

        Classification gives "predicted" and "probabilities"; segmentation and saliency "mask"; detection "boxes",
        "scores", "labels" and "names"; instance segmentation "masks" [K, H, W] too; keypoints "keypoints", "scores" and
        "names"; a task of your own "output", or the names of the dict that its `predict` gives.
        """
        is_image = isinstance(images, np.ndarray) and (images.ndim == 2 or (images.ndim == 3 and images.shape[-1] <= 4))
        given: list[Any] = [images] if isinstance(images, str | Path) or is_image else list(images)
        paths = [Path(each) for each in given] if all(isinstance(each, str | Path) for each in given) else []
        if paths:
            files = self._files(paths)
            results = self._results(files)
            places = {files.path(index): index for index in range(len(files))}
            # One may be given several times; folders and lists are several.
            return [results[places[path]] for path in paths] if places.keys() >= set(paths) else results
        arrays = [np.asarray(each) for each in given]
        filled = placeholder(self.run.task)
        return self._results(UnlabeledArrays(arrays, self.data.classes, self.data.channels, filled))

    def _results(self, dataset: Dataset) -> list[dict[str, Any] | None]:
        writer = ResultList(len(dataset), self.run.task)
        if len(dataset) and (problem := self._predict(dataset, [writer], SkipList("inputs", len(dataset))).problem):
            raise UsageError(problem)
        return writer.results

    def predict_files(
        self,
        paths: Sequence[Path],
        out: Path,
        draws: bool = True,
        progress: Callable[[int, int], None] = lambda number, total: None,
    ) -> Predicted:
        """Predict files and folders, and write tables, maps and drawn images below `out`.

        `progress` is called with the number of inputs of each batch of this rank, and that of all inputs.
        """
        dataset = self._files(paths)
        writers = prediction_writers(out, dataset, self.run.task, draws)
        return self._predict(dataset, writers, SkipList("inputs", len(dataset)), progress)

    def export(self, folder: Path, options: ExportOptions, samples: Sequence[Path] | None = None) -> list[ExportedFile]:
        """Write the model into a folder, checked on the run's own samples, or on the files that are given."""
        recipe = self.builder.recipe
        split, part = _split(self.builder)
        try:
            loader = self.loader(self._files(samples)) if samples else make_split_loader(self.builder, split, part)
        except DataError as error:
            raise error if samples else DataError(f"{error}; or give files with --samples") from error
        about = {
            "run": recipe.name,
            "task": recipe.task.name,
            "model": recipe.model.name,
            "step": self.checkpoint.step,
            "average": self.average,
            "transforms": [transform.model_dump(mode="json") for transform in part.transforms],
        }
        with self._evaluating(loader):
            return export(self.run, loader, folder, options, about)

    def _files(self, paths: Sequence[Path]) -> UnlabeledFiles:
        reads_videos = _reads_videos(self.builder)
        files, filled = find_files(paths, reads_videos), placeholder(self.run.task)
        found = UnlabeledFiles(files, self.data.classes, self.data.channels, filled, reads_videos)
        found.category_ids = self.data.category_ids
        return found

    def loader(self, dataset: Dataset, skips: SkipList | None = None) -> SplitLoader:
        """The inputs as evaluation sees its samples."""
        loader = add_transforms(self.builder, *_split(self.builder), dataset, skips)
        loader.padding = self.run.train_loader.padding
        return loader

    def _predict(
        self,
        dataset: Dataset,
        writers: Sequence[PredictionWriter],
        skips: SkipList,
        progress: Callable[[int, int], None] = lambda number, total: None,
    ) -> Predicted:
        with self._evaluating(self.loader(dataset, skips)):
            return predict(self.run, self.run.evaluations["val"], writers, progress)

    def _evaluating(self, loader: SplitLoader) -> AbstractContextManager[Any]:
        """The run evaluates this split, with its average if that is asked for."""
        self.run.evaluations = make_evaluations(self.builder, {"val": loader})
        return averaged(self.run, "val") if self.average else nullcontext()
