"""The data of a run from its recipe."""

from __future__ import annotations

import math
from collections.abc import Mapping

from paceline.core.counting import counted
from paceline.core.errors import DataError, RecipeError, UsageError
from paceline.core.progress import Progress
from paceline.data.loading.loader import TrainBatches, automatic_workers
from paceline.data.loading.memory_room import keep_in_memory
from paceline.data.loading.source import Dataset, Source
from paceline.data.sampler import Order, Updates
from paceline.data.skipping import SkipList, automatic_limit
from paceline.engine.run import EvaluationSet
from paceline.recipe.schema import DatasetPart
from paceline.recipe.workshop import Workshop

_SPLITS = ("train", "val", "test")
_MOST_NOTES = 5  # of a data set that a run begins with
_WORLD_PARTS, _WORLD_LEAST = (
    8,
    16,
)  # micro-batches of an update that any number of processes share, and their least size


def make_sources(shop: Workshop) -> dict[str, Source]:
    """Each split with its transforms."""
    parts = {split: getattr(shop.recipe.data, split) for split in _SPLITS}
    return {split: _source(shop, split, part) for split, part in parts.items() if part is not None}


def find_classes(shop: Workshop, sources: Mapping[str, Source]) -> list[str]:
    """The class names, the same in every split and as many as the recipe says."""
    names = list(getattr(sources["train"].dataset, "classes", []))
    for split, source in sources.items():
        with shop.speaking_of(f"data.{split}"):
            reason = getattr(source.dataset, "why_no_labels", "")
            if names and reason:
                raise DataError(reason)
            _check_classes(split, list(getattr(source.dataset, "classes", [])), names)
    asked = shop.recipe.model.num_classes
    if asked is not None and names and asked != len(names):
        found = f"expected {len(names)}, the number of classes in data.train, got {asked}"
        raise RecipeError(f"{shop.checked.locate('model.num_classes')}: {found}")
    return names or [str(number) for number in range(asked or 0)]


def make_updates(shop: Workshop, size: int) -> Updates:
    """How updates are cut (the batch contract)."""
    data, micro = shop.recipe.data, shop.recipe.train.micro_batch
    if data.drop_last and size < data.batch:
        message = f"expected at most {size}, the number of samples in data.train, since data.drop_last is true"
        raise RecipeError(f"{shop.checked.locate('data.batch')}: {message}, got {data.batch}")
    multiple = shop.mesh.world if shop.recipe.train.sync_bn else 1
    size_of_micro = automatic_micro_batch(shop, min(data.batch, size)) if micro == "auto" else micro
    return Updates(size, data.batch, size_of_micro, data.drop_last, multiple)


