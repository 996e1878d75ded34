"""Write order.json: which sample comes at which position, by the definition of the order in plain whole numbers.

    python tests/golden/make_order.py

Nothing of the package is used. The numbers may only change together with the promise that runs repeat.
"""

from __future__ import annotations

import json
from pathlib import Path

WORD = 2**64
ROUNDS = 8
CASES = [
    # size, seed, epoch, first position, how many
    (1, 0, 0, 0, 1),
    (2, 5, 3, 0, 2),
    (7, 0, 0, 0, 7),
    (7, 0, 1, 0, 7),
    (7, 1, 0, 0, 7),
    (16, 3, 2, 0, 16),
    (17, 3, 2, 0, 17),
    (1000, 42, 11, 990, 10),
    (6000, 0, 0, 0, 12),
    (10_000, 0, 5, 8186, 12),
    (50_000, 2**63 - 1, 89, 16_380, 8),
    (1_281_167, 0, 299, 1_281_155, 12),
    (10**9, 7, 1, 0, 6),
    (10**9, 7, 1, 10**9 - 6, 6),
]


def folded(*parts: int) -> int:
    """Whole numbers hashed to 64 bits: after each, an add and the finaliser of splitmix64."""
    state = 0
    for part in parts:
        state = (state + (part % WORD + 1) * 0x9E3779B97F4A7C15) % WORD
        state = (state ^ state // 2**30) * 0xBF58476D1CE4E5B9 % WORD
        state = (state ^ state // 2**27) * 0x94D049BB133111EB % WORD
        state ^= state // 2**31
    return state


def hashed(value: int, key: int) -> int:
    """What a row or column is shifted by in one round."""
    value = (value + key) * 0x9E3779B97F4A7C15 % WORD
    return (value ^ value // 2**32) * 0xD6E8FEB86659FD93 % WORD // 2**32


def sample_at(size: int, seed: int, epoch: int, position: int) -> int:
    """Feistel rounds over the rows and columns of the most nearly square rectangle that holds `size`, until inside."""
    rows = 1
    while rows * rows < size:
        rows += 1
    columns = -(-size // rows)
    keys = [folded(seed, epoch, number) // 4 for number in range(ROUNDS)]
    value = position
    while True:
        row, column = divmod(value, columns)
        for number, key in enumerate(keys):
            if number % 2 == 0:
                row = (row + hashed(column, key)) % rows
            else:
                column = (column + hashed(row, key)) % columns
        value = row * columns + column
        if value < size:
            return value


def main() -> None:
    cases = [
        {
            "size": size,
            "seed": seed,
            "epoch": epoch,
            "start": start,
            "samples": [sample_at(size, seed, epoch, position) for position in range(start, start + count)],
        }
        for size, seed, epoch, start, count in CASES
    ]
    lines = ",\n".join(json.dumps(case) for case in cases)
    Path(__file__).with_name("order.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
