"""Checkpointing under DDP and FSDP2, on two processes."""

import json
from pathlib import Path

from support.forkserver import script_ranks

SCRIPT = Path(__file__).parent / "scripts" / "checkpointing_processes.py"


def test_training_is_the_same_to_the_bit_under_every_strategy(tmp_path: Path) -> None:
    done = script_ranks(2, SCRIPT, tmp_path)
    assert [each.returncode for each in done] == [0, 0], done[0].stderr
    for rank in range(2):
        differing = json.loads((tmp_path / f"rank-{rank}.json").read_text(encoding="utf-8"))
        assert len(differing) == 6
        assert {case: names for case, names in differing.items() if names} == {}
