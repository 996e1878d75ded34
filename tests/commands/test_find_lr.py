"""The rule of `paceline find-lr`, on curves whose best learning rate is known."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.commands.find_lr import smooth, suggest
from paceline.core.errors import TrainingError

STEPS = 100
RATES = [1e-6 * 1e7 ** (step / (STEPS - 1)) for step in range(STEPS)]


def curve(middle: float, too_high: float, noise: float = 0.0, seed: int = 0) -> list[float]:
    """A loss that falls from 2.5 to 1.5 around one learning rate and grows without bounds from another on."""
    generator = random.Random(seed)
    falls = [1 / (1 + math.exp(-1.5 * math.log(rate / middle))) for rate in RATES]
    grows = [(rate / too_high) ** 2 for rate in RATES]
    return [2.5 - fall + min(grow, 50.0) + generator.gauss(0, noise) for fall, grow in zip(falls, grows, strict=True)]


def within(factor: float, found: float, expected: float) -> bool:
    return 1 / factor <= found / expected <= factor


@pytest.mark.parametrize(("middle", "too_high"), [(1e-4, 1e-2), (1e-3, 0.3), (1e-2, 1.0), (0.1, 3.0)])
def test_the_suggestion_lies_between_the_fall_and_a_tenth_of_the_lowest_point(middle: float, too_high: float) -> None:
    """The average lags behind by a tenth of the steps, here a factor of 5."""
    losses = curve(middle, too_high)
    lowest = RATES[losses.index(min(losses))]
    assert within(5.5, suggest(RATES, losses, STEPS), math.sqrt(middle * lowest / 10))


@pytest.mark.parametrize("seed", range(30))
def test_noise_of_single_batches_has_no_say(seed: int) -> None:
    """Also in the first steps, where an average of few losses moves the most."""
    clean, noisy = curve(1e-2, 1.0), curve(1e-2, 1.0, noise=0.1, seed=seed)
    assert within(2.5, suggest(RATES, noisy, STEPS), suggest(RATES, clean, STEPS))


def test_what_comes_behind_the_lowest_point_does_not_count() -> None:
    losses = curve(1e-2, 1.0)
    place = losses.index(min(losses)) + 25
    cut = suggest(RATES[:place], losses[:place], STEPS)
    assert cut == pytest.approx(suggest(RATES, losses, STEPS))


def test_a_loss_that_does_not_fall_has_no_suggestion() -> None:
    generator = random.Random(0)
    with pytest.raises(TrainingError, match="did not fall"):
        suggest(RATES, [2.5 + generator.gauss(0, 0.1) for _ in RATES], STEPS)


@pytest.mark.parametrize("losses", [[1.0] * 7, [3.0, 1.0], [2.0]])
def test_the_average_has_no_bias_to_its_start(losses: Sequence[float]) -> None:
    weights = [0.9 ** (len(losses) - 1 - place) for place in range(len(losses))]
    expected = sum(weight * loss for weight, loss in zip(weights, losses, strict=True)) / sum(weights)
    assert smooth(losses, STEPS)[-1] == pytest.approx(expected)


def test_the_cost_is_reported_and_the_budget_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["find-lr", "quickstart", "model.widths=[8]", "train.threads=1", "data.batch_size=32"]
    assert main([*words, "--steps", "60", "--json"]) == 0
    captured = capsys.readouterr()
    assert "60 steps" in captured.err
    assert "1,920 samples" in captured.err
    found = json.loads(captured.out)
    assert len(found["lr"]) <= 60
    assert 1e-3 < found["suggested"] < 1
    assert list(tmp_path.iterdir()) == []
    assert main([*words, "--steps", "5"]) == 2
    assert "--steps" in capsys.readouterr().err