def automatic_micro_batch(shop: Workshop, samples: int) -> int:
    """An equal share of an update for each process; for bits that do not depend on processes, a share for each of 8."""
    if shop.recipe.train.reproducible == "world":
        return max(math.ceil(samples / _WORLD_PARTS), min(samples, _WORLD_LEAST))
    world = shop.mesh.world
    share = math.ceil(samples / world)
    return share if math.ceil(samples / share) >= world else max(1, samples // world)


def check_processes(shop: Workshop, updates: Updates) -> None:
    """Every process must have something to do in every update."""
    world, number = shop.mesh.world, len(updates.cuts(0))
    samples = min(updates.batch, updates.size)
    if number < world or samples < world:
        most = min(number, samples)
        raise UsageError(
            f"{world} processes are too many: an update of {counted(samples, 'sample')} is cut into"
            f" {counted(most, 'micro-batch')} of at most {updates.micro_batch}, one of which each process needs; start"
            f" at most {most} with --procs, or change data.batch ({updates.batch}) or train.micro_batch"
        )
    last = updates.size % updates.batch
    if updates.multiple > 1 and 0 < last < world and not updates.drop_last:
        found = f"the last update of an epoch has {counted(last, 'sample')}"
        message = f"{found}, fewer than the {world} processes that sync_bn joins"
        raise RecipeError(f"{shop.checked.locate('train.sync_bn')}: {message}; set data.drop_last to true")


def make_batches(shop: Workshop, source: Source, updates: Updates, progress: Progress) -> TrainBatches:
    """The stream of updates."""
    data = shop.recipe.data
    if data.loader == "memory" and not source.in_memory:
        message = "memory needs a data set that lies in memory and transforms of whole batches; use auto"
        raise RecipeError(f"{shop.checked.locate('data.loader')}: {message}")
    workers = None if data.workers == "auto" else data.workers
    if source.in_memory and data.loader == "auto":
        workers = 0
    order = Order(updates.size, shop.recipe.train.seed)
    return TrainBatches(source, updates, order, shop.mesh, progress, workers, kind=data.loader)


def make_evaluations(shop: Workshop, sources: Mapping[str, Source]) -> dict[str, EvaluationSet]:
    """The splits to measure on."""
    evaluate = shop.recipe.evaluate
    sets = {}
    for split in ("val", "test"):
        if split in sources:
            # On a CPU, the threads that measure also read: worker processes would only compete with them.
            automatic = 0 if shop.mesh.device.type == "cpu" else automatic_workers(sources[split], shop.mesh)
            workers = automatic if evaluate.workers == "auto" else evaluate.workers
            sets[split] = EvaluationSet(sources[split], evaluate.batch, workers, evaluate.threads)
    return sets


def num_channels(source: Source) -> int:
    """The number of channels of a split's images."""
    known: int | None = getattr(source.dataset, "channels", None)
    return known if known is not None else int(source.dataset.read(0)["image"].shape[2])


def _source(shop: Workshop, split: str, part: DatasetPart) -> Source:
    arguments = dict(part.model_extra or {})
    key = f"data.{split}"
    place = "file" if arguments.get("root") is None else "root"  # files are looked for in the root, if there is one
    if isinstance(arguments.get(place), str):
        with shop.speaking_of(f"{key}.{place}"):
            arguments[place] = shop.path(f"{key}.{place}", arguments[place])
    with shop.speaking_of(key):
        dataset: Dataset = shop.call("dataset", part.dataset, arguments)
        if not len(dataset):
            raise DataError(f"the data set {part.dataset} is empty: expected at least one sample, found 0")
        if shop.recipe.data.cache == "memory" and not hasattr(dataset, "gather"):
            dataset = keep_in_memory(dataset, shop.mesh, shop.notes.append)
    shop.notes += _shortened(split, getattr(dataset, "notes", []))
    joints = getattr(dataset, "joints", None)
    supplied = {
        "num_classes": len(dataset.classes) or shop.recipe.model.num_classes,
        "pairs": joints.pairs if joints else None,
    }
    transforms = []
    for index, transform in enumerate(part.transforms):
        with shop.speaking_of(f"{key}.transforms.{index}"):
            transforms.append(shop.make("transform", transform.name, transform, **supplied))
    with shop.speaking_of(f"{key}.transforms"):
        if getattr(dataset, "reads_videos", False):
            from paceline.data.datasets.clips_apart import clips_apart
            from paceline.data.transforms.clips import require_clips

            require_clips(dataset, transforms)
            dataset = clips_apart(dataset, transforms[0])
        return Source(dataset, transforms, shop.recipe.train.seed, _skips(shop, split, len(dataset)))


def _shortened(split: str, notes: list[str]) -> list[str]:
    more = f"data.{split}: {len(notes) - _MOST_NOTES} more notes; `paceline data` shows them all"
    return [f"data.{split}: {note}" for note in notes[:_MOST_NOTES]] + [more] * (len(notes) > _MOST_NOTES)


def _skips(shop: Workshop, split: str, size: int) -> SkipList | None:
    data = shop.recipe.data
    if data.on_error == "stop":
        return None
    return SkipList(split, automatic_limit(size) if data.max_skipped == "auto" else data.max_skipped)


def _check_classes(split: str, found: list[str], expected: list[str]) -> None:
    if found == expected:
        return
    different = sorted(set(found) ^ set(expected))[:5]
    raise DataError(
        f"data.{split} has {counted(len(found), 'class')} and data.train has {len(expected)}; they must be the same"
        f" (different: {', '.join(different) or 'their order'})"
    )
