"""What is rehearsed: recipes and settings, and the data they read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from planted_faults import KINDS, PLACES

from paceline.recipe.load import shipped_recipes

Case = dict[str, Any]
"""A "name", a "recipe" with "overrides", the number of "processes", "faults" that are planted, how many "steps", and
the first of them that must not wait for the device."""

_MAE = """
name: mae
task: masked_autoencoder
model:
  name: masked_autoencoder
  encoder: timm/vit_tiny_patch16_224
  encoder_args: {img_size: 28, patch_size: 7, embed_dim: 48, depth: 2, num_heads: 3}
  decoder_dim: 48
  decoder_depth: 1
  decoder_heads: 3
data:
  batch_size: 16
  train:
    dataset: fashion_small
    split: train
    transforms: &transforms
      - {name: random_horizontal_flip}
      - {name: random_crop, size: 28, padding: 2}
      - {name: normalize, mean: [0.286], std: [0.353]}
      - {name: random_masking, num_patches: 16}
  val: {dataset: fashion_small, split: test, transforms: *transforms}
losses: [masked_mse]
optimizer: {name: adamw, lr: 0.001, betas: [0.9, 0.95], param_groups: [{preset: no_decay_1d}]}
evaluate: {batch_size: 500}
"""

_NORMALIZE = "{name: normalize, mean: [0.5, 0.5, 0.5], std: [0.2, 0.2, 0.2]}"


def write_data(folder: Path) -> None:
    """The data sets and recipes that the cases name, into a folder."""
    from paceline.data import synthetic

    (folder / "mae.yaml").write_text(_MAE)
    for task, write, number in (
        ("classification", synthetic.write_classification, 32),
        ("saliency", synthetic.write_saliency, 12),
        ("segmentation", synthetic.write_segmentation, 12),
        ("detection", synthetic.write_detection, 12),
        ("video", synthetic.write_video, 12),
        ("keypoints", synthetic.write_keypoints, 12),
    ):
        (folder / f"{task}_sample").mkdir()
        write(folder / f"{task}_sample", number, 0)


def _case(
    name: str, recipe: str, *overrides: str, processes: int = 1, faults: tuple[str, ...] = (), may_wait: bool = False
) -> Case:
    settled = 2 if "train.strategy=ddp" in overrides else 0
    return {
        "name": name, "recipe": recipe, "overrides": overrides, "processes": processes, "faults": faults,
        "steps": settled + 2, "first_strict": settled + 2 if may_wait else settled,
    }  # fmt: skip


_SMALL = "model.widths=[8,16]"

_HYBRID = (
    "{d_model: 32, encoder_hidden_dim: 32, encoder_in_channels: [16, 16, 16], decoder_in_channels: [32, 32, 32],"
    " decoder_layers: 2, num_queries: 12, num_denoising: 10, decoder_attention_heads: 4, max_num_bins: 8}"
)
_STAGES = (
    "{stem_channels: [3, 8, 8], stage_in_channels: [8, 16, 16, 16], stage_mid_channels: [8, 8, 8, 8],"
    " stage_out_channels: [16, 16, 16, 16], stage_num_blocks: [1, 1, 1, 1], hidden_sizes: [16, 16, 16, 16]}"
)
_WINDOWED = "d_model: 32, num_queries: 6, group_detr: 2, decoder_cross_attention_heads: 4"
_VIT = "{hidden_size: 24, num_hidden_layers: 2, num_attention_heads: 2, num_windows: 4, out_indices: [1, 2]"
_SQUARE = (
    f"data.train.transforms=[{{name: resize, size: [128, 128]}}, {_NORMALIZE}]",
    f"data.val.transforms=[{{name: resize, size: [128, 128]}}, {_NORMALIZE}]",
)
_TRANSFORMERS = {
    "rt_detr_v2": ("train.precision=bf16",),
    "d_fine": ("model.name=transformers/d_fine", f"model.args={_HYBRID}", f"model.backbone_args={_STAGES}"),
    "lw_detr": (
        "model.name=transformers/lw_detr", f"model.args={{{_WINDOWED}, projector_scale_factors: [1.0]}}",
        f"model.backbone_args={_VIT}, image_size: 128, pretrain_image_size: 128, window_block_indices: [0]}}", *_SQUARE,
    ),
    "rf_detr": (
        "model.name=transformers/rf_detr", f"model.args={{{_WINDOWED}}}",
        f"model.backbone_args={_VIT}, image_size: 128, patch_size: 8}}", *_SQUARE,
    ),
}  # fmt: skip

TASKS = [
    _case("classification", "classification_sample", _SMALL),
    _case("in memory", "quickstart", _SMALL, "data.batch_size=8"),
    _case("video", "video_sample"),
    _case("saliency", "saliency_sample"),
    _case("segmentation", "segmentation_sample"),
    _case("detection", "detection_sample"),
    *(_case(f"detection, transformers/{name}", "rtdetr_sample", *more) for name, more in _TRANSFORMERS.items()),
    _case("keypoints", "keypoints_sample"),
    _case("masked_autoencoder", "mae.yaml"),
]

TRANSFORMS = [
    _case(
        "mixup, cutmix, erasing", "classification_sample", _SMALL, "train.micro_batch_size=4",
        "data.train.transforms=[{name: random_crop, size: 64, padding: 4}, {name: random_erasing, value: 3.0},"
        f" {_NORMALIZE}, mixup_or_cutmix]",
        "losses=[{name: cross_entropy, class_weights: [1.0, 2.0, 3.0]}]",
    ),
    _case(
        "class weights", "classification_sample", _SMALL,
        "losses=[{name: cross_entropy, class_weights: [1.0, 2.0, 3.0]}]",
    ),
    *(
        _case(
            f"{task}, multi_scale", f"{task}_sample", "train.micro_batch_size=4",
            f"data.train.transforms=[{first}, {{name: random_horizontal_flip}}, {{name: multi_scale, sizes: [64, 96]}},"
            f" {_NORMALIZE}]",
        )
        for task, first in {
            "segmentation": "{name: resize, size: [80, 80]}",
            "detection": "{name: resize, size: [80, 80]}",
            "keypoints": "{name: pose_crop, size: [64, 64]}",
        }.items()
    ),
    _case(
        "segmentation, losses", "segmentation_sample", "train.micro_batch_size=4",
        "losses=[{name: pixel_cross_entropy, class_weights: [1.0, 2.0, 3.0, 4.0]}, ohem_cross_entropy,"
        " {name: iou_loss, per_image: true}]",
    ),
]  # fmt: skip

_TRAIN_ONLY = "data.val=null"
SETTINGS = [
    *(
        _case(f"segmentation, {precision}", "segmentation_sample", f"train.precision={precision}",
              "train.averaging=ema", "train.clip_grad_norm=1", *more)
        for precision, *more in (("bf16", _TRAIN_ONLY), ("fp16", _TRAIN_ONLY), ("O2",))
    ),
    _case("detection, O2", "detection_sample", "train.precision=O2", _TRAIN_ONLY),
    _case("fixed loss scale", "classification_sample", _SMALL, "train.precision=fp16", "train.loss_scale=128"),
    _case("tf32", "classification_sample", _SMALL, "train.precision=tf32", _TRAIN_ONLY),
    _case("skip", "classification_sample", _SMALL, "train.on_nonfinite=skip", "train.clip_grad_value=1", _TRAIN_ONLY),
    _case("adaptive clip", "classification_sample", _SMALL, "train.adaptive_clip=0.01", "optimizer=sgd", _TRAIN_ONLY),
    _case("swa", "classification_sample", _SMALL, "train.averaging={name: swa, start: 1, every_steps: 1}"),
    _case("activation checkpointing", "saliency_sample", "train.activation_checkpointing=blocks", _TRAIN_ONLY),
    _case("activation checkpointing of a ViT", "mae.yaml", "train.activation_checkpointing=blocks",
          "train.precision=bf16", _TRAIN_ONLY),
    _case("world", "classification_sample", _SMALL, "train.reproducible=world", _TRAIN_ONLY),
    _case("lamb", "mae.yaml", "optimizer=timm/lamb", "train.precision=bf16", _TRAIN_ONLY, may_wait=True),
]  # fmt: skip

PROCESSES = [
    *(
        _case(f"{strategy} on {number}", "mae.yaml", f"train.strategy={strategy}", *more, processes=number)
        for strategy in ("ddp", "fsdp", "zero")
        for number, more in {
            2: ("train.averaging=ema", "train.clip_grad_norm=1"),
            8: ("train.precision=bf16", "train.activation_checkpointing=blocks", _TRAIN_ONLY),
        }.items()
    ),
    *(
        _case(f"{strategy}, {precision}", "segmentation_sample", f"train.strategy={strategy}",
              f"train.precision={precision}", _TRAIN_ONLY, processes=2)
        for strategy, precision in (("ddp", "O2"), ("fsdp", "fp16"), ("zero", "fp16"))
    ),
    _case("world on 2", "classification_sample", _SMALL, "train.reproducible=world", "train.micro_batch_size=4",
          processes=2),
]  # fmt: skip

FAULTS = [
    _case(f"{place}: {kind}", "classification_sample", _SMALL, "train.averaging=ema", faults=(f"{place}: {kind}",))
    for place in PLACES
    for kind in KINDS
]

# Mask R-CNN selects proposals by value, so it waits for the device; torchvision's flips of samples do not take the
# tensors of a rehearsal.
_LEFT_OUT = ("bccd", "fruits_nuts")
SHIPPED = [
    {"name": f"recipe {name}", "recipe": name, "steps": 1}
    for name in sorted(shipped_recipes())
    # Samples are trained above; torchvision's R-CNNs and RetinaNet read values in each step (docs/gpu.md).
    if not name.endswith(("_sample", "rcnn_resnet50_fpn", "retinanet_resnet50_fpn")) and name not in _LEFT_OUT
]
