"""Predicted memory beside that of real steps: a few of the combinations that `python -m benchmarks plan` measures."""

from pathlib import Path

import pytest
import torch

from paceline.commands.measure_row import measure_steps
from paceline.core.world import World
from paceline.data import synthetic
from paceline.plan.grid import Grid, plan_rows
from paceline.plan.rows import Row
from paceline.plan.surrogate import Shape
from paceline.recipe.load import load
from paceline.recipe.validate import validate

ALONE = World(0, 1, 0, torch.device("cpu"))
SHAPE = Shape(64, 64, 10)
CASES = {
    "minet_multiscale": [
        "data.train.transforms.0.size=[64,64]",
        "data.train.transforms.4.sizes=[32,64]",
        "data.batch_size=2",
    ],
    "mae_vit_base": [
        "model.encoder_args={img_size: 32, patch_size: 8, embed_dim: 96, depth: 2, num_heads: 3}",
        "model.decoder_depth=1",
        "model.decoder_dim=48",
        "model.decoder_heads=3",
        "data.train.transforms.0.size=32",
        "data.train.transforms.3.num_patches=16",
        "data.val.transforms.3.num_patches=16",
        "data.batch_size=16",
        "train.micro_batch_size=8",
        "train.precision=fp32",
    ],
    "fcn_resnet50": [
        "model={name: torchvision/segmentation/lraspp_mobilenet_v3_large}",
        "task.aux_weight=0",
        "data.train.transforms.2.size=64",
        "data.batch_size=2",
        "train.sync_bn=false",
        "optimizer.param_groups=[]",
    ],
    "ssd300_pet": [
        "model={name: fcos, backbone: timm/resnet10t, width: 32}",
        "data.train.transforms.3.size=[64,64]",
        "data.batch_size=2",
    ],
    "video_sample": ["train.precision=bf16", "data.batch_size=2"],
}


_NO_EVALUATION = ["data.val=null", "data.test=null"]


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_within_8_percent_of_a_real_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "video_sample":
        monkeypatch.chdir(tmp_path)
        Path("video_sample").mkdir()
        synthetic.write_video(Path("video_sample"), 4, 0)
    fixed = [*CASES[name], "train.threads=1", "model.weights=null", *(_NO_EVALUATION if name != "video_sample" else [])]
    (row,) = plan_rows(Grid(name, fixed, shape=SHAPE), [{"procs": "1"}])
    assert isinstance(row, Row)
    found = measure_steps(
        validate(load(name, fixed)), ALONE, SHAPE, row.micro_batch_size, row.num_micro_batches, 1, False
    )
    assert row.step.memory.total == pytest.approx(found.tensor_bytes, rel=0.08)
    assert found.step_seconds > 0


_PHASES = [
    "model.widths=[32,64]",
    "model.freeze=[all_but_head]",
    "data.batch_size=16",
    "train={steps: 9, epochs: null, threads: 1, channels_last: false}",
    "schedule={warmup: none, warmup_epochs: null}",
    "evaluate.batch_size=1",
]


@pytest.mark.parametrize(
    "changes",
    [
        ["optimizer={name: sgd, lr: 0.1, momentum: 0.9}"],
        ["optimizer={name: adamw, lr: 0.001}", "train.precision=bf16"],
        ["optimizer={name: adamw, lr: 0.001}", "train.activation_checkpointing=blocks", "train.averaging=ema"],
    ],
    ids=["sgd", "adamw bf16", "adamw checkpointing ema"],
)
def test_every_phase_is_planned_and_measured(changes: list[str]) -> None:
    """Frozen, unfrozen in two stages, and evaluation: the largest is what real ones take, and it has a name."""
    stages = "model.unfreeze=[{match: ['*.1.*'], at_steps: 3}, {match: ['*'], at_steps: 5}]"
    for evaluated, more in ((False, []), (True, ["evaluate.batch_size=512"])):
        fixed = [*_PHASES, stages, *changes, *more]
        grid = Grid("quickstart", fixed)
        (row,) = plan_rows(grid, [{"procs": "1"}])
        assert isinstance(row, Row)
        assert [phase.name.partition(",")[0] for phase in row.training] == [
            "from the start",
            "from step 3",
            "from step 5",
        ]
        sizes = [phase.memory.total for phase in row.training]
        assert sizes == sorted(sizes)
        assert sizes[0] < sizes[1] < sizes[2]
        assert row.phase is (row.evaluations[0] if evaluated else row.training[2])
        found = measure_steps(validate(load("quickstart", fixed)), ALONE, SHAPE, 16, 1, steps=1, evaluates=evaluated)
        assert row.memory.total == pytest.approx(found.tensor_bytes, rel=0.08)
