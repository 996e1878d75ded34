"""Optional packages: which of an extra are missing, and the command that installs them."""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec

_PACKAGES = {
    "dali": ["nvidia.dali"],
    "excel": ["openpyxl"],
    "mlflow": ["mlflow"],
    "onnx": ["onnx", "onnxscript", "onnxruntime"],
    "pandas": ["pandas"],
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
