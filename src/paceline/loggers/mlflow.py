"""MLflow: metrics, images and the recipe of a run, on a server, in a database or in a folder."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.loggers.tracker import TrackerIds

_STATES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_NOT_IN_NAMES = re.compile(r"[^\w\-./ ]")
_MAX_PARAMS = 100  # of one request
_MAX_CHARACTERS = 500


class MlflowTracker:
    """Logs a run to an experiment of MLflow."""

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        experiment: str = "Default",
        tracking_uri: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        self._folder, self._config = folder, config
        self._experiment, self._uri, self._tags = experiment, tracking_uri, dict(tags or {})
        self._client: Any = None
        self._run = ""
        self._is_continued = False
        self._last_steps: dict[str, int] = {}
        """The step up to which a continued run has each metric already."""

    def start(self, name: str) -> None:
        """Open a run, or continue the one with the id that the run directory has."""
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # the terminal belongs to our console
        self._client = MlflowClient(self._uri)
        ids = TrackerIds(self._folder)
        known = ids.read("mlflow")
        if known is None or not self._continue(known):
            self._create(name)
            ids.write("mlflow", self._run)

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Log metrics, except for steps that a resumed run repeats."""
        from mlflow.entities import Metric

        named = {_NOT_IN_NAMES.sub("_", key): value for key, value in scalars.items()}
        now = round(time.time() * 1000)
        new = [Metric(key, value, now, step) for key, value in named.items() if step > self._last_step(key)]
        if new:
            self._client.log_batch(self._run, metrics=new)

    def log_images(self, step: int, images: dict[str, Path]) -> None:
        """Store PNG files as artifacts."""
        for name, path in images.items():
            self._client.log_artifact(self._run, str(path), f"images/{name.rpartition('/')[0]}")

    def end(self, state: str) -> None:
        """Close the run."""
        self._client.set_terminated(self._run, _STATES[state])

    def _continue(self, known: str) -> bool:
        """Whether the store has this run, which is then running again."""
        from mlflow.exceptions import MlflowException

        try:
            self._client.update_run(known, status="RUNNING")
        except MlflowException:
            return False
        self._run, self._is_continued = known, True
        return True

    def _create(self, name: str) -> None:
        from mlflow.entities import Param

        found = self._client.get_experiment_by_name(self._experiment)
        number = found.experiment_id if found else self._client.create_experiment(self._experiment)
        self._run = self._client.create_run(number, tags=self._tags, run_name=name).info.run_id
        leaves = _leaves(self._config, "")
        params = [Param(_NOT_IN_NAMES.sub("_", key), str(value)[:_MAX_CHARACTERS]) for key, value in leaves]
        for start in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._run, params=params[start : start + _MAX_PARAMS])

    def _last_step(self, key: str) -> int:
        if key not in self._last_steps:
            history = self._client.get_metric_history(self._run, key) if self._is_continued else []
            self._last_steps[key] = max((each.step for each in history), default=-1)
        return self._last_steps[key]


def _leaves(config: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Each value with its dotted key; a list is one value."""
    if not isinstance(config, Mapping):
        yield key, config
        return
    for name, value in config.items():
        yield from _leaves(value, f"{key}.{name}" if key else str(name))
