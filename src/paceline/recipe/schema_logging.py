"""The section `logging` of a recipe. Imports no torch, so recipes are checked fast."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from paceline.core.arguments import Arguments, Count, Positive

Name = Annotated[str, Field(min_length=1)]


class Wandb(Arguments):
    """Weights & Biases; install `paceline[wandb]`."""

    project: Name
    """The project that the run belongs to."""
    entity: Name | None = None
    """The team or user that owns the project; null: your default."""
    group: Name | None = None
    """The group that the run belongs to."""
    tags: list[Name] = []
    """Tags of the run."""
    mode: Literal["online", "offline"] = "online"
    """offline: write to RUN/wandb only, to be sent later by `wandb sync`."""


class Mlflow(Arguments):
    """MLflow; install `paceline[mlflow]`."""

    experiment: Name = "Default"
    """The experiment that the run belongs to; created if there is none."""
    tracking_uri: Name | None = None
    """A server (http://HOST:5000) or a database (sqlite:///mlflow.db); null: MLflow's own default."""
    tags: dict[str, str] = {}
    """Tags of the run."""


class Logging(Arguments):
    """What to log, and how often."""

    every_steps: Count | None = None
    """How often, in steps; by default every 20."""
    every_epochs: Positive | None = None
    """How often, in epochs."""
    tensorboard: bool = True
    """Whether event files for TensorBoard are written."""
    images: bool = True
    """Whether samples, predictions and metrics are drawn."""
    lr_change_ratio: Annotated[float, Field(ge=1)] = 1.1
    """Changes of the learning rate by more than this ratio are logged."""
    results: Annotated[str, Field(pattern=r"^.+\.(csv|xlsx)$")] | None = None
    """A results table with one row per run and split; relative to the current folder."""
    wandb: Wandb | None = None
    """Also log to Weights & Biases."""
    mlflow: Mlflow | None = None
    """Also log to MLflow."""
