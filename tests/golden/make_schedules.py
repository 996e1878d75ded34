"""Write schedules.json: learning rates by the formulas of the systems that Paceline replaces, in plain Python.

    python tests/golden/make_schedules.py

Nothing of the package is used. Pet's are listed by the number i of the step, counted from 1; those at fractional
epochs by the number of the step, counted from 0; the others by the epoch e, counted from 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

BASE = 0.001
GAMMA, POWER, FACTOR = 0.1, 0.9, 0.1


def constant_warmup(i: int, warmup: int) -> float:
    return BASE * FACTOR


def linear_warmup(i: int, warmup: int) -> float:
    return BASE * (FACTOR * (1 - i / warmup) + i / warmup)


def step(i: int, warmup: int, total: int, steps: list[int]) -> float:
    return BASE * GAMMA ** sum(1 for at in steps if at <= i)


def cosine(i: int, warmup: int, total: int, steps: list[int]) -> float:
    return 0.5 * BASE * (1 + math.cos(math.pi * (i - warmup - 1) / (total - warmup)))


def poly(i: int, warmup: int, total: int, steps: list[int]) -> float:
    return float(BASE * (1 - (i - warmup - 1) / (total - warmup)) ** POWER)


def step_cosine(i: int, warmup: int, total: int, steps: list[int]) -> float:
    last = steps[-1]
    if i < last:
        return step(i, warmup, total, steps)
    level = BASE * GAMMA ** sum(1 for at in steps if at < last)
    return 0.5 * level * (1 + math.cos(math.pi * (i - last - 1) / (total - last)))


WARMUPS = {"constant": constant_warmup, "linear": linear_warmup}
POLICIES = {"step": step, "cosine": cosine, "poly": poly, "step_cosine": step_cosine}


def around(*points: int) -> list[int]:
    return [number for point in points for number in (point - 1, point, point + 1)]


def pet(warmup: int, total: int, steps: list[int]) -> dict[str, dict[str, float]]:
    numbers = sorted(
        {1, 2, 3, warmup // 2, *around(warmup, *steps, (warmup + total) // 2, total // 3), total - 1, total}
    )
    return {
        f"{policy} {rise}": {
            str(i): WARMUPS[rise](i, warmup) if i <= warmup else POLICIES[policy](i, warmup, total, steps)
            for i in numbers
        }
        for policy in POLICIES
        for rise in WARMUPS
    }


def mae(steps_per_epoch: int) -> dict[str, float]:
    """Half a cosine to an absolute floor, behind linear warm-up from 0, at fractional epochs; keyed by the step."""
    warmup_epochs, epochs = 40, 400
    lr, min_lr = 1.5e-4 * 4096 / 256, 1e-6

    def rate(e: float) -> float:
        if e < warmup_epochs:
            return lr * e / warmup_epochs
        return min_lr + (lr - min_lr) * 0.5 * (1 + math.cos(math.pi * (e - warmup_epochs) / (epochs - warmup_epochs)))

    last = epochs * steps_per_epoch - 1
    places = around(steps_per_epoch, 40 * steps_per_epoch, 220 * steps_per_epoch, 333 * steps_per_epoch + 101)
    return {str(step): rate(step / steps_per_epoch) for step in (0, 1, 2, 17, *places, last - 1, last)}


def by_epoch(epochs: Iterable[int], factor: Callable[[int], float]) -> dict[str, float]:
    return {str(e): 0.05 * factor(e) for e in epochs}


def main() -> None:
    total, warmup = 40, 5
    golden = {
        "pet steps, W=500 T=90000": pet(500, 90_000, [60_000, 80_000]),
        "pet epochs, W=5 T=90 of 350": pet(5 * 350, 90 * 350, [60 * 350, 80 * 350]),
        "pet early milestone, W=500 T=2000": pet(500, 2000, [300, 1500]),
        "mae, 40 of 400 epochs of 312": mae(312),
        "f3, 40 epochs": by_epoch(range(total), lambda e: 1 - abs(2 * (e + 1) / (total + 1) - 1)),
        "(1+e)/W, 5 of 40 epochs": by_epoch(range(total), lambda e: (1 + e) / warmup if e < warmup else 1.0),
        "poly 0.9, 40 epochs": by_epoch(range(total), lambda e: (1 - e / total) ** 0.9),
        "cosine, 40 epochs": by_epoch(range(total), lambda e: (1 + math.cos(math.pi * e / total)) / 2),
        "exponential 0.9457, 40 epochs": by_epoch(range(total), lambda e: 0.9457**e),
    }
    Path(__file__).with_name("schedules.json").write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
