"""Experiment trackers, W&B and MLflow: a thread passes them the metrics, so that none of them disturbs training.

`trackers.json` of a run directory has the id that each tracker knows the run by, so that resuming continues it.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, Protocol

from paceline.core.atomic_write import replace_file
from paceline.core.regular_file import read_json
from paceline.loggers.events import Ended, Evaluated, Event, Logged, Logger, Record, Snapshot, Started, Visualized
from paceline.loggers.tensorboard import scalars_of

_END_SECONDS = 60.0  # for what is left to be sent when the run is over
_MLFLOW_STATES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_NOT_IN_NAMES = re.compile(r"[^\w\-./ ]")  # of MLflow
_MAX_PARAMS = 100  # of one request
_MAX_CHARACTERS = 500
_ids_lock = threading.Lock()  # each tracker has its own thread


class Tracker(Protocol):
    """What a tracking service is called for, always from one thread."""

    def start(self, name: str) -> None:
        """Open the tracker's run, or continue it."""

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Log metrics by name; those of a resumed run that the service has already are repeated."""

    def log_images(self, step: int, images: dict[str, Path]) -> None:
        """Log PNG files by name."""

    def end(self, state: str) -> None:
        """Close the run, which is "finished", "stopped" or "failed"."""


class TrackerLogger(Logger):
    """Passes metrics and images to a tracker; whatever it raises is one warning, and training continues.

    A resumed run first passes on its earlier `records`: some were lost with the process that was killed.
    """

    def __init__(
        self, name: str, tracker: Tracker, warn: Callable[[str], None], records: Sequence[Record] = ()
    ) -> None:
        self._name, self._tracker, self._warn, self._records = name, tracker, warn, records
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        self._problem: str | None = None
        self._is_reported = False
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)

    def handle(self, event: Event) -> None:
        """Pass an event on; at the end of the run, wait until the tracker has everything."""
        if isinstance(event, Started):
            self._thread.start()
        if isinstance(event, Started | Logged | Evaluated | Visualized | Ended):
            self._events.put(event)
        if isinstance(event, Ended):
            self.close()
        self._report()

    def tick(self, snapshot: Snapshot) -> None:
        """Report what went wrong since, from the thread that may print."""
        self._report()

    def close(self) -> None:
        """End the thread; it is left behind if the tracker does not answer."""
        self._events.put(None)
        if self._thread.ident is not None:
            self._thread.join(_END_SECONDS)
            if self._thread.is_alive():
                self._problem = self._problem or f"does not answer for {_END_SECONDS:.0f} s"

    def _report(self) -> None:
        if self._problem and not self._is_reported:
            self._is_reported = True
            self._warn(f"logging.{self._name}: {self._problem}; training continues, and metrics.jsonl has everything")

    def _work(self) -> None:
        is_open = True
        while (event := self._events.get()) is not None:
            try:
                if is_open:
                    self._pass_on(event)
            except Exception as error:  # noqa: BLE001 - a service may raise anything
                first = next(iter(str(error).splitlines()), "")
                self._problem = self._problem or f"{type(error).__name__}: {first}"
                is_open = not isinstance(event, Started)

    def _pass_on(self, event: Event) -> None:
        match event:
            case Started():
                self._tracker.start(event.name)
                for record in self._records:
                    self._log(record)
                self._records = ()
            case Logged() | Evaluated():
                self._log(event.record)
            case Visualized():
                self._tracker.log_images(
                    event.step, {f"{event.split}/{name}": path for name, path in event.images.items()}
                )
            case Ended():
                self._tracker.end(event.state)

    def _log(self, record: Record) -> None:
        epoch = {"train/epoch": float(record["epoch"])} if record["split"] == "train" else {}
        self._tracker.log(record["step"], dict(scalars_of(record)) | epoch)


def read_ids(folder: Path) -> dict[str, Any]:
    """The ids of a run directory by tracker."""
    found = read_json(folder / "trackers.json")
    return found if isinstance(found, dict) else {}


def write_id(folder: Path, tracker: str, number: str) -> None:
    """Keep the id that a tracker knows the run by."""
    with _ids_lock:
        content = json.dumps(read_ids(folder) | {tracker: number})
        replace_file(folder / "trackers.json", f"{content}\n".encode())


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
        import wandb

        number = read_ids(self._folder).get("wandb") or secrets.token_hex(4)
        write_id(self._folder, "wandb", number)
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
        import wandb

        self._run.log({name: wandb.Image(str(path)) for name, path in images.items()}, step=step)

    def end(self, state: str) -> None:
        self._run.finish(exit_code=0 if state == "finished" else 1)


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
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # the terminal belongs to our console
        self._client = MlflowClient(self._uri)
        known = read_ids(self._folder).get("mlflow")
        if known is None or not self._continue(known):
            self._create(name)
            write_id(self._folder, "mlflow", self._run)

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Log metrics, except for steps that a resumed run repeats."""
        from mlflow.entities import Metric

        named = {_NOT_IN_NAMES.sub("_", key): value for key, value in scalars.items()}
        now = round(time.time() * 1000)
        new = [Metric(key, value, now, step) for key, value in named.items() if step > self._last_step(key)]
        if new:
            self._client.log_batch(self._run, metrics=new)

    def log_images(self, step: int, images: dict[str, Path]) -> None:
        for name, path in images.items():
            self._client.log_artifact(self._run, str(path), f"images/{name.rpartition('/')[0]}")

    def end(self, state: str) -> None:
        self._client.set_terminated(self._run, _MLFLOW_STATES[state])

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
