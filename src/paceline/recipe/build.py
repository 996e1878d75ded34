"""The one place where the names of a recipe become objects. Everything below takes plain arguments."""

from __future__ import annotations

import inspect
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.checkpoint.store import Store
from paceline.checkpoint.weights import read_weights
from paceline.core.errors import CheckpointError, DataError, PacelineError, RecipeError
from paceline.core.mesh import Mesh, join
from paceline.core.progress import Progress, to_steps
from paceline.core.registry import register
from paceline.data.keys import derive
from paceline.data.loader import TrainBatches, automatic_workers
from paceline.data.sampler import Order, Updates
from paceline.data.source import Dataset, Source
from paceline.engine.run import EvaluationSet, Periods, Run
from paceline.models.surgery import fit
from paceline.optim.clipping import NormClip, Unclipped
from paceline.optim.optimizers import make_optimizer
from paceline.optim.schedules import Schedule
from paceline.recipe.load import load
from paceline.recipe.places import find_path
from paceline.recipe.schema import DatasetPart, Part, Recipe
from paceline.recipe.validate import CheckedRecipe, validate
from paceline.tasks.task import Task

_SPLITS = ("train", "val", "test")
_LOWER_IS_BETTER = ("loss", "mae", "ber", "cross_entropy", "bce")
_MODEL_STREAM = 0x4D4F  # keeps the seed of the initial weights apart from those of the updates


def build(reference: str | Path, overrides: Mapping[str, Any] | None = None, out: str | Path | None = None) -> Run:
    """A run from a recipe file or the name of a recipe that ships, ready for `train` or `train_step`."""
    written = [f"{key}={json.dumps(value)}" for key, value in (overrides or {}).items()]
    return Builder(validate(load(str(reference), written))).run(Path(out) if out else None)


