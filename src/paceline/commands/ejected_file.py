"""A run as a Python file, as a person would write it: every part by its own constructor, and the loop in view."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import Any

from paceline.commands.ejected_parts import Always, Statements, variable_of, without_defaults
from paceline.commands.ejected_training import write_optimizer, write_run, write_state, write_strategy
from paceline.commands.python_source import WIDTH, Code, Imports, call, value
from paceline.core.user_code import is_ours
from paceline.data.datasets.video import ClipDataset
from paceline.data.sampler import BatchSampler
from paceline.engine.run import Run
from paceline.engine.torch_settings import configure_torch
from paceline.models.placement import place_model
from paceline.models.surgery import Surgery
from paceline.plan.surrogate import SurrogateBuilder
from paceline.recipe.build_data import measures_original_size, num_channels
from paceline.recipe.schema import DatasetPart, UsedModule, Weights

_INDENT = "    "
_OWN_NAMES = (
    "argparse", "batches", "build", "classes", "freezing", "groups", "losses", "main", "master_model", "math",
    "metrics", "micro_batch_size", "model", "optimizer", "out", "parser", "partial", "precision", "progress",
    "report", "result", "run", "sampler", "scheduler", "state", "step_batch", "strategy", "sys", "task", "threads",
    "triggers", "weights", "world", "Path", "BATCH_SIZE", "EPOCHS", "LR", "SEED", "STEPS",
)  # fmt: skip
"""What the file itself defines, so that an imported part of the same name gets another."""

_LOOP = '''def main() -> None:
    """Take the steps that are left, and after each what is due."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/{name}_ejected"))
    run = build(parser.parse_args().out)
    triggers = run.triggers()
    # The directory is locked and its newest checkpoint loaded; at the end, the last save is waited for.
    with run.world.together(), open_run(run), training(run):
        do_pending(run)  # what was due when that checkpoint was saved
        for step_batch in steps(run):
            result = train_step(run, step_batch)  # forward, loss, backward, clip, optimizer.step()
            record_step(run, step_batch, result)
            run.state.pending = triggers.due(run.progress.step)
            do_pending(run)  # save, evaluate, log; after the last step, test
            stop_if_asked(run, result)  # by Ctrl-C, SIGTERM and the like, with everything saved


