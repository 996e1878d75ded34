"""The schedules that recipes can name."""

from __future__ import annotations

from paceline.core.registry import register

schedules = register.kind("schedule")

schedules.add("constant", "paceline.optim.schedules:constant", summary="the learning rate stays")
schedules.add("cosine", "paceline.optim.schedules:cosine", summary="half a cosine from the learning rate to the floor")
schedules.add(
    "linear", "paceline.optim.schedules:linear", summary="a straight line from the learning rate to the floor"
)
