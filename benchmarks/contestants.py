"""The step benchmark's training by hand and with Paceline."""

from __future__ import annotations

import json
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import paceline
from benchmarks.contest import LR, MEAN, STD, WEIGHT_DECAY, Contest, make_batches, make_optimizer, normalize
from benchmarks.terminal import on_terminal
from paceline.cli import main as paceline_main

LOG_EVERY_STEPS = 20


def hand_written(contest: Contest) -> None:
    """What a good engineer writes for this one case, and nothing more: no logging, no checks, no checkpoints."""
    model = contest.make_model()
    optimizer = make_optimizer(model)
    for step, (images, labels) in enumerate(make_batches(contest)):
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
    for step, (images, labels) in enumerate(make_batches(contest)):
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


def paceline_script(contest: Contest) -> None:
    """`paceline.train()` in a script on a terminal: what the command does, started from Python."""
    with on_terminal():
        paceline.train(paceline.build(_recipe(contest), out=contest.folder / "script"), fresh=True)


def paceline_own_loop(contest: Contest) -> None:
    """A loop of one's own around `paceline.train_step`: exact batches and checks, but nobody looks on."""
    run = paceline.build(_recipe(contest), out=contest.folder / "own")
    run.model.train()
    for step_batch in run.batches:
        paceline.train_step(run, step_batch)


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
