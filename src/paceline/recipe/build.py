"""Build a run from a recipe: the only place where names become objects.

`build_data` and `build_training` build the parts; they share `build_context`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from torch import nn

from paceline.checkpoint.pretrained import is_pretrained_name
from paceline.checkpoint.state import Stateful
from paceline.checkpoint.store import Store
from paceline.core.errors import CheckpointError, RecipeError
from paceline.core.generators import unchanged_generators
from paceline.core.intervals import Progress, to_steps
from paceline.core.process import spins_long
from paceline.core.world import World, join
from paceline.data.batch import KeypointNames
from paceline.data.rng import model_seed
from paceline.data.split_loader import Dataset, SplitLoader
from paceline.engine.nonfinite import FiniteCheck
from paceline.engine.precision.mixed import fit_half_weights
from paceline.engine.run import Intervals, Run, RunInfo, label_checks
from paceline.engine.state import Choices, RunState
from paceline.engine.torch_settings import configure_torch
from paceline.losses.adapter import as_loss
from paceline.losses.loss_term import Loss
from paceline.metrics.adapter import as_metric
from paceline.metrics.metric import declared_values, is_higher_better
from paceline.models.model_errors import explained_allocation
from paceline.models.placement import initialize_lazy_layers, place_model
from paceline.models.surgery import Surgery, SurgeryReport, add_head_batch_norm, load_weights
from paceline.optim.lr_scheduler import LRChangeLog
from paceline.recipe import build_data, build_training
from paceline.recipe.build_context import BuildContext, check_data, check_recipe, open_together, read_weights_together
from paceline.recipe.problems import unknown_name
from paceline.recipe.recipe import Recipe, as_overrides
from paceline.recipe.resolved import recipe_lines
from paceline.recipe.schema import Weights
from paceline.recipe.user_modules import read_checked
from paceline.recipe.validate import CheckedRecipe
from paceline.tasks.task import Task, check_task


@unchanged_generators()
def build(
    reference: Recipe | str | Path, overrides: Mapping[str, Any] | None = None, out: str | Path | None = None
) -> Run:
    """A run, ready for `train`, `train_step` or `evaluate`, from a `Recipe`, its file or the name of one that ships.

    From a run directory it has the weights of the best checkpoint, else the newest; `train` continues from the newest.
    """
    written, folder = as_overrides(overrides), None
    if isinstance(reference, Recipe):
        checked = reference.checked(written)
    else:
        folder = Path(reference) if (Path(reference) / "recipe.yaml").is_file() else None
        recipe = str(folder / "recipe.yaml") if folder else str(reference)
        checked = read_checked(recipe, written, is_run=folder is not None)
    builder = Builder(checked)
    builder.notes += builder.checked.notes
    run = builder.run(Path(out) if out else folder)
    if folder:
        checkpoint = open_together(run.world, folder)
        run.state.load_model(checkpoint)
        run.state.load_average(checkpoint)
    if spins_long() and run.world.device.type == "cpu" and run.state.choices.threads > 1:
        warnings.warn(
            "torch was imported before paceline, so its idle threads keep their cores busy: beside other programs,"
            " training is several times slower. Import paceline first, or start with OMP_WAIT_POLICY=passive",
            RuntimeWarning,
            stacklevel=3,  # the caller of `build`, behind its decorator
        )
    return run


class Builder(BuildContext):
    """Builds a run from a checked recipe; errors name the recipe's file, line and key."""

    def __init__(self, checked: CheckedRecipe, world: World | None = None, trains: bool = True) -> None:
        super().__init__(checked, world or join(checked.recipe.train.device, checked.locate("train.device")))
        check_recipe(self)
        self.trains = trains
        """Whether the run will train; evaluation may use more processes than a step has micro-batches."""
        self.fitted: SurgeryReport | None = None
        """How the weights of the recipe were loaded."""
        self.losses: dict[str, Loss] = {}
        self.parts: dict[str, Stateful] = {}
        """The losses and the task that have a state."""
        self.checkpointed_blocks: list[str] = []
        """Names of the blocks with activation checkpointing."""

    def run(self, out: Path | None = None, loaders: dict[str, SplitLoader] | None = None) -> Run:
        """The whole run; with `loaders`, on these instead of the recipe's data."""
        train = self.recipe.train
        threads = configure_torch(self.world, None if train.threads == "auto" else train.threads, train.reproducible)
        if loaders is None:
            loaders = build_data.make_split_loaders(self)
            check_data(self, loaders)
        classes = build_data.find_classes(self, loaders)
        sampler = build_data.make_sampler(self, len(loaders["train"].dataset))
        if self.trains:
            build_data.check_sampler(self, sampler)
            build_data.check_dali(self, loaders["train"])
            build_data.check_groups(self, loaders["train"])
        total_steps = round(to_steps(train.epochs, train.steps, sampler.steps_per_epoch, 0))
        progress = Progress(total_steps, sampler.steps_per_epoch)
        model = self.model(loaders["train"], classes)
        task, precision = self.task(loaders["train"].dataset, classes, model), build_training.choose_precision(self)
        for loader in loaders.values():  # before the first batch is read
            loader.checks = label_checks(task)
        self.checkpointed_blocks = build_training.checkpoint_activations(self, model)
        freezing = build_training.make_freezing(self, model, progress)
        strategy = build_training.shard(self, model)
        optimizer = build_training.build_optimizer(self, model, freezing, progress)
        master_model = precision.attach(model)
        fit_half_weights(optimizer)
        strategy = strategy or build_training.wrap(self, model)
        batches = build_data.make_batches(self, loaders["train"], sampler, progress)
        check_expected(self, task)
        out = out or Path("runs") / self.recipe.name
        layout = train.channels_last
        state = RunState(
            model=master_model,
            optimizer=optimizer,
            progress=progress,
            strategy=strategy,
            choices=Choices(threads, sampler.micro_batch_size, self.world.size, None if layout == "auto" else layout),
            averaging=build_training.make_averaging(self, progress),
            precision=precision,
            finite_check=FiniteCheck(train.on_nonfinite),
            parts=self.parts,
            recipe=self.resolved(),
        )
        return Run(
            name=self.recipe.name,
            out=out,
            seed=train.seed,
            world=self.world,
            task=task,
            model=model,
            state=state,
            scheduler=build_training.make_scheduler(self, optimizer, progress),
            train_loader=loaders["train"],
            batches=batches,
            evaluations=build_data.make_evaluations(self, loaders),
            intervals=self.intervals(progress),
            store=self.store(out, task),
            clip_gradients=build_training.make_clip(self, model, strategy),
            freezing=freezing,
            lr_changes=LRChangeLog(self.recipe.logging.lr_change_ratio),
            visualize=self.recipe.logging.images,
            save_predictions=self.recipe.evaluate.save_predictions,
            info=self.info(),
        )

    def info(self) -> RunInfo:
        recipe, optimizer = self.recipe, self.recipe.optimizer
        lr = f"{build_training.effective_lr(self):g}"
        if optimizer.base_batch_size:
            ratio = f"{recipe.data.batch_size} / {optimizer.base_batch_size}"
            ratio = ratio if optimizer.lr_scaling == "linear" else f"√({ratio})"
            lr += f" = {optimizer.lr:g} × {ratio} (base_batch_size)"
        logging = recipe.logging
        return RunInfo(
            task=recipe.task.name,
            model=recipe.model.name,
            recipe_yaml="\n".join([*recipe_lines(self.resolved(), self.checked), ""]),
            notes=self.notes,
            lr=lr,
            origin_of_weights=self.origin_of_weights(),
            precision=recipe.train.precision,
            checkpointed_blocks=len(self.checkpointed_blocks),
            expect=recipe.expect,
            hang_seconds=recipe.train.hang_seconds,
            tensorboard=logging.tensorboard,
            results=Path(logging.results).expanduser() if logging.results else None,
            wandb=dict(logging.wandb) if logging.wandb else None,
            mlflow=dict(logging.mlflow) if logging.mlflow else None,
        )

    def model(self, loader: SplitLoader, classes: list[str]) -> nn.Module:
        """The model on its device, initialized from the seed, with the recipe's weights loaded."""
        part = self.recipe.model
        joints: KeypointNames | None = getattr(loader.dataset, "joints", None)
        supplied = {"num_classes": len(classes), "in_channels": build_data.num_channels(loader)}
        supplied["num_keypoints"] = len(joints.names) if joints else 0
        self.world.seed(model_seed(self.recipe.train.seed))
        with self.error_context("model"), explained_allocation():
            model = self.make("model", part.name, part, **supplied)
            if not isinstance(model, nn.Module):
                found = "nothing" if model is None else type(model).__name__
                raise TypeError(f"{part.name} gave {found}, expected an nn.Module: inherit from it, or return one")
            if next(model.parameters(), None) is None:
                raise ValueError(f"{part.name} has no parameters to train; keep layers of a list in nn.ModuleList")
            initialize_lazy_layers(model, loader)
        if part.weights is not None:
            with self.error_context("model.weights"):
                self.fitted = self._load_weights(model, part.weights)
        if part.head_batch_norm:
            with self.error_context("model.head_batch_norm"):
                add_head_batch_norm(model)
        train = self.recipe.train
        with self.error_context("train.sync_bn"):
            return place_model(model, self.world.device, train.channels_last is True, train.sync_bn)

    def weights_file(self) -> str:
        """The value of `model.weights`; empty for random weights."""
        weights = self.recipe.model.weights
        return weights if isinstance(weights, str) else weights.file if weights else ""

    def origin_of_weights(self) -> list[str]:
        """Notes on where a new run's weights come from and how they were loaded."""
        if self.fitted is None:
            return ["weights  random"]
        return [f"weights  from {self.weights_file()}", *(f"         {line}" for line in self.fitted.summary())]

    def task(self, dataset: Dataset, classes: list[str], model: nn.Module) -> Task:
        known: dict[str, Any] = {name: getattr(dataset, name, None) for name in ("ignore_index", "joints")}
        known["classes"] = classes
        supplied = known | {"num_classes": len(classes)}
        losses, metrics = {}, []
        for index, loss in enumerate(self.recipe.losses):
            with self.error_context(f"losses.{index}"):
                losses[loss.name] = as_loss(loss.name, self.make("loss", loss.name, loss, **supplied))
        for index, metric in enumerate(self.recipe.evaluate.metrics):
            with self.error_context(f"evaluate.metrics.{index}"):
                metrics.append(as_metric(metric.name, self.make("metric", metric.name, metric, **supplied)))
        self.notes += [part.describe() for part in (*losses.values(), *metrics) if hasattr(part, "describe")]
        weights = {loss.name: loss.weight for loss in self.recipe.losses}
        brought = known | {"model": model, "losses": losses, "weights": weights, "extra_metrics": metrics}
        with self.error_context("task"):
            task: Task = self.make("task", self.recipe.task.name, self.recipe.task, **brought)
            check_task(task)
        self.losses = losses
        made = {"task": task, **{f"loss {name}": loss for name, loss in losses.items()}}
        self.parts = {name: part for name, part in made.items() if isinstance(part, Stateful)}
        return task

    def intervals(self, progress: Progress) -> Intervals:
        recipe, epoch = self.recipe, progress.steps_per_epoch
        evaluate, checkpoint, logging = recipe.evaluate, recipe.checkpoint, recipe.logging
        return Intervals(
            evaluate=to_steps(evaluate.every_epochs, evaluate.every_steps, epoch, epoch),
            log=to_steps(logging.every_epochs, logging.every_steps, epoch, 20),
            save=to_steps(checkpoint.every_epochs, checkpoint.every_steps, epoch, epoch),
        )

    def store(self, out: Path, task: Task) -> Store:
        checkpoint = self.recipe.checkpoint
        best, direction = best_direction(self, task)
        return Store(out / "checkpoints", checkpoint.keep_last, best, direction, checkpoint.keep_every)

    def _load_weights(self, model: nn.Module, weights: str | Weights) -> SurgeryReport:
        declared = Weights(file=weights) if isinstance(weights, str) else weights
        key = "model.weights" if isinstance(weights, str) else "model.weights.file"
        is_published = is_pretrained_name(declared.file)
        found = read_weights_together(
            self, lambda: declared.file if is_published else self.path(key, declared.file), declared.key
        )
        if not is_published:
            self._found[key] = str(found.path)
        options = declared.model_dump(exclude={"file", "key"})
        options["rename"] = [(pattern, new) for pattern, new in declared.rename]
        try:
            return load_weights(model, found.tensors, Surgery(**options))
        except ValueError as error:
            raise CheckpointError(str(error)) from error


