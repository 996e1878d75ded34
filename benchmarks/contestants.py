"""The step benchmark's ways to do the same training, each set up as its own documentation says."""

from __future__ import annotations

import json
import logging
import math
import warnings
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import paceline
from benchmarks.contest import (
    LR,
    MEAN,
    STD,
    WEIGHT_DECAY,
    Batches,
    Contest,
    Pair,
    make_loader,
    make_optimizer,
    normalize,
)
from benchmarks.terminal import on_terminal
from paceline.cli import main as paceline_main
from paceline.core.torchvision_ops import import_torchvision

LOG_EVERY_STEPS = 20


def hand_written(contest: Contest) -> None:
    """What a good engineer writes for this one case, and nothing more: no logging, no checks, no checkpoints."""
    model = contest.make_model()
    optimizer = make_optimizer(model)
    for step, (images, labels) in enumerate(Batches(contest)):
        loss = F.cross_entropy(model(normalize(images)), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        for group in optimizer.param_groups:
            group["lr"] = contest.lr(step)
        optimizer.step()
        optimizer.zero_grad()


def hand_written_checked(contest: Contest) -> None:
    """The same, never letting a gradient that is not finite reach the weights, which Paceline does too."""
    model = contest.make_model()
    optimizer = make_optimizer(model)
    for step, (images, labels) in enumerate(Batches(contest)):
        loss = F.cross_entropy(model(normalize(images)), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None])
        if not math.isfinite(norm.item()):
            raise ArithmeticError(f"the gradient of step {step} is not finite")
        for group in optimizer.param_groups:
            group["lr"] = contest.lr(step)
        optimizer.step()
        optimizer.zero_grad()


def paceline_command(contest: Contest) -> None:
    """`paceline train` on a terminal, as a user starts it, with all that it does by default."""
    with on_terminal():
        code = paceline_main(["train", str(_recipe(contest)), "--out", str(contest.folder / "run"), "--fresh"])
    if code != 0:
        raise RuntimeError(f"paceline train ended with {code}")


def paceline_own_loop(contest: Contest) -> None:
    """A loop of one's own around `paceline.train_step`: exact batches and checks, but nobody looks on."""
    run = paceline.build(_recipe(contest), out=contest.folder / "own")
    run.model.train()
    for step_batch in run.batches:
        paceline.train_step(run, step_batch)


def lightning_trainer(contest: Contest) -> None:
    """Lightning's Trainer as it comes, on a terminal: its logger has nothing to log."""
    _fit(contest)


def lightning_bare(contest: Contest) -> None:
    """Lightning's Trainer with everything switched off that can be."""
    _fit(
        contest,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )


def lightning_fabric(contest: Contest) -> None:
    """A loop of one's own with Lightning Fabric."""
    import_torchvision()
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    network = contest.make_model()
    model, optimizer = fabric.setup(network, make_optimizer(network))
    scheduler = CosineAnnealingLR(optimizer, contest.steps)
    for images, labels in fabric.setup_dataloaders(make_loader(contest)):
        loss = F.cross_entropy(model(normalize(images)), labels)
        fabric.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def accelerate(contest: Contest) -> None:
    """A loop of one's own with Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    network = contest.make_model()
    plain = make_optimizer(network)
    model, optimizer, loader, scheduler = accelerator.prepare(
        network, plain, make_loader(contest), CosineAnnealingLR(plain, contest.steps)
    )
    for images, labels in loader:
        loss = F.cross_entropy(model(normalize(images)), labels)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def _recipe(contest: Contest) -> Any:
    recipe = {
        "name": "benchmark",
        "task": "classification",
        "model": {"name": contest.model},
        "data": {
            "batch_size": contest.batch,
            "drop_last": True,
            "train": {
                "dataset": "fashion_small",
                "split": "train",
                "transforms": [{"name": "normalize", "mean": [MEAN], "std": [STD]}],
            },
        },
        "losses": [{"name": "cross_entropy"}],
        "optimizer": {"name": "adamw", "lr": LR, "weight_decay": WEIGHT_DECAY},
        "schedule": {"decay": "cosine"},
        "train": {"steps": contest.steps, "threads": torch.get_num_threads()},
        "checkpoint": {"every_steps": contest.steps},
        "logging": {"every_steps": LOG_EVERY_STEPS},
    }
    path = contest.folder / "recipe.json"
    path.write_text(json.dumps(recipe), encoding="utf-8")
    return path


def _fit(contest: Contest, **options: Any) -> None:
    import_torchvision()  # Lightning imports it too, and fails where its compiled part does not fit torch
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = contest.make_model()

        def training_step(self, batch: Pair, number: int) -> Tensor:
            images, labels = batch
            return F.cross_entropy(self.network(normalize(images)), labels)

        def configure_optimizers(self) -> dict[str, Any]:
            optimizer = make_optimizer(self)
            schedule = {"scheduler": CosineAnnealingLR(optimizer, contest.steps), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(on_terminal())
        trainer = Trainer(
            max_steps=contest.steps, accelerator="cpu", devices=1, default_root_dir=contest.folder, **options
        )
        trainer.fit(Module(), make_loader(contest))
