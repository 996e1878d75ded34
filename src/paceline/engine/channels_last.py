"""`train.channels_last: auto`: a rule on the model and its images, since the memory layout changes bits."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor, nn

from paceline.core.torch_private import is_compiled
from paceline.data.loader import StepBatch
from paceline.engine.trainer import Trainer

_MIN_VALUES = 1 << 15  # of the images of a micro-batch; with fewer, other things than convolutions take the time
_MIN_CHANNELS = 8  # narrower layers fill no vector of the processor
_MAX_WEIGHTS = 50  # per value of the images: large kernels over few pixels are faster in oneDNN's own layout


def choose_channels_last(trainer: Trainer, step_batch: StepBatch) -> None:
    """Choose the memory layout of images and weights on a CPU; rank 0, whose images may have other sizes, decides."""
    can_choose = trainer.world.device.type == "cpu" and trainer.strategy.can_probe and not is_compiled(trainer.model)
    chosen = (
        can_choose
        and trainer.world.is_main
        and is_channels_last_faster(trainer.model, step_batch.micro_batches[0].batch["image"])
    )
    trainer.state.set_channels_last(bool(trainer.world.start_sum([float(chosen)])()[0]))


def is_channels_last_faster(model: nn.Module, images: Iterable[Tensor]) -> bool:
    """Whether a training step of this model on a CPU is faster in channels_last, as measured for many models."""
    sizes = [image.shape for image in images]
    values = sum(size.numel() for size in sizes)
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    kernels = [
        # Not of `weight`: where it is parametrized, as by spectral norm, a look at it changes buffers, here on rank 0.
        each.in_channels * each.out_channels * math.prod(each.kernel_size)
        for each in convolutions
        if each.groups == 1 and each.kernel_size != (1, 1)
    ]
    return (
        all(len(size) == 3 for size in sizes)
        and max((each.out_channels for each in convolutions), default=0) >= _MIN_CHANNELS
        and values >= max(_MIN_VALUES, sum(kernels) / _MAX_WEIGHTS)
    )
