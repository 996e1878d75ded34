"""Freed memory stays with the process: taking it again costs no new pages."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource
import numpy as np
from paceline.core.process import keep_freed_memory

def faults():
    for _ in range(20):
        np.empty(1 << 22).fill(1.0)  # 32 MB, freed at once
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

start = faults()
before = faults() - start
kept = keep_freed_memory()
faults()
again = faults()
print(int(kept), before, faults() - again)
"""


def test_pieces_are_used_again() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60)
    kept, before, after = map(int, done.stdout.split())
    if not kept:
        pytest.skip("the C library has no mallopt")
    assert before > 100  # a page each, and where the system gives huge ones still sixteen for each piece
    assert after < before / 10
