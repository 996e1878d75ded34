"""SSD's losses on all anchors are those that torchvision computes on the ones it selects."""

import pytest
import torch
from torch import Tensor

from paceline.models.torchvision_detection import TorchvisionDetector, build_detection

SIZE = 320


@pytest.fixture(scope="module")
def detector() -> TorchvisionDetector:
    torch.manual_seed(0)
    return build_detection("ssdlite320_mobilenet_v3_large", num_classes=4, in_channels=3).double().train()


def random_targets(numbers: list[int], seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    targets = []
    for number in numbers:
        corners = torch.rand(number, 2, generator=generator, dtype=torch.float64) * SIZE * 0.7
        sides = torch.rand(number, 2, generator=generator, dtype=torch.float64) * SIZE * 0.3 + 2
        labels = torch.randint(1, 5, (number,), generator=generator)
        targets.append({"boxes": torch.cat([corners, corners + sides], 1), "labels": labels})
    return targets


@pytest.mark.parametrize("numbers", [[1, 3], [0, 5], [40, 1], [0, 0]])
def test_losses_and_gradients_are_those_of_torchvision(numbers: list[int], detector: TorchvisionDetector) -> None:
    images = torch.rand(len(numbers), 3, SIZE, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    targets = random_targets(numbers, seed=sum(numbers))
    if numbers[0] > 30:  # two objects at the same place have the same best anchor
        targets[0]["boxes"][1] = targets[0]["boxes"][0]
    ssd = detector.detector
    expected = type(ssd).forward(ssd, list(images), targets)
    found = ssd(list(images), targets)
    parameters = [each for each in detector.parameters() if each.requires_grad]
    for name in ("bbox_regression", "classification"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-12)
        gradients = [
            torch.autograd.grad(losses[name], parameters, retain_graph=True, materialize_grads=True)
            for losses in (expected, found)
        ]
        wanted, own = (torch.cat([each.flatten() for each in every]) for every in gradients)
        assert (own - wanted).norm() <= 1e-9 * wanted.norm()


def test_boxes_without_area_match_nothing(detector: TorchvisionDetector) -> None:
    images = torch.rand(2, 3, SIZE, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    targets = random_targets([3, 1], seed=0)
    expected = detector.detector(list(images), targets)
    flat = torch.tensor([[10.0, 10, 10, 50], [20, 30, 60, 30]], dtype=torch.float64)
    targets[0]["boxes"] = torch.cat([targets[0]["boxes"], flat])
    targets[0]["labels"] = torch.cat([targets[0]["labels"], torch.tensor([1, 2])])
    found = detector.detector(list(images), targets)
    assert {name: loss.item() for name, loss in found.items()} == {name: loss.item() for name, loss in expected.items()}
