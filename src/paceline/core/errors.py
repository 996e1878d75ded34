"""Errors that users see, each with its exit code; and what is said of packages that are not installed."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec


class PacelineError(Exception):
    """An error whose message is printed without a traceback."""

    exit_code = 1


class UsageError(PacelineError):
    """The command line asks for something that does not exist or cannot be combined."""

    exit_code = 2


class RecipeError(PacelineError):
    """A recipe is wrong; `problems` holds one finished line per mistake, all of them up to a number nobody reads."""

    exit_code = 2
    most = 100

    def __init__(self, problems: list[str] | str) -> None:
        lines = list(dict.fromkeys([problems] if isinstance(problems, str) else problems))
        self.problems = [in_one_line(line) for line in lines[: self.most]]
        if len(lines) > self.most:
            self.problems.append(f"and {len(lines) - self.most:,} more")
        super().__init__("\n".join(self.problems))


class DataError(PacelineError):
    """Data is missing, unreadable or does not fit the recipe."""

    exit_code = 3


class DamagedFileError(DataError):
    """The file of one sample is missing, empty, damaged or of another kind; other samples may be fine."""


class CheckpointError(PacelineError):
    """A checkpoint or a weights file is missing, damaged or does not fit."""

    exit_code = 4


class TrainingError(PacelineError):
    """Training cannot continue, for example because a loss is not finite."""

    exit_code = 1


class ExportError(PacelineError):
    """A model cannot be exported in a format: the format lacks an operator, for instance."""

    exit_code = 1


class Stopped(PacelineError):  # noqa: N818 - being asked to stop is no error
    """The run was asked to stop; it saved its state and can be continued."""

    exit_code = 75


class ArgumentError(ValueError):
    """An argument cannot be used; `argument` is its name, `reason` what is wrong with it."""

    def __init__(self, argument: str, reason: str) -> None:
        super().__init__(f"{argument}: {reason}")
        self.argument = argument
        self.reason = reason


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_IN_THE_WAY = (errno.EEXIST, errno.EISDIR, errno.ENOTDIR)


@contextmanager
def naming_full_disks() -> Iterator[None]:
    """Re-raise a full disk, or something in the way of our file, as a PacelineError that names it."""
    try:
        yield
    except OSError as error:
        cure = "make room" if error.errno in _FULL else "move it away" if error.errno in _IN_THE_WAY else None
        if cure is None:
            raise
        place = f"{error.filename}: " if error.filename else ""
        raise PacelineError(f"{place}{error.strerror}; {cure}, and start the same command again") from error


def in_one_line(text: str) -> str:
    """The text with everything escaped that is not printed as itself: line ends, what steers terminals and the like."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


_PACKAGES = {
    "dali": ["nvidia.dali"],
    "excel": ["openpyxl"],
    "mlflow": ["mlflow"],
    "onnx": ["onnx", "onnxscript", "onnxruntime"],
    "transformers": ["transformers", "scipy"],
    "video": ["av"],
    "wandb": ["wandb"],
}


def missing_extra(extra: str) -> str:
    """The packages of an extra that are not installed, and how to install them; empty if all are there."""
    missing = [name for name in _PACKAGES[extra] if not _is_installed(name)]
    are = "is" if len(missing) == 1 else "are"
    return f"{', '.join(missing)} {are} not installed: pip install 'paceline[{extra}]'" if missing else ""


def _is_installed(name: str) -> bool:
    with suppress(ModuleNotFoundError):  # of the package around it
        return find_spec(name) is not None
    return False
