"""A save that ends or fails at any operation on the file system leaves a whole checkpoint, and others' files alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("interrupted.py")


def test_every_operation_may_be_the_last(tmp_path: Path) -> None:
    cases = ["background,torn", "background,full", "shared,torn", "shared,full"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), str(tmp_path), *cases]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = dict(line.split() for line in done.stdout.splitlines())
    assert list(numbers) == cases
    assert min(map(int, numbers.values())) > 20
