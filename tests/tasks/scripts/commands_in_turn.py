"""One of several processes: does commands one after the other, all in one group that the first of them joins."""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

from paceline import cli
from paceline.core.world import World


def main(commands: Path) -> int:
    """The first exit code that is not 0.

    `commands` is a file that lists of each command its words and a folder for what it prints, `printed-RANK`.
    """
    # A group that was left cannot be joined again; the next command finds itself in it.
    with patch.object(World, "leave"):
        for words, folder in json.loads(commands.read_text(encoding="utf-8")):
            printed = Path(folder) / f"printed-{os.environ['RANK']}"
            with printed.open("w", encoding="utf-8") as file, redirect_stdout(file):
                code = cli.main(words)
            if code:
                return code
    return 0


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stderr.flush()
    os._exit(code)  # threads of gloo may still let go of tensors while the interpreter is taken down
