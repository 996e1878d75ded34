"""CRC-32C against the published values, and against a bit-by-bit one."""

from __future__ import annotations

import random

import pytest

from paceline.loggers.tensorboard import crc32c


def bit_by_bit(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),  # this and those below: RFC 3720, B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_published_values(data: bytes, expected: int) -> None:
    assert crc32c(data) == expected


@pytest.mark.parametrize("size", [1, 2047, 2048, 2049, 2051, 4096, 5000, 16_383, 16_384, 16_385, 70_001])
def test_every_length_agrees_with_a_bit_by_bit_one(size: int) -> None:
    data = random.Random(size).randbytes(size)
    assert crc32c(data) == bit_by_bit(data)
    assert crc32c(bytes(size)) == bit_by_bit(bytes(size))


def test_it_agrees_with_that_of_tensorboard() -> None:
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import crc32c as theirs

    data = random.Random(0).randbytes(100_000)
    assert crc32c(data) == theirs(data)
