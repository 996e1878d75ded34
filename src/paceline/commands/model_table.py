"""What a model is made of and what a forward pass costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

if TYPE_CHECKING:
    from paceline.engine.run import Run


def model_table(run: Run) -> tuple[list[dict[str, Any]], int]:
    """Parameters and FLOPs of the model and of its parts down to the second level, for one sample; and all FLOPs."""
    counter = FlopCounterMode(display=False, depth=2)
    batch = run.source.finish(run.source.fetch(0, np.arange(1)), 0, run.world.device)
    run.model.eval()
    with torch.inference_mode(), counter:
        run.task.predict(run.model, batch)
    counts = {name: sum(by_kind.values()) for name, by_kind in counter.get_flop_counts().items()}
    root = type(run.model).__name__
    rows = []
    for name, module in run.model.named_modules():
        if name.count(".") <= 1:
            parameters = sum(parameter.numel() for parameter in module.parameters())
            flops = counts.get(f"{root}.{name}" if name else "Global", 0)
            rows.append({"name": name, "type": type(module).__name__, "parameters": parameters, "flops": flops})
    return rows, counter.get_total_flops()
