"""Models of absurd sizes are refused while they are built."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.core.process import free_memory
from paceline.models import size_limit
from paceline.models.convnet import ConvNet
from paceline.models.size_limit import limited_size


def test_parameters_that_memory_does_not_hold_are_refused_before_they_are_filled() -> None:
    with pytest.raises(ValueError, match=r"more than 0\.004 GB .* 0\.003 GB"), limited_size(3_000_000):
        nn.Linear(1000, 1000)
    with limited_size(5_000_000):
        nn.Linear(1000, 1000)
        with pytest.raises(ValueError, match=r"0\.008"):
            nn.Linear(1000, 1000)
    nn.Linear(1000, 1000)


def test_what_the_system_refuses_at_once_is_said_in_the_same_way() -> None:
    with pytest.raises(ValueError, match=r"more than 4e\+06 GB"), limited_size():
        nn.Linear(10**6, 10**9)
    with pytest.raises(RuntimeError, match="inconsistent"), limited_size():
        torch.ones(2) @ torch.ones(3)


def test_modules_beyond_number_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size_limit, "MAX_MODULES", 100)
    with pytest.raises(ValueError, match="more than 100 modules"), limited_size():
        ConvNet(2, depth=1_000_000)
    with limited_size():
        ConvNet(2, depth=1)


def test_parameters_without_memory_are_not_counted() -> None:
    with limited_size(0):
        nn.LazyLinear(5)
        nn.Linear(10**6, 10**6, device="meta")
        nn.Linear(2, 2, bias=False, device="meta").register_parameter("bias", None)


def test_the_free_memory_is_a_sensible_number() -> None:
    assert 1 << 20 < free_memory() < 1 << 50
