"""`optimizer.step()` without its range in a profile."""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch.autograd import profiler
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


def step_optimizer(optimizer: Optimizer) -> None:
    """Step, with all hooks. The profiler range around torch's own takes as long as the update of a small model."""
    wrapper = type(optimizer).step
    # torch marks what it has wrapped; a user's optimizer may be of another kind, or have a `step` set on it, as
    # torch's schedulers do.
    if profiler._is_profiler_enabled or not getattr(wrapper, "hooked", False) or "step" in vars(optimizer):
        optimizer.step()
        return
    args: Any = (optimizer,)
    kwargs: Any = {}
    for before in chain(_global_optimizer_pre_hooks.values(), optimizer._optimizer_step_pre_hooks.values()):
        args, kwargs = before(optimizer, args, kwargs) or (args, kwargs)
    wrapper.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]
    for after in chain(optimizer._optimizer_step_post_hooks.values(), _global_optimizer_post_hooks.values()):
        after(optimizer, args, kwargs)
