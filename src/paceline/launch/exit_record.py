"""What a process tells its launcher when it ends, well or not: a small file, in a folder that both know."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.core.atomic_write import replace_file


@dataclass(frozen=True)
class Record:
    """Why a process ended: `explained` if the message is for the user, else it is the traceback of a crash."""

    rank: int
    code: int
    message: str
    explained: bool
    time: float

    @property
    def summary(self) -> str:
        """The line that names the error; a traceback ends with it."""
        lines = [line for line in self.message.splitlines() if line and not line.startswith(" ")]
        return lines[-1] if lines else f"exit code {self.code}"

    def as_text(self) -> str:
        """JSON, as `from_text` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Record:
        """The record that `as_text` wrote."""
        return cls(**json.loads(text))

    def write(self, folder: Path) -> None:
        """Put the record into the folder; readers see all of it or nothing."""
        replace_file(folder / f"rank-{self.rank}.json", self.as_text().encode(), is_durable=False)


def read_records(folder: Path) -> list[Record]:
    """All records of a folder, the earliest first."""
    found = [Record.from_text(path.read_text(encoding="utf-8")) for path in folder.glob("rank-*.json")]
    return sorted(found, key=lambda record: record.time)


def note_done(folder: Path, rank: int) -> None:
    """Leave a note that a process has done its work: what it may still die of while it ends is no failure."""
    (folder / f"rank-{rank}.done").touch()


def is_done(folder: Path, rank: int) -> bool:
    """Whether a process has left that note."""
    return (folder / f"rank-{rank}.done").exists()
