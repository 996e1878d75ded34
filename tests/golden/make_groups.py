"""Write groups_vit.json, groups_pet.json and groups_minet.json: learning-rate factor and decay of each parameter.

    python tests/golden/make_groups.py

Nothing of the package is used, nor torch: the nets are tables of layers, the rules are written out here once more
in exact fractions. A parameter is listed as [factor of the learning rate, decay].
"""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path

Parameters = dict[str, list[float]]

DETECTOR = {
    "backbone.stem.conv": "conv_without_bias",
    "backbone.stem.bn": "batch_norm",
    "backbone.layer1.conv": "conv_without_bias",
    "backbone.layer1.bn": "batch_norm",
    "neck.lateral": "conv",
    "neck.gn": "group_norm",
    "rpn.conv": "conv",
    "heads.stage1.fc": "linear",
    "heads.stage1.score": "linear",
    "heads.stage2.fc": "linear",
    "heads.stage2.gn": "group_norm",
    "heads.stage3.fc": "linear",
}
SALIENCY = {
    "backbone.stem.conv": "conv_without_bias",
    "backbone.stem.norm": "batch_norm",
    "backbone.level2.conv": "conv",
    "backbone.level2.norm": "batch_norm",
    "aggregate.0.own.conv": "conv",
    "aggregate.0.own.norm": "batch_norm",
    "aggregate.0.shortcut": "conv",
    "interact.0.coarse.conv": "conv",
    "interact.0.coarse.norm": "batch_norm",
    "decoder.0.conv": "conv_without_bias",
    "decoder.0.norm": "batch_norm",
    "logits": "conv",
}


def parameters_of(layer: str) -> list[str]:
    return ["weight"] if layer == "conv_without_bias" else ["weight", "bias"]


def kind_of(layer: str, parameter: str) -> str:
    return "norm" if layer.endswith("_norm") else parameter


def vit(blocks: int, decay: Fraction, weight_decay: float) -> Parameters:
    """Fine-tuning as in MAE: ids 0 … L with L = blocks + 1; decay^(L − id); one-dimensional tensors do not decay."""
    matrices = {"cls_token": 0, "pos_embed": 0, "patch_embed.proj.weight": 0}
    vectors = {"patch_embed.proj.bias": 0}
    for block in range(blocks):
        for layer in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"):
            matrices[f"blocks.{block}.{layer}.weight"] = block + 1
            vectors[f"blocks.{block}.{layer}.bias"] = block + 1
        for layer in ("norm1", "norm2"):
            vectors[f"blocks.{block}.{layer}.weight"] = block + 1
            vectors[f"blocks.{block}.{layer}.bias"] = block + 1
    last = blocks + 1
    matrices["head.weight"] = last
    vectors |= dict.fromkeys(["norm.weight", "norm.bias", "head.bias"], last)
    excepted = {"cls_token", "pos_embed"}  # as the model lists
    written = {}
    for name, number in sorted((matrices | vectors).items()):
        decays = name in matrices and name not in excepted
        written[name] = [float(decay ** (last - number)), weight_decay if decays else 0.0]
    return written


def pet(weight_decay: float, stages: dict[str, dict[str, int]]) -> Parameters:
    """Whatever has bias in its name twice as fast, without decay; then group norm without decay; then the stages."""
    written = {}
    for name, layer in DETECTOR.items():
        for parameter in parameters_of(layer):
            kind = kind_of(layer, parameter)
            is_bias = "bias" in f"{name}.{parameter}"
            factor = (2 if is_bias else 1) * stages.get(name.split(".")[1], {}).get(kind, 1)
            decays = not is_bias and layer != "group_norm"
            written[f"{name}.{parameter}"] = [float(factor), weight_decay if decays else 0.0]
    return written


def minet(weight_decay: float, no_decay_bias_norm: bool, bias_double: bool, backbone_tenth: bool) -> Parameters:
    written = {}
    for name, layer in SALIENCY.items():
        for parameter in parameters_of(layer):
            kind = kind_of(layer, parameter)
            factor, decay = Fraction(1), weight_decay
            if no_decay_bias_norm and kind in ("bias", "norm"):
                decay = 0.0
            if bias_double and kind == "bias":
                factor, decay = factor * 2, 0.0
            if backbone_tenth and name.startswith("backbone."):
                factor /= 10
            written[f"{name}.{parameter}"] = [float(factor), decay]
    return written


def main() -> None:
    layer_decay, decay = Fraction(3, 4), 0.05
    write("vit", {"layer_decay": 0.75, "weight_decay": decay, "parameters": vit(12, layer_decay, decay)})

    decay = 5e-4
    stages = {
        "stage1": {"weight": 1, "bias": 1},
        "stage2": {"weight": 2, "bias": 4},
        "stage3": {"weight": 3, "bias": 5},
    }
    detector = {"layers": DETECTOR, "weight_decay": decay, "stages": stages}
    write("pet", detector | {"parameters": pet(decay, {}), "with_stages": pet(decay, stages)})

    choices = {
        "no_decay_bias_norm": minet(decay, True, False, False),
        "bias_double": minet(decay, False, True, False),
        "backbone_tenth": minet(decay, False, False, True),
        "bias_double, backbone_tenth": minet(decay, False, True, True),
        "no_decay_bias_norm, bias_double, backbone_tenth": minet(decay, True, True, True),
    }
    write("minet", {"layers": SALIENCY, "weight_decay": decay, "presets": choices})


def write(name: str, content: object) -> None:
    """Indented JSON, with each pair of numbers on one line."""
    text = re.sub(r"\[\s+([^\[\]]+?),\s+([^\[\]]+?)\s+\]", r"[\1, \2]", json.dumps(content, indent=1))
    Path(__file__).with_name(f"groups_{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
