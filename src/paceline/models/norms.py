"""Which modules are norm layers."""

from __future__ import annotations

import re

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

NORM_TYPES = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Torch's own; what derives from one is a norm layer whatever it is called."""

# Those that derive from none of torch's: RmsNorm2d, FrozenBatchNorm2d, LayerNormAct, EvoNorm2dS0, SimpleNormFp32 …
_NAME = re.compile(r"Norm(?:\d+d?|Act|Tlu|Fp32|[BS]\d[a-z]?)*$", re.IGNORECASE)


def is_norm(module: nn.Module) -> bool:
    """Whether the module is a norm layer: by its type, else by the name of its type if it has tensors of its own."""
    if isinstance(module, NORM_TYPES):
        return True
    return bool(_NAME.search(type(module).__name__)) and bool(module._parameters or module._buffers)
