"""A small run of each vision task, on data that `paceline sample` writes, and what a test looks at afterwards."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline import cli
from paceline.core.errors import missing_extra

SCRIPTS = Path(__file__).resolve().parents[1] / "tasks" / "scripts"
KINDS = ["detection", "instance_segmentation", "keypoints", "saliency", "segmentation", "video"]
TASKS = [*KINDS, "masked_autoencoder", *([] if missing_extra("transformers") else ["transformers"])]
PADDED = ["padded_detection", "padded_saliency"]
"""Of these, images differ in size, and steps hold images of similar aspect ratio."""
NUMBER, NUM_VAL = 28, 7  # 21 to learn from: steps of 6, 6, 6 and 3; neither 2 nor 3 processes divide 7
STEPS = 6

_NORMALIZE = {"name": "normalize", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
_RESIZE = {"name": "resize", "size": [64, 64]}
_MULTI_SCALE = {"name": "multi_scale", "sizes": [48, 64, [64, 80]]}
_COMMON: dict[str, Any] = {
    "optimizer": {"name": "adamw", "lr": 0.03, "weight_decay": 0.05},
    "schedule": {"decay": "poly", "power": 0.9, "per": "step"},
    "train": {"steps": STEPS, "micro_batch_size": 2, "device": "cpu", "threads": 1},
    "evaluate": {"every_steps": 4, "batch_size": 2},
    "checkpoint": {"every_steps": 2, "keep_last": 9},
    "logging": {"every_steps": 1, "images": False, "tensorboard": False},
}


def write_sample(kind: str, folder: Path) -> Path:
    """The data of a task, written by the command; a recipe file of that kind beside them."""
    others = {"masked_autoencoder": "classification", "transformers": "detection"}
    drawn = others.get(kind, kind.removeprefix("padded_"))
    assert cli.main(["sample", drawn, str(folder / kind), "--number", str(NUMBER)]) == 0
    recipe = folder / f"{kind}.json"
    recipe.write_text(json.dumps(small_recipe(kind, folder / kind)), encoding="utf-8")
    return recipe


def small_recipe(kind: str, data: Path) -> dict[str, Any]:
    """A recipe that trains on a CPU in a second, with all that is random about such a task."""
    made = _RECIPES[kind](data)
    recipe = {"name": kind, **copy.deepcopy(_COMMON), **made}
    recipe["data"] |= {"batch_size": 6, "num_workers": 0}
    recipe["evaluate"] = {**_COMMON["evaluate"], **made["evaluate"]}
    return recipe


def _detection(data: Path) -> dict[str, Any]:
    split = {"dataset": "coco", "root": str(data)}
    changes = [{"name": "random_iou_crop"}, _RESIZE, {"name": "random_horizontal_flip"}, _MULTI_SCALE, _NORMALIZE]
    return {
        "task": "detection",
        "model": {"name": "fcos", "backbone": "timm/lcnet_035", "width": 16, "depth": 1},
        "data": {
            "train": {**split, "annotations": "train.json", "transforms": changes},
            "val": {**split, "annotations": "val.json", "transforms": [_RESIZE, _NORMALIZE]},
        },
        "evaluate": {"metrics": ["voc_ap"], "save_predictions": True},
    }


def _instance_segmentation(data: Path) -> dict[str, Any]:
    recipe = _detection(data)
    for split in recipe["data"].values():
        split["masks"] = True
    small = {"rpn_post_nms_top_n": 40, "box_batch_size_per_image": 32, "detections_per_img": 20}
    recipe["model"] = {"name": "mask_rcnn", "backbone": "timm/lcnet_035", "width": 16, "box_width": 16, **small}
    return {**recipe, "task": "instance_segmentation"}


def _transformers(data: Path) -> dict[str, Any]:
    made = _detection(data)
    made["data"]["train"]["transforms"][3] = {"name": "multi_scale", "sizes": [64, [64, 96]]}
    widths = {"d_model": 16, "encoder_hidden_dim": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    channels = {"encoder_in_channels": [8, 8, 8], "decoder_in_channels": [16, 16, 16]}
    numbers = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_layers": 2, "num_queries": 8}
    bins = {"num_denoising": 8, "dropout": 0.1, "max_num_bins": 4, "lqe_hidden_dim": 8, "top_prob_values": 2}
    stages = {"stage_in_channels": [8, 8, 8, 8], "stage_mid_channels": [8] * 4, "stage_out_channels": [8] * 4}
    backbone = {"stem_channels": [3, 8, 8], **stages, "stage_num_blocks": [1] * 4, "hidden_sizes": [8] * 4}
    backbone |= {"stage_numb_of_layers": [1] * 4}
    args = {**widths, **channels, **numbers, **bins, "freeze_backbone_batch_norms": False}
    made["model"] = {"name": "transformers/d_fine", "args": args, "backbone_args": backbone}
    return made | {"train": {**_COMMON["train"], "averaging": "ema"}}


def _keypoints(data: Path) -> dict[str, Any]:
    split = {"dataset": "coco", "root": str(data), "keypoints": True, "per_object": True}
    crop = {"name": "pose_crop", "size": [64, 64]}
    changes = [{**crop, "scale": [0.8, 1.2], "degrees": 20}, {"name": "random_horizontal_flip"}, _NORMALIZE]
    return {
        "task": {"name": "keypoints", "flip": True},
        "model": {"name": "simple_baseline", "backbone": "timm/lcnet_035", "widths": [16, 16, 8]},
        "data": {
            "train": {**split, "annotations": "train.json", "transforms": changes},
            "val": {**split, "annotations": "val.json", "transforms": [crop, _NORMALIZE]},
        },
        "losses": [{"name": "heatmap_mse", "sigma": 1.0}],
        "evaluate": {"metrics": ["pckh"], "save_predictions": True},
    }


def _saliency(data: Path) -> dict[str, Any]:
    split = {"dataset": "image_mask", "root": str(data), "binary": True}
    changes = [
        _RESIZE,
        {"name": "random_rotation", "degrees": 10},
        {"name": "random_horizontal_flip"},
        _MULTI_SCALE,
        _NORMALIZE,
    ]
    return {
        "task": "saliency",
        "model": {"name": "unet", "backbone": "timm/lcnet_035", "widths": [32, 16, 16, 8]},
        "data": {
            "train": {**split, "list_file": "train.txt", "transforms": changes},
            "val": {**split, "list_file": "val.txt", "transforms": [_RESIZE, _NORMALIZE]},
        },
        "losses": [{"name": "pixel_bce"}, {"name": "cel"}],
        "evaluate": {"save_predictions": True},
    }


def _segmentation(data: Path) -> dict[str, Any]:
    classes = ["background", "disc", "square", "triangle"]
    split = {"dataset": "image_mask", "root": str(data), "classes": classes, "ignore_index": 255}
    crop, smaller = {"name": "random_crop", "size": [64, 64]}, {"name": "resize", "size": [72, 96]}
    return {
        "task": {"name": "segmentation", "flip": True, "scales": [0.75, 1.0], "window": 64, "stride": 48},
        "model": {"name": "fpn", "backbone": "torchvision/shufflenet_v2_x0_5", "width": 16},
        "data": {
            "train": {
                **split,
                "list_file": "train.txt",
                "transforms": [crop, {"name": "random_horizontal_flip"}, _MULTI_SCALE, _NORMALIZE],
            },
            "val": {**split, "list_file": "val.txt", "transforms": [smaller, _NORMALIZE]},
        },
        "losses": [{"name": "ohem_cross_entropy"}, {"name": "dice_loss", "weight": 0.5}],
        "evaluate": {"metrics": ["boundary_f"], "original_size": True, "save_predictions": True},
    }


def _video(data: Path) -> dict[str, Any]:
    split = {"dataset": "video_list", "classes": ["circling", "growing", "sideways", "vertical"]}
    clip = {"name": "clip", "num_frames": 4, "stride": 3, "speed": [0.5, 2.0]}
    clips = {"name": "multi_clip", "num_clips": 2, "num_frames": 4, "stride": 3}
    return {
        "task": {"name": "video", "top_k": [1, 2]},
        "model": {"name": "frame_pooling", "backbone": "timm/mobilenetv3_small_050", "dropout": 0.2},
        "data": {
            "train": {
                **split,
                "file": str(data / "train.csv"),
                "transforms": [clip, {"name": "random_crop", "size": [48, 64]}, _NORMALIZE],
            },
            "val": {
                **split,
                "file": str(data / "val.csv"),
                "transforms": [clips, {"name": "multi_crop", "size": 48, "num_crops": 3}, _NORMALIZE],
            },
        },
        "losses": [{"name": "cross_entropy", "label_smoothing": 0.1}],
        "evaluate": {"save_predictions": True},
    }


def _masked_autoencoder(data: Path) -> dict[str, Any]:
    split = {"dataset": "image_folder", "root": str(data), "split_shares": {"train": 0.75, "val": 0.25}}
    masking = {"name": "random_masking", "num_patches": 16}
    changes = [{"name": "random_crop", "size": 64, "padding": 4}, {"name": "random_horizontal_flip"}]
    small = {"img_size": 64, "patch_size": 16, "embed_dim": 24, "depth": 2, "num_heads": 2}
    return {
        "task": "masked_autoencoder",
        "model": {
            "name": "masked_autoencoder",
            "encoder": "timm/vit_tiny_patch16_224",
            "encoder_args": small,
            **{"decoder_dim": 16, "decoder_depth": 1, "decoder_heads": 2},
        },
        "data": {
            "train": {**split, "split": "train", "transforms": [*changes, _NORMALIZE, masking]},
            "val": {**split, "split": "val", "transforms": [_NORMALIZE, masking]},
        },
        "losses": [{"name": "masked_mse"}],
        "evaluate": {},
    }


def _padded(kind: str, data: Path) -> dict[str, Any]:
    recipe = _RECIPES[kind](data)
    moved = {"detection": {"name": "random_iou_crop"}, "saliency": {"name": "random_rotation", "degrees": 10}}[kind]
    shortest = {"name": "random_shortest_size", "min_size": [40, 52, 64], "max_size": 80}
    changes = [moved, shortest, {"name": "random_horizontal_flip"}, _NORMALIZE, {"name": "random_erasing"}]
    recipe["data"]["train"]["transforms"] = changes
    recipe["data"]["val"]["transforms"] = [{"name": "resize", "size": 48, "max_size": 64}, _NORMALIZE]
    recipe["data"]["aspect_ratio_group_factor"] = 1
    return recipe | {"task": {"name": kind, "flip": True}}


_RECIPES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "detection": _detection,
    "instance_segmentation": _instance_segmentation,
    "keypoints": _keypoints,
    "masked_autoencoder": _masked_autoencoder,
    "padded_detection": partial(_padded, "detection"),
    "padded_saliency": partial(_padded, "saliency"),
    "saliency": _saliency,
    "segmentation": _segmentation,
    "transformers": _transformers,
    "video": _video,
}


def predictions(run: Path) -> dict[str, bytes]:
    """The saved predictions of a run, by name: images, or a table."""
    return {path.name: path.read_bytes() for path in (run / "predictions").rglob("*.*")}


def records(run: Path) -> list[dict[str, Any]]:
    """All metrics that a run has recorded, but for those of the clock."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{name: value for name, value in json.loads(line).items() if name != "clock"} for line in lines]


@contextmanager
def settings_kept() -> Iterator[None]:
    """Commands may be called inside, in this process: what they set for all of torch is put back."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    benchmark = torch.backends.cudnn.benchmark
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cudnn.benchmark = benchmark