if __name__ == "__main__":
    main()'''
_LOOP_NAMES = ("do_pending", "record_step", "steps", "stop_if_asked", "training")


class EjectedFile(Statements):
    """Writes the file of one run, which was built on this machine; where data is missing, on assumed data."""

    def __init__(self, builder: SurrogateBuilder, run: Run) -> None:
        super().__init__(builder, run, Imports(_OWN_NAMES))
        self.resolved = builder.resolved()
        dataset = run.train_loader.dataset
        joints, ignored = getattr(dataset, "joints", None), getattr(dataset, "ignore_index", None)
        self.known: dict[str, tuple[str, Any]] = {
            "num_classes": ("len(classes)", Always),
            "classes": ("classes", Always),
            "ignore_index": ("train_data.ignore_index" if ignored is not None else "None", ignored),
            "joints": ("train_data.joints" if joints else "None", joints),
            "num_keypoints": ("len(train_data.joints.names)" if joints else "0", Always),
        }
        """What losses, metrics, models and tasks may ask for."""

    def lines(self, words: str) -> list[str]:
        """The whole file, which these words of a command line ask for."""
        self._refuse()
        self._world()
        self._data()
        self._steps()
        self._model()
        self._task()
        write_optimizer(self)
        write_strategy(self)
        write_state(self)
        write_run(self)
        for name in _LOOP_NAMES:
            self.write.name("engine.loop", name)
        self.write.name("engine.step", "train_step")
        self.write.name("run.train", "open_run")
        recipe = self.recipe
        return [
            f'"""{recipe.name}: {recipe.task.name} with {recipe.model.name}.',
            "",
            *_wrapped(f"Written by `{words}`; results are bit-identical."),
            "",
            "    python train.py  # the same command continues",
            "    torchrun --nproc-per-node 2 train.py",
            '"""',
            "",
            *self._imports(),
            "",
            *self._constants(),
            *["", ""],
            "def build(out: Path) -> Run:",
            '    """Everything that the run is made of."""',
            *self.body,
            *["", ""],
            *_LOOP.format(name=recipe.name).splitlines(),
        ]

    def _refuse(self) -> None:
        """Raise RecipeError for keys that mean what only commands do."""
        train = self.recipe.train
        if train.devices is not None:
            self.write.refuse("train.devices", "commands choose devices; set null, and use CUDA_VISIBLE_DEVICES")
        if (train.strategy.model_extra or {}).get("parameters", "fp32") != "fp32":
            self.write.refuse("train.strategy.parameters", "the file has no trial pass; use fp32")

    def _imports(self) -> list[str]:
        """Imports; modules of the user's own come last, from where they are."""
        used = self.recipe.use if isinstance(self.recipe.use, list) else []
        own = [each for each in used if isinstance(each, UsedModule)]
        packages = [each.module.partition(".")[0] for each in own]
        folders = dict.fromkeys(map(_import_folder, own))
        text = "\n".join([*self.body, *self._constants()])
        standard = {"argparse": True, "math": "math.sqrt(" in text, "sys": bool(own)}
        lines = [f"import {name}" for name, is_used in standard.items() if is_used]
        lines += ["from functools import partial"] * ("partial(" in text)
        lines += ["from pathlib import Path", "", *self.imports.lines(without=packages)]
        if own:
            lines += ["", *(f"sys.path.insert(0, {value(folder)})" for folder in folders)]
            lines += [f"{line}  # noqa: E402" for line in self.imports.lines(only=packages)]
        return lines

    def _constants(self) -> list[str]:
        train, data, optimizer = self.recipe.train, self.recipe.data, self.recipe.optimizer
        lr = repr(optimizer.lr)
        if optimizer.base_batch_size:
            ratio = f"BATCH_SIZE / {optimizer.base_batch_size}"
            lr += f" * ({ratio})" if optimizer.lr_scaling == "linear" else f" * math.sqrt({ratio})"
        return [
            f"SEED = {train.seed}  # of initial weights, order, augmentation, dropout",
            f"BATCH_SIZE = {data.batch_size}  # samples of a step, over all processes",
            f"EPOCHS = {train.epochs}" if train.epochs else f"STEPS = {train.steps}",
            f"LR = {lr}",
        ]

    def _world(self) -> None:
        train = self.recipe.train
        device = [value(train.device)] * (train.device != "auto")
        world = self.write.call("core.world.join", *device)
        self.add(world, "one of the processes that torchrun started, or alone", to="world")
        settings = {"threads": None if train.threads == "auto" else train.threads, "reproducible": train.reproducible}
        named = without_defaults(configure_torch, settings)
        self.add(self.write.call("engine.torch_settings.configure_torch", "world", **named), to="threads")

    def _data(self) -> None:
        self.section("What is random about a sample depends on (SEED, epoch, sample) alone.")
        splits = self.recipe.data.splits()
        names = list(getattr(self.run.train_loader.dataset, "classes", []))
        for split, part in splits.items():
            arguments = dict(part.model_extra or {})
            for name in ("root", "file"):
                if arguments.get(name) is not None:
                    found = self._found((*_place(split), name))
                    is_inside = name == "file" and arguments.get("root") is not None and found == arguments[name]
                    arguments[name] = found if is_inside else Path(found)
            if split != "train" and names and arguments.get("classes") == names:
                arguments["classes"] = Code("train_data.classes")
            code = self.write.part(f"data.{split}", "dataset", part.dataset, arguments, {})
            self.add(code, to=f"{variable_of(split)}_data")
        numbers = [str(number) for number in range(self.recipe.model.num_classes or 0)]
        self.add("classes = train_data.classes" if names else value(numbers).after("classes: list[str] = "))
        for split, part in splits.items():
            self._loader(split, part)

    def _found(self, place: tuple[str, ...]) -> str:
        """A path of the recipe where it was found; below the current folder, from there."""
        found: Any = self.resolved
        for each in place:
            found = found[each]
        return os.path.relpath(found) if Path(found).is_relative_to(Path.cwd()) else str(found)

    def _loader(self, split: str, part: DatasetPart) -> None:
        """The loader of a split, with its transforms."""
        variable = variable_of(split)
        loader = self.run.train_loader if split == "train" else self.run.evaluations[split].loader
        joints = getattr(loader.dataset, "joints", None)
        supplied = {
            "num_classes": ("len(classes)", len(loader.dataset.classes) or self.recipe.model.num_classes),
            "pairs": (f"{variable}_data.joints.pairs" if joints else "None", joints.pairs if joints else None),
        }
        items = [
            self.write.part(f"data.{split}.transforms.{index}", "transform", each.name, each.model_extra, supplied)
            for index, each in enumerate(part.transforms)
        ]
        if split != "train" and measures_original_size(self.recipe):
            items.insert(
                0,
                self.write.call(
                    "data.transforms.base.KeepOriginal",
                ),
            )
        transforms = Code("[", items, "]")
        if isinstance(loader.dataset, ClipDataset):
            self.add(transforms, to=f"{variable}_transforms")
            transforms = Code(f"{variable}_transforms")
            first = f"{variable}_transforms[0]"
            clips = self.write.call("data.datasets.video.split_clips", f"{variable}_data", first)
            self.add(clips, "a sample for each clip", to=f"{variable}_data")
        skips: dict[str, Code] = {}
        if loader.skips is not None:
            skip_list = self.write.call("data.skip_list.SkipList", value(split), value(loader.skips.limit))
            skips = {"skips": skip_list}
        made = self.write.call("data.split_loader.SplitLoader", f"{variable}_data", transforms, "SEED", **skips)
        self.add(made, to=f"{variable}_loader")

    def _steps(self) -> None:
        data, train = self.recipe.data, self.recipe.train
        self.section("A step is cut into micro-batches, at least one for each process.")
        size = value(train.micro_batch_size)
        if train.micro_batch_size == "auto":
            automatic = "data.sampler.automatic_micro_batch_size"
            same = {"is_same_for_any": value(True)} if train.reproducible == "world" else {}
            size = self.write.call(automatic, "min(BATCH_SIZE, len(train_data))", "world.size", **same)
        self.add(size, to="micro_batch_size")
        settings = {"drop_last": data.drop_last, "multiple": Code("world.size") if train.sync_bn else 1}
        sizes = ("len(train_data)", "BATCH_SIZE", "micro_batch_size")
        cut = self.write.call("data.sampler.BatchSampler", *sizes, **without_defaults(BatchSampler, settings))
        self.add(cut, to="sampler")
        total = "EPOCHS * sampler.steps_per_epoch" if train.epochs else "STEPS"
        self.add(self.write.call("core.intervals.Progress", total, "sampler.steps_per_epoch"), to="progress")

    def _model(self) -> None:
        part, train, channels = self.recipe.model, self.recipe.train, num_channels(self.run.train_loader)
        self.section("The initial weights follow from SEED.")
        self.add(f"world.seed({self.write.name('data.rng', 'model_seed')}(SEED))")
        supplied = {**self.known, "in_channels": (str(channels), channels)}
        self.add(self.write.part("model", "model", part.name, part.model_extra, supplied), to="model")
        if not is_ours(self.write.target("model", "model", part.name)[0]):  # which have no lazy layers
            self.add(self.write.call("models.placement.initialize_lazy_layers", "model", "train_loader"))
        if part.weights is not None:
            self._weights(part.weights)
        if part.head_batch_norm:
            self.add(self.write.call("models.surgery.add_head_batch_norm", "model"))
        named = without_defaults(place_model, {"channels_last": train.channels_last is True, "sync_bn": train.sync_bn})
        self.add(self.write.call("models.placement.place_model", "model", "world.device", **named))

    def _weights(self, weights: str | Weights) -> None:
        declared = Weights(file=weights) if isinstance(weights, str) else weights
        place = ("model", "weights") if isinstance(weights, str) else ("model", "weights", "file")
        more = {} if declared.key is None else {"key": value(declared.key)}
        self.add(self.write.call("checkpoint.weights.read_weights", value(self._found(place)), **more), to="weights")
        options = declared.model_dump(exclude={"file", "key"})
        surgery = self.write.dataclass(Surgery(**options | {"rename": [(old, new) for old, new in declared.rename]}))
        self.add(
            call(f"report = {self.write.name('models.surgery', 'apply', 'load_weights')}", "model", "weights", surgery)
        )

    def _task(self) -> None:
        recipe = self.recipe
        self.section("A loss is a sum and a count: the sum of a step, over all processes, is divided by its count.")
        supplied: dict[str, tuple[str, Any]] = {**self.known, "model": ("model", Always), "losses": ("{}", Always)}
        losses = {
            each.name: self.write.part(f"losses.{index}", "loss", each.name, each.model_extra, self.known)
            for index, each in enumerate(recipe.losses)
        }
        if losses:
            self.add(value(losses), to="losses")
            supplied["losses"] = ("losses", Always)
        metrics = [
            self.write.part(f"evaluate.metrics.{index}", "metric", each.name, each.model_extra, self.known)
            for index, each in enumerate(recipe.evaluate.metrics)
        ]
        if metrics:
            self.add(value(metrics), to="metrics")
            supplied["extra_metrics"] = ("metrics", Always)
        weights = {each.name: each.weight for each in recipe.losses}
        supplied["weights"] = (str(value(weights)), Always)
        del supplied["num_classes"], supplied["num_keypoints"]
        task = self.write.part("task", "task", recipe.task.name, recipe.task.model_extra, supplied)
        self.add(task, to="task")
        checks = [
            Code(f"losses[{value(name)}].check") for name, loss in self.builder.losses.items() if hasattr(loss, "check")
        ]
        if checks:
            loaders = "".join(f"{variable_of(split)}_loader.checks = " for split in recipe.data.splits())
            self.add(value(checks).after(loaders), "a label out of range is reported with its file")


def _import_folder(used: UsedModule) -> str:
    """The folder that Python finds a module in."""
    file = Path(used.file)
    return str(file.parents[used.module.count(".") + (file.name == "__init__.py")])


def _wrapped(text: str) -> list[str]:
    """The lines of a docstring."""
    escaped = text.replace("\\", "\\\\").replace('"""', '\\"""')
    return textwrap.wrap(escaped, WIDTH, break_long_words=False, break_on_hyphens=False)


def _place(split: str) -> tuple[str, ...]:
    """Where a recipe has a split: data.val, data.test.NAME."""
    return ("data", *split.split(".", 1))
