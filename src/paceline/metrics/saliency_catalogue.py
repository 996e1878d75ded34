"""The metric of saliency that recipes can name."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field

from paceline.core.arguments import Arguments
from paceline.core.registry import register

Figure = Literal[
    "mae",
    "max_f",
    "mean_f",
    "adaptive_f",
    "weighted_f",
    "s_measure",
    "max_e",
    "mean_e",
    "adaptive_e",
    "iou",
    "ber",
]


class SaliencyArguments(Arguments):
    """Arguments of saliency."""

    figures: list[Figure] = Field(default=list(get_args(Figure)), min_length=1)
    stretch: bool = True


register.kind("metric").add(
    "saliency",
    "paceline.metrics.saliency:Saliency",
    SaliencyArguments,
    "MAE, F, weighted F, S, E, IoU and balanced error rate of saliency maps",
)
