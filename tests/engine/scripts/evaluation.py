"""One of several processes: evaluates splits of several sizes. Argument: a folder for the metrics."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from evaluated_splits import measure_all

from paceline.core.world import join


def main() -> None:
    folder = Path(sys.argv[1])
    world = join("cpu")
    try:
        found = measure_all(world, folder)
        (folder / f"rank-{world.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    finally:
        world.leave()


if __name__ == "__main__":
    main()
    # Threads of gloo may still let go of tensors while the interpreter is taken down, which aborts the process.
    os._exit(0)
