"""`turn.py CONTESTANT SECONDS`: train the quickstart's net on all cores for a while; prints samples per second."""

from __future__ import annotations

import sys
import time
from typing import Any

BATCH, WARM_UP = 64, 5


def with_paceline(seconds: float) -> float:
    """The recipe itself; the package is imported before torch."""
    import paceline

    run = paceline.build("quickstart", {"train.epochs": 1000, "data.batch_size": BATCH})
    steps = iter(run.batches)
    return _rate(lambda: paceline.train_step(run, next(steps)), seconds)


def by_hand(seconds: float) -> float:
    """A plain loop over batches in memory; torch waits as it does by itself."""
    import torch

    images, labels = torch.randn(BATCH, 1, 28, 28), torch.randint(0, 10, (BATCH,))
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return _rate(step, seconds)


def with_lightning(seconds: float) -> float:
    """Lightning's Trainer with its extras off, over the same batches."""
    import torch
    from torch.utils.data import DataLoader

    from paceline.core.torchvision_ops import import_torchvision

    import_torchvision()
    from lightning.pytorch import Callback, LightningModule, Trainer

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = _net()

        def training_step(self, batch: Any, number: int) -> Any:
            return torch.nn.functional.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)

    class Clock(Callback):  # type: ignore[misc]
        steps, started, rate = 0, 0.0, 0.0

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.steps += 1
            if self.steps == WARM_UP:
                self.started = time.perf_counter()
            elif self.steps > WARM_UP and time.perf_counter() - self.started > seconds:
                self.rate = (self.steps - WARM_UP) * BATCH / (time.perf_counter() - self.started)
                trainer.should_stop = True

    clock = Clock()
    batches: Any = [(torch.randn(BATCH, 1, 28, 28), torch.randint(0, 10, (BATCH,)))] * 100_000
    loader: Any = DataLoader(batches, batch_size=None)  # a bare list would be taken for a list of loaders
    extras = ("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary")
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=[clock], **dict.fromkeys(extras, False))
    trainer.fit(Module(), loader)
    return clock.rate


def _net() -> Any:
    from paceline.models.convnet import ConvNet

    return ConvNet(num_classes=10, in_channels=1, widths=[32, 64, 128])


def _rate(step: Any, seconds: float) -> float:
    for _ in range(WARM_UP):
        step()
    number, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        step()
        number += 1
    return number * BATCH / (time.perf_counter() - started)


if __name__ == "__main__":
    print({"paceline": with_paceline, "torch": by_hand, "lightning": with_lightning}[sys.argv[1]](float(sys.argv[2])))