class Builder:
    """Makes objects from a checked recipe; errors name the recipe's file, line and key."""

    def __init__(self, checked: CheckedRecipe, mesh: Mesh | None = None) -> None:
        self.checked = checked
        self.recipe: Recipe = checked.recipe
        self.mesh = mesh or join(self.recipe.train.device)
        self.found: dict[str, str] = {}
        """Paths that the recipe names, as they were found."""

    def run(self, out: Path | None = None) -> Run:
        """The whole run."""
        recipe, train = self.recipe, self.recipe.train
        threads = self.settle_process()
        sources = self.sources()
        classes = self.classes(sources)
        model = self.model(sources["train"], classes)
        updates = self.updates(len(sources["train"].dataset))
        progress = Progress(self.total_steps(updates.steps_per_epoch), updates.steps_per_epoch)
        task = self.task(classes)
        out = out or Path("runs") / recipe.name
        return Run(
            name=recipe.name,
            out=out,
            seed=train.seed,
            mesh=self.mesh,
            task=task,
            model=model,
            optimizer=self.optimizer(model),
            schedule=self.schedule(progress),
            source=sources["train"],
            batches=self.batches(sources["train"], updates, progress),
            evaluations=self.evaluations(sources),
            progress=progress,
            periods=self.periods(progress),
            store=self.store(out, task),
            recipe=self.resolved(),
            threads=threads,
            clip=Unclipped() if train.clip_norm is None else NormClip(train.clip_norm),
            pictures=recipe.observe.pictures,
        )

    def settle_process(self) -> int:
        """Fix what torch does in this process: threads, and deterministic algorithms if asked for."""
        train = self.recipe.train
        threads = len(os.sched_getaffinity(0)) if train.threads == "auto" else train.threads
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(train.reproducible != "off")
        torch.backends.cudnn.benchmark = train.reproducible == "off"
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        return threads

    def sources(self) -> dict[str, Source]:
        """Each split with its transforms."""
        parts = {split: getattr(self.recipe.data, split) for split in _SPLITS}
        return {split: self._source(split, part) for split, part in parts.items() if part is not None}

    def classes(self, sources: Mapping[str, Source]) -> list[str]:
        """The class names, the same in every split and as many as the recipe says."""
        names = list(getattr(sources["train"].dataset, "classes", []))
        for split, source in sources.items():
            with self.speaking_of(f"data.{split}"):
                self._check_classes(split, list(getattr(source.dataset, "classes", [])), names)
        asked = self.recipe.model.num_classes
        if asked is not None and names and asked != len(names):
            found = f"expected {len(names)}, the number of classes in data.train, got {asked}"
            raise RecipeError(f"{self.checked.locate('model.num_classes')}: {found}")
        return names or [str(number) for number in range(asked or 0)]

    def model(self, source: Source, classes: list[str]) -> nn.Module:
        """The network on its device, initialised from (seed) alone, with the weights the recipe names."""
        part = self.recipe.model
        self.mesh.seed(derive(self.recipe.train.seed, _MODEL_STREAM))
        with self.speaking_of("model"):
            model: nn.Module = self._make(
                "model", part.name, part, num_classes=len(classes), in_channels=channels(source)
            )
        if part.weights is not None:
            with self.speaking_of("model.weights"):
                fit(model, read_weights(self.path("model.weights", part.weights)))
        return model.to(self.mesh.device)

    def task(self, classes: list[str]) -> Task:
        """The task with its losses and metrics."""
        losses = {}
        for index, part in enumerate(self.recipe.losses):
            with self.speaking_of(f"losses.{index}"):
                losses[part.name] = self._make("loss", part.name, part, num_classes=len(classes))
        metrics = []
        for index, metric in enumerate(self.recipe.evaluate.metrics):
            with self.speaking_of(f"evaluate.metrics.{index}"):
                metrics.append(self._make("metric", metric.name, metric, num_classes=len(classes)))
        weights = {part.name: part.weight for part in self.recipe.losses}
        with self.speaking_of("task"):
            task: Task = self._make(
                "task",
                self.recipe.task.name,
                self.recipe.task,
                losses=losses,
                weights=weights,
                classes=classes,
                extra_metrics=metrics,
            )
        return task

    def updates(self, size: int) -> Updates:
        """How updates are cut (the batch contract)."""
        data, micro = self.recipe.data, self.recipe.train.micro_batch
        if data.drop_last and size < data.batch:
            message = f"expected at most {size}, the number of samples in data.train, since data.drop_last is true"
            raise RecipeError(f"{self.checked.locate('data.batch')}: {message}, got {data.batch}")
        share = math.ceil(min(data.batch, size) / self.mesh.world)
        return Updates(size, data.batch, share if micro == "auto" else micro, data.drop_last)

    def total_steps(self, steps_per_epoch: int) -> int:
        """The length of the run."""
        train = self.recipe.train
        return round(to_steps(train.epochs, train.steps, steps_per_epoch, 0))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer over all parameters that learn."""
        part = self.recipe.optimizer
        entry = register.kind("optimizer").find(part.name)
        assert entry is not None
        with self.speaking_of("optimizer"):
            arguments = dict(part.model_extra or {})
            return make_optimizer(entry.resolve(), model.parameters(), self.lr(), part.weight_decay, arguments)

    def lr(self) -> float:
        """The learning rate at `data.batch`: the recipe's, scaled linearly from its reference batch."""
        optimizer, batch = self.recipe.optimizer, self.recipe.data.batch
        return optimizer.lr * batch / (optimizer.reference_batch or batch)

    def schedule(self, progress: Progress) -> Schedule:
        """The learning rate of every step."""
        part, per_epoch = self.recipe.schedule, progress.steps_per_epoch
        entry = register.kind("schedule").find(part.decay)
        assert entry is not None
        warmup_steps = to_steps(part.warmup_epochs, part.warmup_steps, per_epoch, 0)
        if warmup_steps >= progress.total_steps:
            message = (
                f"expected warm-up shorter than the run ({progress.total_steps} steps), got {warmup_steps:g} steps"
            )
            raise RecipeError(f"{self.checked.locate('schedule.warmup')}: {message}")
        return Schedule(
            lr=self.lr(),
            decay=entry.resolve(),
            total_steps=progress.total_steps,
            steps_per_epoch=per_epoch,
            warmup_steps=warmup_steps,
            warmup_from=part.warmup_from,
            floor=part.floor,
            per_epoch=part.per == "epoch",
        )

    def batches(self, source: Source, updates: Updates, progress: Progress) -> TrainBatches:
        """The stream of updates."""
        workers = self.recipe.data.workers
        number = automatic_workers(source, self.mesh.device) if workers == "auto" else workers
        if self.recipe.data.loader == "memory" and not source.in_memory:
            message = "memory needs a data set that lies in memory and transforms of whole batches; use auto or process"
            raise RecipeError(f"{self.checked.locate('data.loader')}: {message}")
        order = Order(updates.size, self.recipe.train.seed)
        return TrainBatches(source, updates, order, self.mesh, progress, 0 if source.in_memory else number)

    def evaluations(self, sources: Mapping[str, Source]) -> dict[str, EvaluationSet]:
        """The splits to measure on."""
        evaluate = self.recipe.evaluate
        on_cpu = self.mesh.device.type == "cpu"
        sets = {}
        for split in ("val", "test"):
            if split in sources:
                automatic = 0 if on_cpu else automatic_workers(sources[split], self.mesh.device)
                workers = automatic if evaluate.workers == "auto" else evaluate.workers
                sets[split] = EvaluationSet(sources[split], evaluate.batch, workers, evaluate.threads)
        return sets

    def periods(self, progress: Progress) -> Periods:
        """How often things are done, in steps."""
        recipe, epoch = self.recipe, progress.steps_per_epoch
        evaluate, checkpoint, observe = recipe.evaluate, recipe.checkpoint, recipe.observe
        return Periods(
            evaluate=to_steps(evaluate.every_epochs, evaluate.every_steps, epoch, epoch),
            log=to_steps(observe.log_every_epochs, observe.log_every_steps, epoch, 20),
            save=to_steps(checkpoint.every_epochs, checkpoint.every_steps, epoch, epoch),
        )

    def store(self, out: Path, task: Task) -> Store:
        """Where checkpoints go and which are kept."""
        checkpoint = self.recipe.checkpoint
        best = task.main_figure if checkpoint.best == "auto" else checkpoint.best
        direction = checkpoint.direction
        if direction == "auto":
            direction = "min" if best in _LOWER_IS_BETTER else "max"
        return Store(out / "checkpoints", checkpoint.keep_last, best, direction)

    def resolved(self) -> dict[str, Any]:
        """The recipe with all defaults, and with paths as they were found."""
        tree = self.checked.resolved()
        for key, path in self.found.items():
            *parents, last = key.split(".")
            place = tree
            for parent in parents:
                place = place[parent]
            place[last] = path
        return tree

    def path(self, key: str, written: str) -> Path:
        """A path that the recipe names under `key`."""
        found = find_path(written, Path(self.checked.document.values[()].source).parent)
        self.found[key] = str(found)
        return found

    @contextmanager
    def speaking_of(self, key: str) -> Iterator[None]:
        """Have errors that are raised inside name the recipe's file, line and key."""
        try:
            yield
        except (DataError, CheckpointError) as error:
            raise type(error)(f"{self.checked.locate(key)}: {error}") from error
        except PacelineError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:
            raise RecipeError(f"{self.checked.locate(key)}: {_first_line(error)}") from error

    def _source(self, split: str, part: DatasetPart) -> Source:
        arguments = dict(part.model_extra or {})
        key = f"data.{split}"
        if isinstance(arguments.get("root"), str):
            with self.speaking_of(f"{key}.root"):
                arguments["root"] = self.path(f"{key}.root", arguments["root"])
        with self.speaking_of(key):
            dataset: Dataset = self._call("dataset", part.dataset, arguments)
            if not len(dataset):
                raise DataError(f"the data set {part.dataset} is empty: expected at least one sample, found 0")
        transforms = []
        for index, transform in enumerate(part.transforms):
            with self.speaking_of(f"{key}.transforms.{index}"):
                transforms.append(self._make("transform", transform.name, transform))
        with self.speaking_of(f"{key}.transforms"):
            return Source(dataset, transforms, self.recipe.train.seed)

    def _check_classes(self, split: str, found: list[str], expected: list[str]) -> None:
        if found == expected:
            return
        different = sorted(set(found) ^ set(expected))[:5]
        raise DataError(
            f"data.{split} has {len(found)} classes and data.train has {len(expected)}; they must be the same"
            f" (different: {', '.join(different) or 'their order'})"
        )

    def _make(self, kind: str, name: str, part: Part, **supplied: Any) -> Any:
        return self._call(kind, name, dict(part.model_extra or {}), **supplied)

    def _call(self, kind: str, name: str, arguments: dict[str, Any], **supplied: Any) -> Any:
        """Call what a name stands for with the recipe's arguments and those of the supplied ones that it takes."""
        entry = register.kind(kind).find(name)
        assert entry is not None, f"validation let the unknown {kind} {name} through"
        target = entry.resolve()
        return target(**arguments, **_accepted(target, supplied))


def channels(source: Source) -> int:
    """The number of channels of a split's images."""
    known: int | None = getattr(source.dataset, "channels", None)
    return known if known is not None else int(source.dataset.read(0)["image"].shape[2])


def _accepted(target: Callable[..., Any], supplied: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(target).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in supplied.items() if takes_any or name in parameters}


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
