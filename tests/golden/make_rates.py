"""Write rates.json: learning rates of whole runs, from their definition in exact fractions.

    python tests/golden/make_rates.py

Nothing of the package is used. The cosine is summed up from its series, in fractions too.
"""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

# 50 digits of pi.
PI = Fraction("3.14159265358979323846264338327950288419716939937510")
CASES = [
    # decay, lr, total steps, steps per epoch, warm-up steps, warm-up from, floor, per epoch
    ("constant", "0.1", 6, 3, "0", "0", "0", False),
    ("constant", "0.1", 8, 4, "3", "0.25", "0", False),
    ("cosine", "0.1", 12, 4, "0", "0", "0", False),
    ("cosine", "0.4", 20, 5, "5", "0.1", "0.01", False),
    ("cosine", "0.003", 15, 5, "2.5", "0", "0", False),
    ("cosine", "1", 12, 3, "0", "0", "0.2", True),
    ("linear", "0.5", 10, 5, "0", "0", "0", False),
    ("linear", "0.5", 11, 5, "1", "0.5", "0.1", False),
    ("linear", "0.5", 12, 4, "0", "0", "0", True),
]


def cosine_of(angle: Fraction) -> Fraction:
    """The series of the cosine, until its terms are far below what a float can hold."""
    total, term, number = Fraction(0), Fraction(1), 0
    while abs(term) > Fraction(1, 10**30):
        total += term
        term *= -angle * angle / ((number + 1) * (number + 2))
        number += 2
    return total


def left(decay: str, done: Fraction) -> Fraction:
    """The share of the learning rate that is left."""
    return {"constant": Fraction(1), "linear": 1 - done, "cosine": (1 + cosine_of(PI * done)) / 2}[decay]


def main() -> None:
    cases = []
    for decay, lr, total, steps_per_epoch, warmup, warmup_from, floor, per_epoch in CASES:
        rates = []
        for step in range(total):
            at = Fraction(step - step % steps_per_epoch if per_epoch else step)
            if at < Fraction(warmup):
                share = Fraction(warmup_from) + (1 - Fraction(warmup_from)) * at / Fraction(warmup)
            else:
                done = (at - Fraction(warmup)) / (total - Fraction(warmup))
                share = Fraction(floor) + (1 - Fraction(floor)) * left(decay, done)
            rates.append(float(Fraction(lr) * share))
        arguments = {
            "lr": float(lr),
            "total_steps": total,
            "steps_per_epoch": steps_per_epoch,
            "warmup_steps": float(warmup),
            "warmup_from": float(warmup_from),
            "floor": float(floor),
            "per_epoch": per_epoch,
        }
        cases.append({"decay": decay, "arguments": arguments, "rates": rates})
    lines = ",\n".join(json.dumps(case) for case in cases)
    Path(__file__).with_name("rates.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
