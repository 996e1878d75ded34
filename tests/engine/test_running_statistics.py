"""BatchNorm's running statistics under `reproducible: world` are those of micro-batches taken one after another."""

from pathlib import Path

import pytest
import torch
from small_runs import ALONE, NUM_CLASSES, Net, Small, one_thread  # noqa: F401
from torch import nn

from paceline.engine.step import train_step
from paceline.engine.strategies.deterministic import DeterministicStrategy
from paceline.engine.strategies.single import SingleStrategy

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("momentum", [0.0, 1e-3, 0.1, 1.0, None])
def test_statistics_are_those_of_a_single_process(momentum: float | None, tmp_path: Path) -> None:
    found = []
    for is_deterministic in (False, True):
        torch.manual_seed(1)
        norm = nn.BatchNorm2d(5, momentum=momentum)
        model = Net(nn.Conv2d(2, 5, 3), norm, nn.Tanh(), nn.Flatten(), nn.Linear(80, NUM_CLASSES)).double()
        strategy = DeterministicStrategy(model, ALONE) if is_deterministic else SingleStrategy(model)
        small = Small(tmp_path, size=48, batch=16, micro_batch_size=4, steps=3, lr=0.0)
        run = small.run(model=model, strategy=strategy)
        for step_batch in run.batches:
            train_step(run, step_batch)
        found.append(dict(norm.named_buffers()))
    for name, buffer in found[0].items():
        torch.testing.assert_close(found[1][name], buffer, rtol=1e-12, atol=1e-12)
    assert int(found[0]["num_batches_tracked"]) == 12
    if momentum == 0:
        assert torch.equal(found[1]["running_mean"], torch.zeros(5, dtype=torch.float64))
