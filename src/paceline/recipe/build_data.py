"""Build the data of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.core.errors import DataError, RecipeError
from paceline.core.intervals import Progress
from paceline.core.signatures import signature_of
from paceline.core.text import join_first, pluralize
from paceline.data.aspect_ratio import GroupedPermutation, group_by_aspect_ratio
from paceline.data.datasets.detection import DetectionDataset
from paceline.data.datasets.torch_dataset import as_dataset
from paceline.data.loader import TrainBatches
from paceline.data.padding import padding_for
from paceline.data.sampler import BatchSampler, Permutation, automatic_micro_batch_size, check_processes
from paceline.data.skip_list import UNREADABLE, SkipList, automatic_limit
from paceline.data.split_loader import Dataset, SplitLoader
from paceline.data.transforms.base import KeepOriginal
from paceline.data.transforms.torchvision_v2 import as_transform
from paceline.engine.run import EvaluationSet, make_evaluation_set
from paceline.recipe.build_context import BuildContext, resolve
from paceline.recipe.schema import DatasetPart, Recipe

_MAX_CLASSES = 5  # that a message lists
_MAX_NOTES = 5  # of a data set, at the start of a run


def make_split_loaders(context: BuildContext) -> dict[str, SplitLoader]:
    """The loaders of all splits, with their transforms."""
    return {split: make_split_loader(context, split, part) for split, part in context.recipe.data.splits().items()}


def find_classes(context: BuildContext, loaders: Mapping[str, SplitLoader]) -> list[str]:
    """The class names, checked to be the same in every split and to match `model.num_classes`."""
    names = list(getattr(loaders["train"].dataset, "classes", []))
    for split, loader in loaders.items():
        with context.error_context(f"data.{split}"):
            reason = getattr(loader.dataset, "why_no_labels", "")
            if names and reason:
                raise DataError(reason)
            _check_classes(split, list(getattr(loader.dataset, "classes", [])), names)
    asked = context.recipe.model.num_classes
    if asked is not None and names and asked != len(names):
        found = f"expected {len(names)}, the number of classes in data.train, got {asked}"
        raise RecipeError(f"{context.checked.locate('model.num_classes')}: {found}")
    if not names and asked is None:
        _check_outputs(context, loaders["train"])
    return names or [str(number) for number in range(asked or 0)]


def _check_outputs(context: BuildContext, loader: SplitLoader) -> None:
    """Raise RecipeError if nothing says how many outputs the model has, although it takes the number."""
    takes_number = "num_classes" in signature_of(resolve("model", context.recipe.model.name)).parameters
    if not takes_number or not getattr(loader.dataset, "has_labels", True):
        return
    with suppress(*UNREADABLE):
        sample, name = loader.dataset.read(0), context.recipe.data.train.dataset
        if "label" in sample:
            found = f"data set {name} has labels but no `classes`: add `classes = [...]`, or set model.num_classes"
        elif "target" in sample:
            found = f"data set {name} has targets but no `classes`: set it to the number of outputs"
        else:
            return
        raise RecipeError(f"{context.checked.locate('model.num_classes')}: {found}")


def make_sampler(context: BuildContext, size: int) -> BatchSampler:
    """The sampler that divides steps into micro-batches."""
    data, micro = context.recipe.data, context.recipe.train.micro_batch_size
    if data.drop_last and size < data.batch_size:
        message = f"expected at most {size}, the number of samples in data.train, since data.drop_last is true"
        raise RecipeError(f"{context.checked.locate('data.batch_size')}: {message}, got {data.batch_size}")
    context.notes += oversized_batch(context, size)
    multiple = context.world.size if context.recipe.train.sync_bn else 1
    if micro == "auto":
        is_world = context.recipe.train.reproducible == "world"
        micro = automatic_micro_batch_size(min(data.batch_size, size), context.world.size, is_world)
    return BatchSampler(size, data.batch_size, micro, data.drop_last, multiple)


def oversized_batch(context: BuildContext, size: int) -> list[str]:
    """A warning if a step asks for more samples than there are."""
    asked = context.recipe.data.batch_size
    found = f"{asked:,} is more than the {pluralize(size, 'sample')} of data.train, so a step is an epoch"
    return [f"{context.checked.locate('data.batch_size')}: {found}"] if asked > size else []


def check_sampler(context: BuildContext, sampler: BatchSampler) -> None:
    """Raise if a step cannot be divided among the processes."""
    world, last = context.world.size, sampler.size % sampler.batch
    check_processes(sampler, world)
    if sampler.multiple > 1 and 0 < last < world and not sampler.drop_last:
        found = f"the last step of an epoch has {pluralize(last, 'sample')}"
        message = f"{found}, fewer than the {world} processes of sync_bn"
        raise RecipeError(f"{context.checked.locate('train.sync_bn')}: {message}; set data.drop_last to true")


def make_batches(context: BuildContext, loader: SplitLoader, sampler: BatchSampler, progress: Progress) -> TrainBatches:
    """The loader of global batches."""
    data = context.recipe.data
    if data.loader == "memory" and not loader.in_memory:
        message = "memory needs a data set in memory and batch transforms only; use auto"
        raise RecipeError(f"{context.checked.locate('data.loader')}: {message}")
    workers = None if data.num_workers == "auto" else data.num_workers
    order = _make_order(context, loader, sampler)
    return TrainBatches(loader, sampler, context.world, progress, workers, kind=data.loader, order=order)


def check_objects(context: BuildContext, dataset: Dataset) -> None:
    """Raise DataError if a task that learns from objects has none to learn from."""
    learns = hasattr(resolve("task", context.recipe.task.name), "detection_metric")
    if not learns or not isinstance(dataset, DetectionDataset) or dataset.count_objects():
        return
    found = f"none of its {pluralize(len(dataset), 'image')} has an object to learn from"
    known = f" ({'; '.join(dataset.notes[:2])})" if dataset.notes else ""
    where = f"{context.checked.locate('data.train')}: {dataset.annotations}"
    raise DataError(f"{where}: {found}{known}; repair the labels, or how data.train reads them")


def check_groups(context: BuildContext, loader: SplitLoader) -> None:
    """Raise RecipeError if images are to be grouped by aspect ratio, and cannot or need not be."""
    if context.recipe.data.aspect_ratio_group_factor is None:
        return
    found = f"task {context.recipe.task.name} takes images of one size" if loader.padding is None else ""
    if not found and not hasattr(loader.dataset, "image_sizes"):
        found = f"data set {context.recipe.data.train.dataset} does not know the sizes of its images"
    if found:
        raise RecipeError(f"{context.checked.locate('data.aspect_ratio_group_factor')}: {found}; take the key out")


def _make_order(context: BuildContext, loader: SplitLoader, sampler: BatchSampler) -> Permutation | GroupedPermutation:
    factor, seed = context.recipe.data.aspect_ratio_group_factor, context.recipe.train.seed
    find_sizes = getattr(loader.dataset, "image_sizes", None)
    if factor is None or find_sizes is None:  # of data that stands for what is not there, to predict or to plan
        return Permutation(sampler.size, seed)
    with context.error_context("data.aspect_ratio_group_factor"):
        return GroupedPermutation(group_by_aspect_ratio(find_sizes(), factor), sampler.batch, seed)


def check_dali(context: BuildContext, loader: SplitLoader) -> None:
    """Raise if DALI is to load the training samples and cannot; note that it does not load others."""
    if context.recipe.data.loader != "dali":
        return
    from paceline.data.dali import find_refusal

    refusal = find_refusal(loader)
    if refusal is not None:
        key = "data.loader" if refusal.key is None else f"data.train.{refusal.key}"
        raise RecipeError(f"{context.checked.locate(key)}: {refusal.reason}")
    if len(context.recipe.data.splits()) > 1:
        why = "so its metrics are those of eval on machines without DALI, and of predict"
        context.notes.append(f"data.loader: dali is for training; evaluation decodes the usual way, {why}")


def make_evaluations(context: BuildContext, loaders: Mapping[str, SplitLoader]) -> dict[str, EvaluationSet]:
    """The splits to evaluate."""
    evaluate = context.recipe.evaluate
    settings = context.world, evaluate.batch_size, evaluate.num_workers, evaluate.threads
    return {split: make_evaluation_set(loader, *settings) for split, loader in loaders.items() if split != "train"}


def num_channels(loader: SplitLoader) -> int:
    """The number of channels of a split's images."""
    known: int | None = getattr(loader.dataset, "channels", None)
    return known if known is not None else int(loader.dataset.read(0)["image"].shape[2])


