"""The one place where the names of a recipe become a run. Everything below takes plain arguments.

`build_data` and `build_solver` are its two larger halves, `workshop` the bench that they share.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from paceline.checkpoint.pretrained import is_published_name
from paceline.checkpoint.state import Stateful
from paceline.checkpoint.store import Store
from paceline.checkpoint.weights import read_weights
from paceline.core.errors import CheckpointError, RecipeError
from paceline.core.mesh import Mesh, join
from paceline.core.progress import Progress, to_steps
from paceline.data.keys import derive
from paceline.data.loading.source import Source
from paceline.data.sampler import Updates
from paceline.engine.health import FiniteCheck
from paceline.engine.kept_buffers import KeptBuffers, NotKept
from paceline.engine.mixed_precision import raise_eps
from paceline.engine.precision import Precision
from paceline.engine.predictions import can_save
from paceline.engine.replay import explain_and_keep
from paceline.engine.run import Periods, Run
from paceline.metrics.state import is_lower_better
from paceline.models.fitted import Fitted
from paceline.models.surgery import Surgery, apply
from paceline.recipe.build_data import (
    check_processes,
    find_classes,
    make_batches,
    make_evaluations,
    make_sources,
    make_updates,
    num_channels,
)
from paceline.recipe.build_engine import (
    choose_precision,
    may_skip,
    prepare_model,
    recompute,
    settle_process,
    shard,
    wrap,
)
from paceline.recipe.build_solver import (
    build_optimizer,
    effective_lr,
    make_averaging,
    make_clip,
    make_freezing,
    make_plan,
)
from paceline.recipe.load import load
from paceline.recipe.schema import Weights
from paceline.recipe.validate import CheckedRecipe, validate
from paceline.recipe.workshop import Workshop
from paceline.tasks.task import Task

_MODEL_STREAM = 0x4D4F  # keeps the seed of the initial weights apart from those of the updates


def build(reference: str | Path, overrides: Mapping[str, Any] | None = None, out: str | Path | None = None) -> Run:
    """A run from a recipe file or the name of a recipe that ships, ready for `train` or `train_step`."""
    written = [f"{key}={json.dumps(value)}" for key, value in (overrides or {}).items()]
    return Builder(validate(load(str(reference), written))).run(Path(out) if out else None)


class Builder(Workshop):
    """Makes a run from a checked recipe; errors name the recipe's file, line and key."""

    def __init__(self, checked: CheckedRecipe, mesh: Mesh | None = None, trains: bool = True) -> None:
        super().__init__(checked, mesh or join(checked.recipe.train.device))
        self.trains = trains
        """Whether updates will be made; a model that is only measured may have more processes than an update."""
        self.fitted: Fitted | None = None
        """What became of the weights that the recipe names."""
        self.parts: dict[str, Stateful] = {}
        """The losses and the task, if they remember something."""
        self.recomputed: list[str] = []
        """Names of the blocks whose activations are computed again."""

    def run(self, out: Path | None = None) -> Run:
        """The whole run."""
        threads = settle_process(self)
        sources = make_sources(self)
        classes = find_classes(self, sources)
        updates = make_updates(self, len(sources["train"].dataset))
        if self.trains:
            check_processes(self, updates)
        progress = Progress(self.total_steps(updates.steps_per_epoch), updates.steps_per_epoch)
        model = self.model(sources["train"], classes)
        prepare_model(self, model)
        ignored = getattr(sources["train"].dataset, "ignore_index", None)
        task, precision = self.task(classes, ignored), choose_precision(self)
        self.recomputed = recompute(self, model, lambda: self._try_pass(model, task, precision, sources, updates))
        freezing = make_freezing(self, model, progress)
        parallel = shard(self, model)
        optimizer = build_optimizer(self, model, freezing, progress)
        masters = precision.attach(model)
        raise_eps(optimizer)
        parallel = parallel or wrap(self, model)
        batches = make_batches(self, sources["train"], updates, progress)
        batches.passes = parallel.passes
        out = out or Path("runs") / self.recipe.name
        return Run(
            name=self.recipe.name,
            out=out,
            seed=self.recipe.train.seed,
            mesh=self.mesh,
            task=task,
            model=model,
            optimizer=optimizer,
            plan=make_plan(self, optimizer, progress),
            source=sources["train"],
            batches=batches,
            evaluations=make_evaluations(self, sources),
            progress=progress,
            periods=self.periods(progress),
            store=self.store(out, task),
            recipe=self.resolved(),
            threads=threads,
            clip=make_clip(self, model, parallel),
            averaging=make_averaging(self, progress),
            freezing=freezing,
            buffers=KeptBuffers(model) if may_skip(self) else NotKept(),
            health=FiniteCheck(self.recipe.train.on_nonfinite, explain=explain_and_keep),
            precision=precision,
            parts=self.parts,
            parallel=parallel,
            masters=masters,
            pictures=self.recipe.observe.pictures,
            save_predictions=self.recipe.evaluate.save_predictions,
        )

    def model(self, source: Source, classes: list[str]) -> nn.Module:
        """The network on its device, initialised from the seed alone, with the weights the recipe names."""
        part = self.recipe.model
        supplied = {"num_classes": len(classes), "in_channels": num_channels(source)}
        self.mesh.seed(derive(self.recipe.train.seed, _MODEL_STREAM))
        with self.speaking_of("model"):
            model: nn.Module = self.make("model", part.name, part, **supplied)
            if any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
                _meet_first_samples(model, source)
        if part.weights is not None:
            with self.speaking_of("model.weights"):
                self.fitted = self._load_weights(model, part.weights)
        return model.to(self.mesh.device)

    def _try_pass(
        self, model: nn.Module, task: Task, precision: Precision, sources: dict[str, Source], updates: Updates
    ) -> None:
        """A forward pass of the largest micro-batch, as in training."""
        source, size = sources["train"], max(cut.stop - cut.start for cut in updates.cuts(0))
        batch = source.finish(source.fetch(0, np.arange(size)), 0, self.mesh.device)
        with precision.compute():
            task.losses(model.train(), batch)

    def origin_of_weights(self) -> list[str]:
        """Where a fresh run's weights come from, and what became of each tensor of a file."""
        weights = self.recipe.model.weights
        if self.fitted is None or weights is None:
            return ["weights  random"]
        file = weights if isinstance(weights, str) else weights.file
        return [f"weights  from {file}", *(f"         {line}" for line in self.fitted.summary())]

    def task(self, classes: list[str], ignore_index: int | None = None) -> Task:
        """The task with its losses and metrics."""
        supplied = {"num_classes": len(classes), "classes": classes, "ignore_index": ignore_index}
        losses, metrics = {}, []
        for index, loss in enumerate(self.recipe.losses):
            with self.speaking_of(f"losses.{index}"):
                losses[loss.name] = self.make("loss", loss.name, loss, **supplied)
        for index, metric in enumerate(self.recipe.evaluate.metrics):
            with self.speaking_of(f"evaluate.metrics.{index}"):
                metrics.append(self.make("metric", metric.name, metric, **supplied))
        weights = {loss.name: loss.weight for loss in self.recipe.losses}
        brought = {
            "losses": losses,
            "weights": weights,
            "classes": classes,
            "extra_metrics": metrics,
            "ignore_index": ignore_index,
        }
        with self.speaking_of("task"):
            task: Task = self.make("task", self.recipe.task.name, self.recipe.task, **brought)
        if self.recipe.evaluate.save_predictions and not can_save(task):
            place, name = self.checked.locate("evaluate.save_predictions"), self.recipe.task.name
            raise RecipeError(
                f"{place}: the task {name} has neither maps nor probabilities of classes that could be saved; leave it"
                " out, or give the task `palette` and `maps`, or `classes` and `answers`"
            )
        made = {"task": task, **{f"loss {name}": loss for name, loss in losses.items()}}
        self.parts = {name: part for name, part in made.items() if isinstance(part, Stateful)}
        return task

    def total_steps(self, steps_per_epoch: int) -> int:
        """The length of the run."""
        train = self.recipe.train
        return round(to_steps(train.epochs, train.steps, steps_per_epoch, 0))

    def lr(self) -> float:
        """The learning rate at `data.batch`."""
        return effective_lr(self)

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
            losses = [loss.name for loss in self.recipe.losses]
            direction = "min" if best is not None and is_lower_better(best, losses) else "max"
        return Store(out / "checkpoints", checkpoint.keep_last, best, direction, checkpoint.keep_every)

    def _load_weights(self, model: nn.Module, weights: str | Weights) -> Fitted:
        declared = Weights(file=weights) if isinstance(weights, str) else weights
        key = "model.weights" if isinstance(weights, str) else "model.weights.file"
        source = declared.file if is_published_name(declared.file) else self.path(key, declared.file)
        options = declared.model_dump(exclude={"file"})
        options["rename"] = [(pattern, new) for pattern, new in declared.rename]
        try:
            return apply(model, read_weights(source), Surgery(**options))
        except ValueError as error:
            raise CheckpointError(str(error)) from error


def _meet_first_samples(model: nn.Module, source: Source) -> None:
    """Lazy layers take their shapes from the first images they see."""
    device = torch.device("cpu")
    batch = source.finish(source.fetch(0, np.arange(min(2, len(source.dataset)))), 0, device)
    model.eval()
    with torch.no_grad():
        model(batch["image"])
    model.train()
