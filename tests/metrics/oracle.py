"""scikit-learn's metrics, imported when one is called: importing takes seconds, in each process that collects tests."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    import sklearn.metrics

    return getattr(sklearn.metrics, name)
