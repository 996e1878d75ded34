"""A user's module: in the step of number DIE_AT the last process kills itself, once, when a checkpoint is there.

DIE_BEHIND is the checkpoint. The file `died` tells that it has happened.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

_SECONDS = 60
_updates = itertools.count(1)


def _die(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The gradient of the step is there, its step is not done; checkpoints are written beside training."""
    number = next(_updates)
    is_last = int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1
    if number != int(os.environ["DIE_AT"]) or not is_last or Path("died").exists():
        return
    deadline = time.monotonic() + _SECONDS
    while not Path(os.environ["DIE_BEHIND"]).is_dir():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {os.environ['DIE_BEHIND']}")
        time.sleep(0.01)
    Path("died").touch()
    os.kill(os.getpid(), signal.SIGKILL)


register_optimizer_step_pre_hook(_die)
