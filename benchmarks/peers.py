"""The step benchmark's training with other frameworks, each set up as its own documentation says."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from benchmarks.contest import Contest, Pair, Samples, make_loader, make_optimizer, normalize
from benchmarks.terminal import on_terminal
from paceline.core.torchvision_ops import import_torchvision

import_torchvision()  # most of them import it too, and fail where its compiled part does not fit torch
_numbers = count()


def ignite(contest: Contest) -> None:
    """Ignite's supervised trainer; its engine calls the scheduler after every iteration."""
    from ignite.engine import Events, create_supervised_trainer
    from ignite.handlers.param_scheduler import LRScheduler

    model = contest.make_model()
    optimizer = make_optimizer(model)

    def prepare(batch: Pair, device: Any, non_blocking: bool) -> Pair:
        return normalize(batch[0]), batch[1]

    trainer = create_supervised_trainer(model, optimizer, F.cross_entropy, prepare_batch=prepare)
    scheduler = LRScheduler(CosineAnnealingLR(optimizer, contest.steps))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, scheduler)
    trainer.run(make_loader(contest), max_epochs=1)


def lightning_fabric(contest: Contest) -> None:
    """A loop of one's own with Lightning Fabric."""
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


def mmengine(contest: Contest) -> None:
    """MMEngine's runner, which logs every 10 iterations by default."""
    with _without("transformers"):  # whose Adafactor it would register under the name of torch's, and fail
        from mmengine.model import BaseModel
        from mmengine.optim import OptimWrapper
        from mmengine.optim.scheduler import CosineAnnealingLR as CosineSchedule
        from mmengine.runner import Runner

    class Model(BaseModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = contest.make_model()

        def forward(self, images: Tensor, labels: Tensor, mode: str) -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(self.network(normalize(images)), labels)}

    with _unseen():
        model = Model()
        wrapper = OptimWrapper(make_optimizer(model))
        runner = Runner(
            model,
            str(contest.folder / "mmengine"),
            train_dataloader=make_loader(contest),
            train_cfg={"by_epoch": False, "max_iters": contest.steps},
            optim_wrapper=wrapper,
            param_scheduler=CosineSchedule(wrapper, T_max=contest.steps, by_epoch=False),
            default_hooks={"checkpoint": {"type": "CheckpointHook", "by_epoch": False, "interval": contest.steps}},
            log_processor={"by_epoch": False},
            experiment_name=f"benchmark_{next(_numbers)}",  # loggers are kept by this name
        )
        runner.train()


def hf_trainer(contest: Contest) -> None:
    """Hugging Face's Trainer as it comes: a progress bar, clipped gradients, a log every 500 steps."""
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = contest.make_model()

        def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.network(normalize(images))
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    class OwnLoader(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(make_loader(contest, _named))

    with _unseen():
        model = Model()
        optimizer = make_optimizer(model)
        arguments = TrainingArguments(str(contest.folder / "trainer"), max_steps=contest.steps, use_cpu=True)
        schedule = CosineAnnealingLR(optimizer, contest.steps)
        trainer = OwnLoader(model, arguments, train_dataset=Samples(), optimizers=(optimizer, schedule))
        trainer.train()


def _named(batch: Pair) -> dict[str, Tensor]:
    return {"images": batch[0], "labels": batch[1]}


def lightning_trainer(contest: Contest) -> None:
    """Lightning's Trainer as it comes, on a terminal: its logger has nothing to log."""
    _fit(contest)


def lightning_bare(contest: Contest) -> None:
    """Lightning's Trainer with everything switched off that can be."""
    extras = ("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary")
    _fit(contest, **dict.fromkeys(extras, False))


def _fit(contest: Contest, **options: Any) -> None:
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
    with _unseen():
        folder = contest.folder
        trainer = Trainer(max_steps=contest.steps, accelerator="cpu", devices=1, default_root_dir=folder, **options)
        trainer.fit(Module(), make_loader(contest))


@contextmanager
def _without(name: str) -> Iterator[None]:
    """Have a package seem not installed."""
    modules: dict[str, Any] = sys.modules
    before = {name: modules[name]} if name in modules else {}
    modules[name] = None
    try:
        yield
    finally:
        del modules[name]
        modules.update(before)


@contextmanager
def _unseen() -> Iterator[None]:
    """A terminal for bars and lines of the log, and no warnings."""
    with warnings.catch_warnings(), on_terminal():
        warnings.simplefilter("ignore")
        yield
