"""A run as a Python file, as a person would write it: every part by its own constructor, and the loop in view."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import Any

from paceline.commands.ejected_parts import Statements, variable_of
from paceline.commands.ejected_training import write_optimizer, write_run, write_strategy
from paceline.commands.python_source import WIDTH, Code, Imports, value
from paceline.core.user_code import is_ours
from paceline.engine.run import Run
from paceline.models.surgery import Surgery
from paceline.plan.surrogate import SurrogateBuilder
from paceline.recipe.build_data import measures_original_size, num_channels
from paceline.recipe.schema import DatasetPart, Recipe, UsedModule, Weights

_OWN_NAMES = (
    "argparse", "batches", "build", "classes", "freezing", "groups", "losses", "master_model", "metrics",
    "micro_batch_size", "model", "optimizer", "out", "parser", "precision", "progress", "report",
    "result", "run", "sampler", "schedule", "scheduler", "state", "step_batch", "strategy", "sys", "task",
    "threads", "train", "triggers", "weights", "world", "BATCH_SIZE", "EPOCHS", "LR", "SEED", "STEPS",
)  # fmt: skip
"""What the file itself defines, so that an imported part of the same name gets another."""

_STANDARD = ("functools", "math", "pathlib")
_LOOP = '''def train(run: Run) -> None:
    """Take the steps that are left; after each, do what is due."""
    triggers = run.triggers()
    # Locks the directory and loads its newest checkpoint; at the end, waits for the last save.
    with run.world.together(), open_run(run), training(run):
        do_pending(run)  # what was due when that checkpoint was saved
        for step_batch in steps(run):
            result = train_step(run, step_batch)  # forward, loss, backward, clip, optimizer.step()
            record_step(run, step_batch, result)
            run.state.pending = triggers.due(run.progress.step)
            do_pending(run)  # save, evaluate, log; after the last step, test
            stop_if_asked(run, result)  # by Ctrl-C, SIGTERM and the like, with everything saved


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/{name}_ejected"))
    with errors_in_one_line():  # and exit codes as of the command
        train(build(parser.parse_args().out))'''
_LOOP_NAMES = ("do_pending", "record_step", "steps", "stop_if_asked", "training")
_OTHER_NAMES = ("engine.step.train_step", "run.train.open_run", "core.user_code.errors_in_one_line")


class EjectedFile(Statements):
    """Writes the file of one run."""

    def __init__(self, recipe: Recipe, builder: SurrogateBuilder, run: Run) -> None:
        super().__init__(recipe, builder, run, Imports(_OWN_NAMES))
        self.imports.name("pathlib", "Path")

    def lines(self, words: str) -> list[str]:
        """The whole file, which these words of a command line ask for."""
        if self.recipe.train.devices is not None:
            self.refuse("train.devices", "commands choose devices; set null, and use CUDA_VISIBLE_DEVICES")
        self._world()
        self._data()
        self._batches()
        self._model()
        self._task()
        write_optimizer(self)
        write_strategy(self)
        write_run(self)
        for path in (*(f"engine.loop.{name}" for name in _LOOP_NAMES), *_OTHER_NAMES):
            self.name(path)
        recipe, constants = self.recipe, self._constants()
        written = f"Written by `{words}`; the results are bit-identical."
        escaped = written.replace("\\", "\\\\").replace('"""', '\\"""')
        return [
            f'"""{recipe.name}: {recipe.task.name} with {recipe.model.name}.',
            *("", *textwrap.wrap(escaped, WIDTH, break_long_words=False, break_on_hyphens=False)),
            *("", "    python train.py  # again: continues from the newest checkpoint"),
            *("    torchrun --nproc-per-node 2 train.py", '"""', ""),
            *(*self._imports(), "", *constants, "", ""),
            *("def build(out: Path) -> Run:", '    """Construct everything that the run consists of."""'),
            *(*self.body, "", ""),
            *_LOOP.format(name=recipe.name).splitlines(),
        ]

    def _imports(self) -> list[str]:
        """Imports; modules of the user's own come last, from where they are."""
        used = self.recipe.use if isinstance(self.recipe.use, list) else []
        own = [each for each in used if isinstance(each, UsedModule)]
        packages = [each.module.partition(".")[0] for each in own]
        folders = dict.fromkeys(map(_import_folder, own))
        return [
            *("import argparse", *["import sys"] * bool(own), *self.imports.lines(_STANDARD)),
            *("", *self.imports.lines(without=[*_STANDARD, *packages])),
            *([""] * bool(own) + [f"sys.path.insert(0, {value(each)})" for each in folders]),
            *(f"{line}  # noqa: E402" for line in self.imports.lines(packages)),
        ]

    def _constants(self) -> list[str]:
        train, data, optimizer = self.recipe.train, self.recipe.data, self.recipe.optimizer
        lr = repr(optimizer.lr)
        if optimizer.base_batch_size:
            ratio = f"BATCH_SIZE / {optimizer.base_batch_size}"
            lr += (
                f" * ({ratio})"
                if optimizer.lr_scaling == "linear"
                else f" * {self.imports.name('math', 'sqrt')}({ratio})"
            )
        return [
            f"SEED = {train.seed}  # of initial weights, order, augmentation, dropout",
            f"BATCH_SIZE = {data.batch_size}  # samples per optimizer step, over all processes",
            f"EPOCHS = {train.epochs:g}" if train.epochs else f"STEPS = {train.steps}",
            f"LR = {lr}",
        ]

    def _world(self) -> None:
        train = self.recipe.train
        device = [value(train.device)] * (train.device != "auto")
        self.set(
            "world", self.call("core.world.join", *device), "the processes that torchrun started; else a world of one"
        )
        threads = None if train.threads == "auto" else train.threads
        settings = {"threads": threads, "reproducible": train.reproducible}
        configured = self.call("engine.torch_settings.configure_torch", "world", **settings)
        self.set("threads", configured, "deterministic algorithms, threads per process")

    def _data(self) -> None:
        self.section("Data. What is random about a sample depends on (SEED, epoch, sample) alone.")
        splits, own = self.recipe.data.splits(), dict[str, Any]()
        for split, part in splits.items():
            arguments = dict(part.model_extra or {})
            for name in ("root", "file"):
                if arguments.get(name) is not None:
                    found = self._found(("data", *split.split(".", 1), name))
                    is_inside = name == "file" and arguments.get("root") is not None and found == arguments[name]
                    arguments[name] = found if is_inside else Path(found)
            own = own or arguments
            if split != "train" and arguments.get("classes") and arguments["classes"] == own.get("classes"):
                arguments["classes"] = Code("classes")
            made = self.part(f"data.{split}", "dataset", part.model_copy(update=arguments))
            self.set(f"{variable_of(split)}_data", made)
            if split == "train":
                numbers = [str(number) for number in range(self.recipe.model.num_classes or 0)]
                has_names = getattr(self.run.train_loader.dataset, "classes", [])
                self.add("classes = train_data.classes" if has_names else value(numbers).after("classes: list[str] = "))
        for split, part in splits.items():
            self._loader(split, part)

    def _found(self, place: tuple[str, ...]) -> str:
        """A path of the recipe where it was found; below the current folder, from there."""
        found: Any = self.run.state.recipe
        for each in place:
            found = found[each]
        return os.path.relpath(found) if Path(found).is_relative_to(Path.cwd()) else str(found)

    def _loader(self, split: str, part: DatasetPart) -> None:
        """The loader of a split, with its transforms."""
        loader = self.run.train_loader if split == "train" else self.run.evaluations[split].loader
        data = f"{variable_of(split)}_data"
        pairs = f"{data}.joints.pairs" if getattr(loader.dataset, "joints", None) else "None"
        transforms = [
            self.part(f"data.{split}.transforms.{index}", "transform", each, num_classes="len(classes)", pairs=pairs)
            for index, each in enumerate(part.transforms)
        ]
        if split != "train" and measures_original_size(self.recipe):
            transforms.insert(0, self.call("data.transforms.base.KeepOriginal"))
        more = {}
        if loader.skips is not None:
            more["skips"] = self.call("data.skip_list.SkipList", value(split), value(loader.skips.limit))
        made = self.call("data.split_loader.SplitLoader", data, value(transforms), "SEED", **more)
        self.set(f"{variable_of(split)}_loader", made)

    def _batches(self) -> None:
        data, train = self.recipe.data, self.recipe.train
        self.section("Batches. A step is divided into micro-batches, at least one for each process.")
        size = value(train.micro_batch_size)
        if train.micro_batch_size == "auto":
            is_same = train.reproducible == "world"
            samples, automatic = "min(BATCH_SIZE, len(train_data))", "data.sampler.automatic_micro_batch_size"
            size = self.call(automatic, samples, "world.size", is_same_for_any=is_same)
        self.set("micro_batch_size", size)
        settings = {"drop_last": data.drop_last, "multiple": Code("world.size") if train.sync_bn else 1}
        sizes = ("len(train_data)", "BATCH_SIZE", "micro_batch_size")
        self.set("sampler", self.call("data.sampler.BatchSampler", *sizes, **settings))
        total = "EPOCHS * sampler.steps_per_epoch" if train.epochs else "STEPS"
        if train.epochs and train.epochs % 1:
            total = f"round({total})"
        self.set("progress", self.call("core.intervals.Progress", total, "sampler.steps_per_epoch"))
        workers = None if data.num_workers == "auto" else data.num_workers
        first = ("train_loader", "sampler", "world", "progress")
        more = {}
        if (factor := data.aspect_ratio_group_factor) is not None:
            groups = self.call("data.aspect_ratio.group_by_aspect_ratio", "train_data.image_sizes()", value(factor))
            more["order"] = self.call("data.aspect_ratio.GroupedPermutation", groups, "BATCH_SIZE", "SEED")
        self.set("batches", self.call("data.loader.TrainBatches", *first, workers=workers, kind=data.loader, **more))

    def _model(self) -> None:
        part, train = self.recipe.model, self.recipe.train
        self.section("Model, losses and metrics. The initial weights follow from SEED.")
        self.add(f"world.seed({self.name('data.rng.model_seed')}(SEED))")
        loader = self.run.train_loader
        channels = str(num_channels(loader))
        keypoints = "len(train_data.joints.names)" if getattr(loader.dataset, "joints", None) else "0"
        known = {"num_classes": "len(classes)", "in_channels": channels, "num_keypoints": keypoints}
        self.set("model", self.part("model", "model", part, **known))
        if not is_ours(self.target("model", "model", part.name)[0]):  # which have no lazy layers
            self.add(self.call("models.placement.initialize_lazy_layers", "model", "train_loader"))
        if part.weights is not None:
            self._weights(part.weights)
        if part.head_batch_norm:
            self.add(self.call("models.surgery.add_head_batch_norm", "model"))
        settings = {"channels_last": train.channels_last is True, "sync_bn": train.sync_bn}
        self.add(self.call("models.placement.place_model", "model", "world.device", **settings))

    def _weights(self, weights: str | Weights) -> None:
        declared = Weights(file=weights) if isinstance(weights, str) else weights
        place = ("model", "weights") if isinstance(weights, str) else ("model", "weights", "file")
        found = value(self._found(place))
        self.set("weights", self.call("checkpoint.weights.read_weights", found, key=declared.key))
        options = declared.model_dump(exclude={"file", "key"})
        surgery = self.made(Surgery(**options | {"rename": [(old, new) for old, new in declared.rename]}))
        self.set("report", self.call("models.surgery.load_weights", "model", "weights", surgery))

    def _task(self) -> None:
        recipe = self.recipe
        known = {"classes": "classes"}
        for name in ("ignore_index", "joints"):
            has_it = getattr(self.run.train_loader.dataset, name, None) is not None
            known[name] = f"train_data.{name}" if has_it else "None"
        supplied = known | {"num_classes": "len(classes)"}
        losses = [self.part(f"losses.{i}", "loss", each, **supplied) for i, each in enumerate(recipe.losses)]
        own = enumerate(recipe.evaluate.metrics)
        metrics = [self.part(f"evaluate.metrics.{i}", "metric", each, **supplied) for i, each in own]
        weights = {each.name: each.weight for each in recipe.losses}
        if losses:
            self.set("losses", value(dict(zip(weights, losses, strict=True))))
        if metrics:
            self.set("metrics", value(metrics))
        known |= {"model": "model", "losses": "losses" if losses else "{}", "weights": str(value(weights))}
        known["extra_metrics"] = "metrics" if metrics else "()"
        self.set("task", self.part("task", "task", recipe.task, **known))


def _import_folder(used: UsedModule) -> str:
    """The folder that Python finds a module in."""
    file = Path(used.file)
    return str(file.parents[used.module.count(".") + (file.name == "__init__.py")])
