"""Writes the registry's table, `registry.json`, from what the package registers.

`make table` runs it, after a signature, a name or the version of a library has changed.

Each argument has one sentence, for editors and for the recipe reference. `Field(description=…)` of the argument comes
first, then a sentence of the docstring that names it in backticks, then what is said here of arguments that mean the
same wherever they occur, and last the docstring's first sentence.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from paceline.core.registry import KINDS, TABLE, Row, register


def collect() -> dict[str, dict[str, Row]]:
    """Each kind's names, sorted, as the code and the installed libraries have them."""
    for module in pkgutil.walk_packages([str(TABLE.parent)], "paceline."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    table: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
    for (kind, name), definition in sorted(register.definitions.items()):
        row = table[kind][name] = definition.row()
        for argument, node in row["arguments"].items():
            sentence = node.get("description") or describe_argument(kind, definition.target, argument)
            row["arguments"][argument] = dict(sorted((node | ({"description": sentence} if sentence else {})).items()))
    return table


def as_text(table: Mapping[str, Mapping[str, Row]]) -> str:
    """The table as JSON with a line for each name."""
    kinds = []
    for kind, rows in table.items():
        lines = [f"{json.dumps(name)}: {json.dumps(row, ensure_ascii=False)}" for name, row in rows.items()]
        kinds.append(f'"{kind}": {{\n' + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(kinds) + "\n}\n"


_SENTENCE = re.compile(r'(?<=[.!?])\s+(?=[A-Z`"])')

SENTENCES = {
    # data sets
    "annotations": "The JSON file of annotations.",
    "bad_boxes": "What to do about boxes outside of their image or without any area.",
    "classes": "The class names in their order; without them they are read off the data.",
    "delimiter": "What separates columns; without it, it is found.",
    "extensions": "The file extensions that count; other files are skipped.",
    "file": "The list or pack to read.",
    "first_label": "The number that the first class has in the file.",
    "flip_pairs": "Pairs of keypoints that are swapped by a horizontal flip.",
    "fold": "The fold that is held out.",
    "fold_column": "The column of the fold's number, by name or number.",
    "follow_links": "Whether links may lead out of the folder.",
    "format": "The format of the list: by its extension, or as named here.",
    "images": "The folder of the images, in `root`.",
    "keypoints": "Whether keypoints are read.",
    "label": "The column of the label, by name or number.",
    "label_from": "Where labels come from: a column, or the folder that a file lies in.",
    "label_separator": "What separates several labels of one sample.",
    "margin": "How far boxes reach beyond the joints, as a share of their longer side.",
    "masks": "Whether masks are read.",
    "root": "The folder of the data set.",
    "skeleton": "Pairs of keypoints that are drawn as lines.",
    "split": "Which part of the data set.",
    "split_column": "The column that names the part each sample belongs to.",
    "split_seed": "The seed that splits are drawn with.",
    "split_shares": "The share of the samples that each drawn part gets, by name.",
    "stratify": "Whether `split_shares` are those of each class, where a sample has one.",
    # losses, metrics and tasks
    "class_weights": "The weight of each class: numbers, or `balanced` for those of its frequency.",
    "eleven_points": "Whether precision is averaged at eleven recalls, as in VOC 2007.",
    "label_smoothing": "The share of each target that is spread over all classes.",
    "multi_label": "Whether a sample may have any number of labels.",
    "per_image": "Whether the loss is taken for each image and averaged, instead of over the whole step.",
    "pos_weight": "The weight of positive targets: one number, or one per class.",
    "top_k": "The numbers of guesses that count, such as [1, 5].",
    # models
    "args": "Further arguments of the library's own function.",
    "backbone": "The name of a timm or torchvision model that computes features.",
    "backbone_args": "Further arguments of the backbone.",
    "decoder_depth": "The number of the decoder's blocks.",
    "decoder_dim": "The width of the decoder's tokens.",
    "decoder_heads": "The number of the decoder's attention heads.",
    "depth": "How many blocks follow each other.",
    "detections_per_img": "The most boxes that are kept of an image.",
    "dropout": "The share of features that dropout removes before the classifier.",
    "encoder": "The name of a timm ViT that encodes the visible patches.",
    "encoder_args": "Further arguments of the encoder.",
    "nms_thresh": "The overlap above which the lower of two boxes of a class is removed.",
    "pooling": "How the features of frames are joined.",
    "score_thresh": "The least score of a box that is kept.",
    "width": "The number of channels.",
    "widths": "The number of channels of each stage.",
    # optimizers, as in torch and timm
    "optimizer.alpha": "The decay rate of the running average, or the power of `t`, as in torch.",
    "amsgrad": "Whether the maximum of the squared averages is used.",
    "beta2_decay": "The decay rate of the second moment, as in torch.",
    "betas": "The decay rates of the running averages of the gradient and of its square.",
    "centered": "Whether the gradient is normalized by its variance.",
    "d": "The clipping threshold of updates, as in torch.",
    "dampening": "The dampening of momentum.",
    "decoupled_weight_decay": "Whether weight decay is decoupled from the gradient, as in AdamW.",
    "eps": "A small number that keeps divisions finite.",
    "etas": "The factors by which step sizes shrink and grow.",
    "initial_accumulator_value": "Where the sum of squared gradients starts.",
    "lambd": "The decay term, as in torch.",
    "lr_decay": "How the learning rate decays with the number of steps, as in torch.",
    "momentum": "The momentum factor.",
    "momentum_decay": "How momentum decays, as in torch.",
    "nesterov": "Whether Nesterov's momentum is used.",
    "rho": "The decay rate of the running averages of squares.",
    "step_sizes": "The least and the greatest step size.",
    "t0": "The step at which averaging starts.",
    # schedules
    "anneal_strategy": "The shape of the change: cosine or linear.",
    "cooldown_epochs": "The length of the cooldown, in epochs.",
    "cooldown_share": "The length of the cooldown, as a share of the run.",
    "cooldown_steps": "The length of the cooldown, in steps.",
    "div_factor": "The peak divided by the learning rate of the first step.",
    "final_div_factor": "The learning rate of the first step divided by that of the last.",
    "gamma": "The factor of each decay.",
    "milestone_epochs": "The epochs at which the learning rate is multiplied by `gamma`.",
    "milestone_steps": "The steps at which the learning rate is multiplied by `gamma`.",
    "pct_start": "The share of the run in which the value moves to its peak.",
    "power": "The exponent.",
    "shape": "The shape of the cooldown.",
    # processes and memory
    "every_steps": "How many steps lie between two updates of the average.",
    "start_step": "The step at which averaging starts.",
    # transforms
    "transform.alpha": "The parameter of the Beta distribution that the mix is drawn from.",
    "brightness": "By how much brightness changes: a factor from 1 - x to 1 + x, or a range.",
    "contrast": "By how much contrast changes: a factor from 1 - x to 1 + x, or a range.",
    "cutmix_alpha": "The parameter of the Beta distribution of cutmix.",
    "degrees": "The range of the rotation, in degrees.",
    "fill": "The value of pixels outside of the image.",
    "hue": "By how much hue changes: a share of the color circle, or a range.",
    "mask_fill": "The id of mask pixels outside of the image.",
    "mask_ratio": "The share of patches that are masked.",
    "max_aspect_ratio": "The greatest width of a crop divided by its height.",
    "mean": "The mean that is subtracted, for each channel or for all.",
    "min_aspect_ratio": "The least width of a crop divided by its height.",
    "min_visible": "The share of an object's box that must stay visible; others are removed.",
    "mixup_alpha": "The parameter of the Beta distribution of mixup.",
    "num_clips": "How many clips are taken of a video.",
    "num_crops": "How many crops are taken of a clip.",
    "num_frames": "How many frames a clip has.",
    "num_patches": "How many patches an image is cut into.",
    "p": "The probability that it is applied.",
    "saturation": "By how much saturation changes: a factor from 1 - x to 1 + x, or a range.",
    "scale": "The range of the scale.",
    "short": "What to do about videos that are shorter than a clip.",
    "size": "The side of a square, or height and width, in pixels.",
    "size_divisor": "The sides become multiples of this.",
    "std": "The standard deviation that is divided by, for each channel or for all.",
    "stride": "Every how many frames one is taken.",
}


def describe_argument(kind: str, target: Callable[..., Any], name: str) -> str | None:
    """A sentence about one argument of a registered class or function; None if nobody wrote one."""
    written = [inspect.getdoc(target) or ""]
    if inspect.isclass(target):
        written.append(inspect.getdoc(target.__init__) or "")
    sentences = [each for text in written for each in _SENTENCE.split(" ".join(text.split()))]
    naming = [each for each in sentences if re.search(rf"`{re.escape(name)}\b", each)]
    if naming and naming[0] != sentences[0]:
        return naming[0]
    return SENTENCES.get(f"{kind}.{name}") or SENTENCES.get(name) or next(iter(naming), None)


def undescribed(table: Mapping[str, Mapping[str, Row]]) -> list[str]:
    """The arguments without a sentence."""
    return [
        f"{kind} {name}: {argument}"
        for kind, rows in table.items()
        for name, row in rows.items()
        for argument, node in row["arguments"].items()
        if not node.get("description")
    ]


if __name__ == "__main__":
    found = collect()
    TABLE.write_text(as_text(found), encoding="utf-8")
    if missing := undescribed(found):
        sys.exit(f"no sentence says what these are: {', '.join(missing)}")
