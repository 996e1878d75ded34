"""Write curve.json: nine steps of a linear classifier, computed number by number from the contracts.

    python tests/golden/make_curve.py

Nothing of the package is used, nor any library: order, cutting, softmax, gradients, momentum and schedule are
written out below, in the plainest form.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from make_order import sample_at

SIZE, BATCH, SEED, STEPS = 21, 8, 7, 9
CLASSES, PIXELS = 3, 4
SMOOTHING, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 0.01
LR, WARMUP_STEPS, WARMUP_FROM, FLOOR = 0.5, 2, 0.1, 0.05

Vector = list[float]


def pixels(sample: int) -> Vector:
    return [math.sin(1 + PIXELS * sample + place) for place in range(PIXELS)]


def label(sample: int) -> int:
    return sample * sample % CLASSES


def learning_rate(step: int) -> float:
    if step < WARMUP_STEPS:
        return LR * (WARMUP_FROM + (1 - WARMUP_FROM) * step / WARMUP_STEPS)
    done = (step - WARMUP_STEPS) / (STEPS - WARMUP_STEPS)
    return LR * (FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * done)) / 2)


def loss_and_gradient(weights: list[Vector], samples: list[int]) -> tuple[float, list[Vector]]:
    """The mean smoothed cross-entropy of the samples; each row of weights ends with the bias."""
    loss, gradient = 0.0, [[0.0] * (PIXELS + 1) for _ in range(CLASSES)]
    for sample in samples:
        inputs = [*pixels(sample), 1.0]
        logits = [sum(weight * value for weight, value in zip(row, inputs, strict=True)) for row in weights]
        total = sum(math.exp(logit) for logit in logits)
        for number in range(CLASSES):
            target = SMOOTHING / CLASSES + (1 - SMOOTHING) * (number == label(sample))
            share = math.exp(logits[number]) / total
            loss -= target * math.log(share) / len(samples)
            for place, value in enumerate(inputs):
                gradient[number][place] += (share - target) * value / len(samples)
    return loss, gradient


def main() -> None:
    weights = [[0.1 * (number + 1) * (place - 1.5) for place in range(PIXELS)] + [0.0] for number in range(CLASSES)]
    momentum = [[0.0] * (PIXELS + 1) for _ in range(CLASSES)]
    steps_per_epoch = math.ceil(SIZE / BATCH)
    steps = []
    for step in range(STEPS):
        epoch, first = step // steps_per_epoch, step % steps_per_epoch * BATCH
        samples = [sample_at(SIZE, SEED, epoch, position) for position in range(first, min(first + BATCH, SIZE))]
        loss, gradient = loss_and_gradient(weights, samples)
        norm = math.sqrt(sum(value * value for row in gradient for value in row))
        rate = learning_rate(step)
        for number in range(CLASSES):
            for place in range(PIXELS + 1):
                push = gradient[number][place] + WEIGHT_DECAY * weights[number][place]
                momentum[number][place] = push if step == 0 else MOMENTUM * momentum[number][place] + push
                weights[number][place] -= rate * momentum[number][place]
        steps.append({"loss": loss, "grad_norm": norm, "lr": rate})
    golden = {"steps": steps, "weight": [row[:PIXELS] for row in weights], "bias": [row[PIXELS] for row in weights]}
    Path(__file__).with_name("curve.json").write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
