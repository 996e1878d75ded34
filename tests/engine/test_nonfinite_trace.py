"""Finding what is not finite runs every forward pass: other ranks may be waiting in the same one."""

import torch
from torch import Tensor, nn

from paceline.data.batch import Batch
from paceline.data.loader import MicroBatch
from paceline.engine.replay import find_nonfinite
from paceline.losses.loss_term import LossTerm


def test_an_input_that_is_not_finite_is_named_and_forwarded_all_the_same() -> None:
    model = nn.Linear(2, 1)
    images = torch.tensor([[0.0, 1.0], [float("nan"), 0.0]])
    micro = MicroBatch(0, 0, 0, Batch(image=images, id=torch.tensor([7, 9])))
    passes: list[Tensor] = []

    def forward(each: MicroBatch) -> dict[str, LossTerm]:
        passes.append(model(each.batch["image"]))
        return {"loss": LossTerm(passes[-1].sum(), 2.0)}

    found = find_nonfinite(model, [micro, micro], forward)
    assert "image of sample 9" in found
    assert len(passes) == 2