def make_split_loader(context: BuildContext, split: str, part: DatasetPart) -> SplitLoader:
    """The loader of one split, with its transforms."""
    arguments = dict(part.model_extra or {})
    key = f"data.{split}"
    root, file = arguments.get("root"), arguments.get("file")
    if isinstance(root, str | Path):
        with context.error_context(f"{key}.root"):
            arguments["root"] = context.path(f"{key}.root", str(root))
        if isinstance(file, str) and not Path(arguments["root"], file).exists():
            with suppress(DataError):  # it need not lie in the root; the data set says where it was expected
                arguments["file"] = context.path(f"{key}.file", file)
    elif isinstance(file, str):
        with context.error_context(f"{key}.file"):
            arguments["file"] = context.path(f"{key}.file", file)
    with _naming_files(context, key, arguments):
        dataset: Dataset = as_dataset(part.dataset, context.call("dataset", part.dataset, arguments))
        if not len(dataset):
            found = "expected at least one sample, found 0; check where it looks for files"
            raise DataError(f"the data set {part.dataset} is empty: {found}")
    context.notes += _shortened(split, [*getattr(dataset, "notes", [])])
    return add_transforms(context, split, part, dataset, _skips(context, split, len(dataset)))


@contextmanager
def _naming_files(context: BuildContext, key: str, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Add the place and key to errors raised inside: of the argument whose file they are about, if of any."""
    try:
        with context.error_context(key):
            yield
    except DataError as error:
        files = (name for name, value in arguments.items() if isinstance(value, str) and f"/{value}: " in str(error))
        if (name := next(files, None)) is None:
            raise
        here, there = (context.checked.locate(each) for each in (key, f"{key}.{name}"))
        raise DataError(str(error).replace(here, there, 1)) from error


def add_transforms(
    context: BuildContext, split: str, part: DatasetPart, dataset: Dataset, skips: SkipList | None
) -> SplitLoader:
    """The data set with the transforms that the recipe names for a split."""
    key = f"data.{split}"
    joints = getattr(dataset, "joints", None)
    supplied = {
        "num_classes": len(dataset.classes) or context.recipe.model.num_classes,
        "pairs": joints.pairs if joints else None,
    }
    transforms = []
    for index, transform in enumerate(part.transforms):
        with context.error_context(f"{key}.transforms.{index}"):
            made = context.make("transform", transform.name, transform, **supplied)
            transforms.append(as_transform(transform.name, made))
    with context.error_context(f"{key}.transforms"):
        if getattr(dataset, "reads_videos", False):
            from paceline.data.transforms.video import require_clips

            require_clips(dataset, transforms)
        if split != "train" and measures_original_size(context.recipe):
            transforms.insert(0, KeepOriginal())
        loader = SplitLoader(dataset, transforms, context.recipe.train.seed, skips)
        loader.padding = padding_for(resolve("task", context.recipe.task.name), None, dataset)
        return loader


def measures_original_size(recipe: Recipe) -> bool:
    """Whether evaluation is in the pixels of the images as they were read."""
    asked = recipe.evaluate.original_size
    return bool(getattr(resolve("task", recipe.task.name), "original_size", False)) if asked == "auto" else asked


def _shortened(split: str, notes: list[str]) -> list[str]:
    more = f"data.{split}: {len(notes) - _MAX_NOTES} more notes; `paceline data` shows them all"
    return [f"data.{split}: {note}" for note in notes[:_MAX_NOTES]] + [more] * (len(notes) > _MAX_NOTES)


def _skips(context: BuildContext, split: str, size: int) -> SkipList | None:
    data = context.recipe.data
    if data.on_error == "stop":
        return None
    return SkipList(split, automatic_limit(size) if data.max_skipped == "auto" else data.max_skipped)


def _check_classes(split: str, found: list[str], expected: list[str]) -> None:
    if found == expected:
        return
    sides = {f"data.{split}": set(found) - set(expected), "data.train": set(expected) - set(found)}
    only = [f"only {side} has {join_first(sorted(names), _MAX_CLASSES)}" for side, names in sides.items() if names]
    raise DataError(
        f"data.{split} has {pluralize(len(found), 'class')} and data.train has {len(expected)}; they must match:"
        f" {'; '.join(only) or 'their order differs'}"
    )
