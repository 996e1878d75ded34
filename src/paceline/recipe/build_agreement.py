"""What each process of a run reads by itself, and all must have read alike: the recipe, the data and the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.checkpoint.weights import FoundWeights, find_weights
from paceline.core.agreement import check_same, read_together
from paceline.core.errors import DataError, UsageError
from paceline.data.fingerprint import DataFingerprint, differences, fingerprint
from paceline.data.split_loader import SplitLoader
from paceline.recipe.build_context import BuildContext

_CHANGED = "it changed while the processes started; start them again"


def check_recipe(context: BuildContext) -> None:
    """Refuse processes that have read different recipes."""
    own = context.checked.resolved()

    def explain(first: Any) -> str:
        key, theirs, ours = _first_difference("", first, own)
        return f"{context.checked.locate(key)}: found {ours!r}, and process 0 {theirs!r}: {_CHANGED}"

    check_same(context.world, own, explain, UsageError)


def check_sources(context: BuildContext, sources: Mapping[str, SplitLoader]) -> None:
    """Refuse processes that have found different samples, by name and in their order."""
    if context.world.size == 1:
        return
    own = {split: fingerprint(source.dataset, with_sizes=False) for split, source in sources.items()}

    def explain(first: Any) -> str:
        found = differences({split: DataFingerprint.from_json(each) for split, each in first.items()}, own)
        return f"{context.checked.locate('data')}: differs from what process 0 found: {'; '.join(found)}: {_CHANGED}"

    check_same(context.world, {split: each.to_json() for split, each in own.items()}, explain, DataError)


def read_weights_together(
    context: BuildContext, locate: Callable[[], Path | str], key: str | None = None
) -> FoundWeights:
    """Weights of any origin, see `find_weights`; of a run, those of the checkpoint that the first process finds there.

    `locate` gives the file, the run or the name; it is asked again if that has led to what is gone.
    """
    found = read_together(
        context.world,
        lambda: find_weights(locate(), key),
        lambda chosen: find_weights(chosen if chosen.is_dir() else locate(), key),
    )
    assert found is not None
    return found


def _first_difference(key: str, first: Any, own: Any) -> tuple[str, Any, Any]:
    """The key at which two trees differ, and what they have there."""
    if isinstance(first, dict) and isinstance(own, dict):
        for name in [*first, *own]:
            if first.get(name) != own.get(name):
                return _first_difference(f"{key}.{name}" if key else name, first.get(name), own.get(name))
    return key, first, own
