import pytest
import torch
from torch import Tensor

from paceline.models.detector import Target, select_detections
from paceline.models.fcos import FCOS, Cells, assign


def target(*objects: tuple[int, list[float]]) -> Target:
    boxes = torch.tensor([box for _, box in objects]).reshape(-1, 4)
    return {"boxes": boxes, "labels": torch.tensor([label for label, _ in objects], dtype=torch.int64)}


def grid(stride: int, rows: int, columns: int) -> Cells:
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    centers = (torch.stack([x, y], -1).flatten(0, 1) + 0.5) * stride
    reach = torch.tensor([[0.0, torch.inf]]).expand(rows * columns, 2)
    return Cells(centers, torch.full((rows * columns,), float(stride)), reach)


def test_cells_near_the_middle_of_a_box_are_assigned_to_it() -> None:
    found = assign(grid(8, 6, 6), target((2, [8, 8, 40, 24])), center_radius=1.0)
    # The middle is (24, 16); cells less than 8 pixels away lie at x 20 and 28, y 12 and 20.
    assert (found.classes.view(6, 6) >= 0).nonzero().tolist() == [[1, 2], [1, 3], [2, 2], [2, 3]]
    cell = 1 * 6 + 2
    assert found.classes[cell] == 2
    assert found.distances[cell].tolist() == [12, 4, 20, 12]
    assert found.centerness[cell].item() == pytest.approx((12 / 20 * 4 / 12) ** 0.5)


def test_a_cell_in_two_boxes_is_assigned_to_the_smaller() -> None:
    found = assign(grid(8, 6, 6), target((0, [0, 0, 48, 48]), (1, [16, 16, 32, 32])), center_radius=1.5)
    assert found.classes.view(6, 6)[2:4, 2:4].eq(1).all()


def test_an_image_without_objects_is_background() -> None:
    assert assign(grid(8, 4, 4), target(), 1.5).classes.tolist() == [-1] * 16


@pytest.fixture(scope="module")
def model() -> FCOS:
    torch.manual_seed(0)
    return FCOS(3, backbone="timm/lcnet_035", width=16, depth=1)


TARGETS = [
    target((0, [4, 6, 40, 50]), (2, [30, 20, 90, 60])),
    target(),
    target((1, [0, 0, 96, 64])),
]


def test_losses_of_a_batch_are_the_sums_of_its_parts(model: FCOS) -> None:
    """In evaluation mode, where samples do not share the statistics of BatchNorm."""
    images = torch.randn(3, 3, 64, 96, generator=torch.Generator().manual_seed(1)).double()
    double = model.double().eval()
    whole = double(images, TARGETS)
    assert isinstance(whole, dict)
    for name in double.loss_names:
        parts = [double(images[i : i + 1], TARGETS[i : i + 1])[name] for i in range(3)]
        for place in (0, 1):
            assert whole[name][place].item() == pytest.approx(sum(part[place].item() for part in parts), rel=1e-6)


def test_counts_are_known_before_the_forward_pass(model: FCOS) -> None:
    images = torch.randn(3, 3, 70, 100)
    losses = model.float().eval()(images, TARGETS)
    assert isinstance(losses, dict)
    counts = model.count(images, TARGETS)
    assert counts["classification"] > 0
    assert counts == pytest.approx({name: count.item() for name, (_, count) in losses.items()})


def test_images_without_objects_have_finite_losses_and_gradients(model: FCOS) -> None:
    losses = model.float().train()(torch.randn(2, 3, 64, 64), [target(), target()])
    assert isinstance(losses, dict)
    sum((total for total, _ in losses.values()), torch.zeros(())).backward()
    gradients = [parameter.grad for parameter in model.class_head.parameters()]
    assert all(each is not None and each.isfinite().all() for each in gradients)


def perfect(boxes: Tensor, scores: Tensor) -> list[list[float]]:
    found = select_detections(boxes, scores, 0.05, 0.5, 10)
    return [[*box, score, label] for box, score, label in zip(*(each.tolist() for each in found), strict=True)]


def test_detections_are_the_best_of_overlapping_boxes_of_a_class() -> None:
    boxes = torch.tensor([[0.0, 0, 10, 10], [1, 0, 11, 10], [50, 50, 60, 60]])
    scores = torch.tensor([[0.75, 0.0], [0.5, 0.25], [0.0, 0.03125]])
    assert perfect(boxes, scores) == [[0, 0, 10, 10, 0.75, 0], [1, 0, 11, 10, 0.25, 1]]


def test_nothing_above_the_threshold_is_no_detection() -> None:
    assert perfect(torch.rand(5, 4), torch.zeros(5, 3)) == []
