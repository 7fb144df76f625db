"""The table of checks between settings, which `python -m longctx.settings` prints.

Functions of longctx/settings that refuse a combination of settings name those settings by `@check`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import NamedTuple, TypeVar

Function = TypeVar("Function", bound=Callable[..., object])


class Check(NamedTuple):
    """A row of the table."""

    settings: tuple[str, ...]
    """Flags, and keys of a profile."""
    place: str
    """`module.function`, below longctx.settings."""
    what: str
    """The first line of the function's docstring."""


_CHECKS: list[Check] = []


def check(*settings: str) -> Callable[[Function], Function]:
    """Return a decorator that enters a function into the table, as a check of these settings."""

    def enter(function: Function) -> Function:
        place = f"{function.__module__.removeprefix('longctx.settings.')}.{function.__name__}"
        _CHECKS.append(Check(settings, place, (function.__doc__ or "").strip().partition("\n")[0]))
        return function

    return enter


def table() -> list[Check]:
    """Return all checks, by module in the order of their lines."""
    import longctx.settings

    for module in pkgutil.iter_modules(longctx.settings.__path__):
        if module.name == "__main__":
            continue
        importlib.import_module(f"longctx.settings.{module.name}")
    return sorted(_CHECKS, key=lambda row: row.place.partition(".")[0])
