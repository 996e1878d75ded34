"""Small detectors of transformers, images and objects for them, and what the library computes of these."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.models.detector import Target
from paceline.models.transformers_detection import (
    TransformersDetector,
    build_transformers_detector,
    import_transformers,
)

SIZE, NUM_CLASSES = 64, 3
DTYPES = dict.fromkeys(("rt_detr_v2", "lw_detr", "rf_detr"), torch.float64) | {"d_fine": torch.float32}
"""The library computes D-FINE's losses in single precision alone."""
_HYBRID: dict[str, Any] = {
    "d_model": 32, "encoder_hidden_dim": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_queries": 12,
    "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_denoising": 10,
    "encoder_in_channels": [16, 24, 32], "decoder_in_channels": [32, 32, 32], "freeze_backbone_batch_norms": False,
}  # fmt: skip
_WINDOWED: dict[str, Any] = {
    "d_model": 32, "decoder_ffn_dim": 32, "num_queries": 6, "decoder_layers": 2, "group_detr": 3, "c2f_num_blocks": 1,
    "decoder_self_attention_heads": 4, "decoder_cross_attention_heads": 4, "dropout": 0.0,
}  # fmt: skip
_VIT: dict[str, Any] = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "out_indices": [1, 2]}
SMALL: dict[str, dict[str, Any]] = {
    "rt_detr_v2": {
        "args": _HYBRID,
        "backbone_args": {
            "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "layer_type": "basic", "embedding_size": 8,
        },
    },
    "d_fine": {
        "args": {**_HYBRID, "max_num_bins": 8, "lqe_hidden_dim": 8},
        "backbone_args": {
            "stem_channels": [3, 8, 8], "stage_in_channels": [8, 8, 16, 24], "stage_mid_channels": [8, 8, 8, 8],
            "stage_out_channels": [8, 16, 24, 32], "stage_num_blocks": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32],
        },
    },
    "lw_detr": {
        "args": {**_WINDOWED, "projector_scale_factors": [1.0]},
        "backbone_args": {**_VIT, "image_size": 64, "num_windows": 4, "window_block_indices": [0]},
    },
    "rf_detr": {"args": _WINDOWED, "backbone_args": {**_VIT, "image_size": 64, "patch_size": 8, "num_windows": 2}},
}  # fmt: skip


def small(name: str, **args: Any) -> TransformersDetector:
    """A detector that learns, the same each time."""
    torch.manual_seed(0)
    options = copy.deepcopy(SMALL[name])
    options["args"] |= args
    detector = build_transformers_detector(name, NUM_CLASSES, 3, **options)
    with torch.no_grad():  # heads that start at 0 would hide mistakes
        for parameter in detector.parameters():
            if not parameter.any():
                parameter.normal_(std=0.1)
    return detector.to(DTYPES[name]).train()


def samples(name: str, numbers: Sequence[int]) -> tuple[Tensor, list[Target]]:
    """Images and their objects, so many of each."""
    generator, dtype = torch.Generator().manual_seed(2), DTYPES[name]
    made: list[Target] = []
    for number in numbers:
        corner = torch.rand(number, 2, generator=generator, dtype=dtype) * SIZE / 2
        sides = 4 + torch.rand(number, 2, generator=generator, dtype=dtype) * SIZE / 2.5
        labels = torch.randint(NUM_CLASSES, (number,), generator=generator)
        made.append({"boxes": torch.cat([corner, corner + sides], 1), "labels": labels})
    return torch.randn(len(numbers), 3, SIZE, SIZE, generator=generator, dtype=dtype), made


def labels_of(given: Sequence[Target]) -> list[dict[str, Tensor]]:
    """Objects as the library has them."""
    labels = []
    for each in given:
        x1, y1, x2, y2 = (each["boxes"] / SIZE).unbind(1)
        boxes = torch.stack([(x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1], 1)
        labels.append({"class_labels": each["labels"], "boxes": boxes})
    return labels


def library_model(detector: TransformersDetector) -> Any:
    """The library's own model with the same weights; nothing in it is replaced."""
    dtype = next(detector.parameters()).dtype
    own = import_transformers().AutoModelForObjectDetection.from_config(detector.detector.config).to(dtype)
    found = own.load_state_dict(detector.detector.state_dict(), strict=False)
    assert not found.unexpected_keys
    assert all(name.startswith(("class_embed.", "bbox_embed.")) for name in found.missing_keys)
    return own.train(detector.training)
