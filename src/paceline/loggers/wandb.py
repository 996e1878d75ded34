"""Weights & Biases: metrics, images and the recipe of a run; offline, in the run directory."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from paceline.loggers.tracker import TrackerIds


class WandbTracker:
    """Logs a run to a project of Weights & Biases, or into `RUN/wandb` for `wandb sync`."""

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        project: str,
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: Literal["online", "offline"] = "online",
    ) -> None:
        self._folder, self._config = folder, config
        self._settings = {"project": project, "entity": entity, "group": group, "tags": list(tags), "mode": mode}
        self._run: Any = None

    def start(self, name: str) -> None:
        """Open the run, or continue the one with the id that the run directory has."""
        import wandb

        ids = TrackerIds(self._folder)
        number = ids.read("wandb")
        if number is None:
            number = secrets.token_hex(4)
            ids.write("wandb", number)
        # The terminal belongs to our console. Without this, somebody who is not logged in would be asked for a key.
        wandb.setup(settings=wandb.Settings(silent=True))
        self._run = wandb.init(
            **self._settings,
            id=number,
            resume="allow",
            name=name,
            dir=self._folder,
            config=self._config,
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Log metrics; the service drops steps that it has. Offline, the newest part of a run has all."""
        self._run.log(scalars, step=step)

    def log_images(self, step: int, images: dict[str, Path]) -> None:
        """Log PNG files."""
        import wandb

        self._run.log({name: wandb.Image(str(path)) for name, path in images.items()}, step=step)

    def end(self, state: str) -> None:
        """Send what is left and close the run."""
        self._run.finish(exit_code=0 if state == "finished" else 1)
