"""A trained run as a predictor: built from its checkpoint, without the data that it was trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoint.reader import Checkpoint
from paceline.core.errors import CheckpointError, DataError, UsageError
from paceline.core.generators import unchanged_generators
from paceline.core.signatures import signature_of
from paceline.data.datasets.image_folder import Placeholder, UnlabeledArrays, UnlabeledFiles, find_files
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
from paceline.recipe.schema import DatasetPart, TransformPart
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
    data = found.state["data"].get("train")
    if not data:
        raise CheckpointError(f"{found.path} does not say which classes it was trained on; train it again")
    inputs = Inputs(builder, DataFingerprint.from_json(data))
    blank = inputs.loader(inputs.blank())
    run = builder.run(Path(), {"train": blank})
    run.state.load_model(found)
    run.state.load_average(found)
    if average:
        _check_average(run, found.path)
    inputs.placeholder = placeholder(run.task)
    return Predictor(run, inputs, found, average)


def _check_average(run: Run, checkpoint: Path) -> None:
    if not run.averaging.is_ready:
        raise UsageError(f"{checkpoint} has no average of the weights; train with train.averaging, or leave it out")
    if run.averaging.needs_statistics:
        raise UsageError(
            f"{checkpoint}: BatchNorm statistics of this average need the training data; predict without it, or train"
            " with train.averaging: ema"
        )


def _is_image(images: Any) -> bool:
    """Whether this is one image, and not several."""
    return isinstance(images, np.ndarray) and (images.ndim == 2 or (images.ndim == 3 and images.shape[-1] <= 4))


class Inputs:
    """Makes loaders of inputs, with the transforms of evaluation."""

    def __init__(self, builder: Builder, data: DataFingerprint) -> None:
        self.builder = builder
        self.classes, self.channels, self.joints = data.classes, data.channels, data.joints
        task = resolve("task", builder.recipe.task.name)
        self.reads_videos = isinstance(task, type) and issubclass(task, VideoClassification)
        self.placeholder: Placeholder = every_placeholder

    def blank(self) -> Dataset:
        """What stands for the data while the model is built."""
        if self.reads_videos:
            return UnlabeledFiles([Path()] * 2, self.classes, self.channels, self.placeholder, reads_videos=True)
        image = np.zeros((_BLANK, _BLANK, self.channels), np.uint8)
        images = UnlabeledArrays([image] * 2, self.classes, self.channels, self.placeholder)
        images.joints = self.joints
        return images

    def loader(self, dataset: Dataset, skips: SkipList | None = None) -> SplitLoader:
        """The inputs as evaluation sees its samples."""
        split, part = self._split()
        return add_transforms(self.builder, split, part, dataset, skips)

    def own_loader(self) -> SplitLoader:
        """The run's own samples, as its evaluation sees them."""
        try:
            return make_split_loader(self.builder, *self._split())
        except DataError as error:
            raise DataError(f"{error}; or give files with --samples") from error

    @property
    def transforms(self) -> Sequence[TransformPart]:
        """Those of evaluation, as the recipe has them."""
        return self._split()[1].transforms

    def _split(self) -> tuple[str, DatasetPart]:
        splits = self.builder.recipe.data.splits()
        split = next(name for name in ("val", *splits) if name in splits and (name != "train" or len(splits) == 1))
        return split, splits[split]


@dataclass
class Predictor:
    """A trained model with the transforms of its evaluation."""

    run: Run
    inputs: Inputs
    checkpoint: Checkpoint
    average: bool = False

    @property
    def classes(self) -> list[str]:
        """The names of the classes."""
        return list(self.inputs.classes)

    def predict(
        self, images: Sequence[str | Path | NDArray[np.uint8]] | str | Path | NDArray[np.uint8]
    ) -> list[dict[str, Any] | None]:
        """What is predicted for each image, a file or an array uint8 [H, W, C]; None for a file that cannot be read.

        Classification gives "predicted" and "probabilities"; segmentation and saliency "mask"; detection "boxes",
        "scores", "labels" and "names"; keypoints "keypoints", "scores" and "names"; a task of your own "output", or the
        names of the dict that its `predict` gives.
        """
        given = [images] if isinstance(images, str | Path) or _is_image(images) else list(images)
        paths = [Path(str(each)) for each in given] if all(isinstance(each, str | Path) for each in given) else []
        if paths:
            dataset: Dataset = self._files(paths)
        else:
            inputs = self.inputs
            dataset = UnlabeledArrays(
                [np.asarray(each) for each in given], inputs.classes, inputs.channels, inputs.placeholder
            )
        writer = ResultList(len(dataset), self.run.task)
        if len(dataset):
            found = self._predict(dataset, [writer], SkipList("inputs", len(dataset)))
            if found.problem:
                raise UsageError(found.problem)
        places = {dataset.path(index): index for index in range(len(dataset))} if paths else {}  # type: ignore[attr-defined]
        if places.keys() >= set(paths):  # one may be given several times; folders and lists are several
            return [writer.results[places[path]] for path in paths] if paths else writer.results
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
        skips = SkipList("inputs", len(dataset))
        return self._predict(dataset, prediction_writers(out, dataset, self.run.task, draws), skips, progress)

    def export(self, folder: Path, options: ExportOptions, samples: Sequence[Path] | None = None) -> list[ExportedFile]:
        """Write the model into a folder, checked on the run's own samples, or on the files that are given."""
        inputs, recipe = self.inputs, self.inputs.builder.recipe
        loader = inputs.loader(self._files(samples)) if samples else inputs.own_loader()
        about = {
            "run": recipe.name,
            "task": recipe.task.name,
            "model": recipe.model.name,
            "step": self.checkpoint.step,
            "average": self.average,
            "transforms": [transform.model_dump(mode="json") for transform in inputs.transforms],
        }
        self.run.evaluations = make_evaluations(inputs.builder, {"val": loader})
        with averaged(self.run, "val") if self.average else nullcontext():
            return export(self.run, loader, folder, options, about)

    def _files(self, paths: Sequence[Path]) -> UnlabeledFiles:
        inputs = self.inputs
        files = find_files(paths, inputs.reads_videos)
        return UnlabeledFiles(files, inputs.classes, inputs.channels, inputs.placeholder, inputs.reads_videos)

    def _predict(
        self,
        dataset: Dataset,
        writers: Sequence[PredictionWriter],
        skips: SkipList,
        progress: Callable[[int, int], None] = lambda number, total: None,
    ) -> Predicted:
        self.run.evaluations = make_evaluations(self.inputs.builder, {"val": self.inputs.loader(dataset, skips)})
        with averaged(self.run, "val") if self.average else nullcontext():
            return predict(self.run, self.run.evaluations["val"], writers, progress)
