"""What recipes may name, for tests."""

from typing import Any

from paceline.core.registry import Entry, register


def entry_of(kind: str, name: str) -> Entry:
    """The entry of a name that is registered."""
    entry = register.kind(kind).find(name)
    assert entry is not None, name
    return entry


def arguments_of(kind: str, name: str) -> Any:
    """The model of a name's arguments."""
    return entry_of(kind, name).arguments
