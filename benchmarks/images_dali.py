"""Photos loaded by NVIDIA DALI on the host, written as its documentation has it for training on ImageNet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.photos import MEAN, SIZE, STD

THREADS = 2


def epochs(root: Path, batch: int) -> Callable[[], Iterator[Tensor]]:
    """What gives, each time it is called, the batches of one more epoch; DALI goes on reading between epochs."""
    from nvidia.dali.plugin.base_iterator import LastBatchPolicy
    from nvidia.dali.plugin.pytorch import DALIClassificationIterator

    loader = DALIClassificationIterator(
        _pipeline(root, batch), reader_name="Reader", last_batch_policy=LastBatchPolicy.PARTIAL, auto_reset=True
    )

    def epoch() -> Iterator[Tensor]:
        for (fields,) in loader:
            yield fields["data"]

    return epoch


def _pipeline(root: Path, batch: int) -> Any:
    from nvidia.dali import Pipeline, fn, types

    pipeline = Pipeline(batch, THREADS, None, prefetch_queue_depth=2, seed=0)
    with pipeline:
        files, labels = fn.readers.file(file_root=str(root), random_shuffle=True, name="Reader")
        images = fn.decoders.image_random_crop(
            files, device="cpu", random_aspect_ratio=[3 / 4, 4 / 3], random_area=[0.08, 1.0], num_attempts=100
        )
        images = fn.resize(images, resize_x=SIZE, resize_y=SIZE, interp_type=types.INTERP_TRIANGULAR)
        images = fn.crop_mirror_normalize(
            images,
            dtype=types.FLOAT,
            output_layout="CHW",
            crop=(SIZE, SIZE),
            mean=[255 * each for each in MEAN],
            std=[255 * each for each in STD],
            mirror=fn.random.coin_flip(probability=0.5),
        )
        pipeline.set_outputs(images, labels)
    return pipeline