def best_direction(context: BuildContext, task: Task) -> tuple[str | None, Literal["max", "min"]]:
    """The metric that selects the best checkpoint, and whether higher or lower is better."""
    recipe = context.recipe
    chosen, direction = recipe.checkpoint.best, recipe.checkpoint.direction
    best = task.main_metric if chosen == "auto" else chosen
    if direction == "auto":
        is_measured = best is not None and (recipe.data.val or recipe.data.test)
        must_exist = chosen != "auto"
        is_higher = not is_measured or _is_higher_better(context, "checkpoint.best", str(best), task, must_exist)
        direction = "max" if is_higher else "min"
    return best, direction


def check_expected(context: BuildContext, task: Task) -> None:
    """Raise RecipeError for an expectation without a metric, or whose metric has no direction."""
    for name in context.recipe.expect:
        set_name, _, rest = name.partition(".")  # such as ecssd.mae, of one test set
        metric = rest if f"test.{set_name}" in context.recipe.data.splits() else name
        _is_higher_better(context, f"expect.{name}", metric, task)


def _is_higher_better(context: BuildContext, key: str, name: str, task: Task, must_exist: bool = True) -> bool:
    try:
        found = is_higher_better(name, task.metrics())
    except ValueError as error:
        raise RecipeError(f"{context.checked.locate(key)}: {error}") from error
    if found is None and must_exist:
        unknown = unknown_name("metric", name, declared_values(task.metrics()))
        raise RecipeError(f"{context.checked.locate(key)}: {unknown}")
    return found is not False
