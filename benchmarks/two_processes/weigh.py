"""What each of two processes holds with the strategy that is named: the bytes of the one that holds more, as JSON.

Started as `weigh.py RECIPE STRATEGY`, it has our launcher start it again in two processes.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import paceline
from paceline.launch.environment import take_place
from paceline.launch.launcher import launch
from paceline.launch.machines import Launch

_STEPS = 3


class Watched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes of floating-point storages that were alive at once, also where a storage changes its size."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._storages: weakref.WeakSet[UntypedStorage] = weakref.WeakSet(storages(tensors))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        self.notice(each for each in tree_leaves(outputs) if isinstance(each, Tensor))
        return outputs

    def notice(self, tensors: Iterable[Tensor]) -> None:
        """Watch what these lie in too."""
        self._storages.update(storages(tensors))
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self._storages))


def storages(tensors: Iterable[Tensor]) -> set[UntypedStorage]:
    """Where the numbers of floating-point tensors lie in this process."""
    parts = (each.to_local() if isinstance(each, DTensor) else each for each in tensors)
    return {each.untyped_storage() for each in parts if each.is_floating_point()}


def size(tensors: Iterable[Tensor]) -> int:
    """Their bytes, with storages that several share counted once."""
    return sum(storage.nbytes() for storage in storages(tensors))


def weigh(recipe: str, strategy: str) -> dict[str, int]:
    """Bytes of parameters and optimizer state, of all that is alive between steps, and at the peak of a step."""
    run = paceline.build(recipe, {"train.strategy": strategy}, out=tempfile.gettempdir())
    run.model.train()
    updates = iter(run.batches)
    for _ in range(_STEPS):
        paceline.train_step(run, next(updates))
    gc.collect()
    held = [*run.model.parameters(), *(value for state in run.optimizer.state.values() for value in state.values())]
    alive = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    watched = Watched(alive)
    for parameter in run.model.parameters():
        # Replicas get their gradients out of buffers that Python has not seen.
        parameter.register_post_accumulate_grad_hook(lambda each: watched.notice([each.grad]))  # type: ignore[no-untyped-call]
    metrics = [size(held), size(alive)]
    del alive
    with watched:
        paceline.train_step(run, next(updates))
    most = torch.stack(run.world.gather(torch.tensor([[*metrics, watched.peak]]))).amax(0)[0].tolist()
    run.world.barrier()
    run.world.leave()
    return dict(zip(("held", "at_rest", "peak"), most, strict=True))


def main() -> int:
    """Launch, or weigh."""
    if take_place() is None:
        return launch([sys.executable, str(Path(__file__)), *sys.argv[1:]], Launch(processes=2, restarts=0))
    print(json.dumps(weigh(*sys.argv[1:])), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
