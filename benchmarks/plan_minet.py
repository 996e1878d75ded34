"""What `paceline plan` predicts for MINet by settings, beside what was published, and how long that takes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from benchmarks.report import Goal, Section
from paceline.plan.devices import parse_device
from paceline.plan.grid import Grid, combinations, plan_rows
from paceline.plan.rows import Row

_MEBI = 2**20
SETTINGS = {
    "procs": ["1", "2"],
    "train.precision": ["fp32", "fp16"],
    "train.activation_checkpointing": ["none", "blocks"],
}
# MiB in use on GPUs, the larger of two: the light MINet in multi-scale training. The batch size is not stated.
PUBLISHED = [9009, 4501, 5527, 3385, 5733, 3335, 3409, 2215]
SHARDED = {
    "procs": ["4096"],
    "train.strategy": ["ddp", "fsdp", "zero"],
    "train.precision": ["fp32", "bf16"],
    "train.activation_checkpointing": ["none", "blocks"],
}


def measure(is_quick: bool) -> Section:
    """The memory by settings, and how long a plan of the large one takes."""
    side = 64 if is_quick else 320
    size = f"data.train.transforms.0.size=[{side},{side}]"
    rows = [["published, light", *_ratios(PUBLISHED)]]
    for name, recipe in (("light", "minet_light"), ("ResNet-50", "minet_resnet50")):
        rows.append([f"predicted, {name}", *_ratios(_predict(recipe, [size], SETTINGS))])
    begin = time.perf_counter()
    _predict("minet_resnet50", [size, "data.batch_size=16384"], SHARDED, parse_device("a100-40gb").memory)
    seconds = time.perf_counter() - begin
    method = (
        f"The memory of MINet at {side} × {side} pixels in batches of 4, as a part of that of plain training in fp32 on"
        " one device. The published numbers are of multi-scale training, in MiB in use on GPUs; their batch size is not"
        " stated. The plan that is timed has 12 rows of MINet on ResNet-50 on 4,096 devices: `ddp`, `fsdp` and `zero`,"
        " fp32 and bf16, with and without checkpointing, and the largest micro-batch of each."
    )
    header = ["", "plain, MiB", "checkpointing", "fp16", "both", "2 devices", "checkpointing", "fp16", "both"]
    goal = Goal("12 rows of MINet on ResNet-50 in 60 s", f"{seconds:.0f} s", seconds <= 60)
    return Section("Planned memory of MINet", method, header, rows, [goal])


def _predict(
    recipe: str, overrides: list[str], choices: Mapping[str, Sequence[str]], limit: int | None = None
) -> list[float]:
    """The MiB of each combination."""
    rows = plan_rows(Grid(recipe, overrides, limit), list(combinations(choices)))
    return [row.step.memory.total / _MEBI for row in rows if isinstance(row, Row)]


def _ratios(sizes: Sequence[float]) -> list[str]:
    """The first one, and the others as parts of it."""
    return [f"{sizes[0]:,.0f}", *(f"{size / sizes[0]:.2f}" for size in sizes[1:])]
