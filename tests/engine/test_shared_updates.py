"""However processes share a step, it is the same step: in real processes."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.forkserver import script_ranks

SCRIPT = Path(__file__).parent / "scripts" / "shared_updates.py"


@pytest.fixture(scope="module", params=[2, 3])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two, then of three processes found."""
    world, out = request.param, tmp_path_factory.mktemp("shared")
    done = script_ranks(world, SCRIPT, out, OMP_NUM_THREADS="1")
    assert [each.returncode for each in done] == [0] * world, done[0].stderr
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(world)]


def test_gradients_norms_losses_and_weights_are_those_of_one_process(found: list[dict[str, Any]]) -> None:
    cases = {name: max(each["cases"][name] for each in found) for name in found[0]["cases"]}
    assert len(cases) == 7 * 4 * 2 + 1
    assert {name: value for name, value in cases.items() if not value < 1e-9} == {}


def test_processes_share_the_samples_of_every_update(found: list[dict[str, Any]]) -> None:
    world = len(found)
    for epoch in range(2):
        seen = []
        for step in range(3):
            of_step = [each["ids"][3 * epoch + step] for each in found]
            assert sum(map(len, of_step)) == [17, 17, 16][step]
            assert all(of_step[rank] for rank in range(world))
            seen += [number for ids in of_step for number in ids]
        assert sorted(seen) == list(range(50))


def test_what_a_loss_remembers_is_that_of_the_first_process(found: list[dict[str, Any]]) -> None:
    for strategy, first in found[0]["remembered"].items():
        seen = first["first" if "deterministic" in strategy else "own"]
        assert 0 < len(seen) == len(set(seen))
        assert first["seen"] == [int(sample in seen) for sample in range(50)], strategy
        for other in found[1:]:
            assert other["remembered"][strategy]["heat"] == first["heat"], strategy
            assert other["remembered"][strategy]["seen"] == first["seen"], strategy


def test_on_any_number_of_processes_it_is_the_same_with_world(found: list[dict[str, Any]]) -> None:
    alone, shared = (found[0]["remembered"][name] for name in ("deterministic, alone", "deterministic"))
    assert (shared["heat"], shared["seen"]) == (alone["heat"], alone["seen"])
