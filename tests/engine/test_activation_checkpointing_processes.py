"""Checkpointing under DDP and FSDP2, on two processes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "scripts" / "remat_processes.py"


def test_training_is_the_same_to_the_bit_under_every_strategy(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), str(tmp_path)]
    started = [subprocess.Popen(command, env={**shared, "RANK": str(rank)}) for rank in range(2)]
    try:
        assert [each.wait(timeout=90) for each in started] == [0, 0]
    finally:
        for each in started:
            each.kill()
            each.wait()
    for rank in range(2):
        differing = json.loads((tmp_path / f"rank-{rank}.json").read_text(encoding="utf-8"))
        assert len(differing) == 12
        assert {case: names for case, names in differing.items() if names} == {}
