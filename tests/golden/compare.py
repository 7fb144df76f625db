"""Compute the values of a group, record them, and compare them with recorded ones."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"


def values_of(group: str, *, quick: bool = False, measured: bool = False) -> dict[str, Any]:
    """Values of a group by name, as JSON gives them back.

    Args:
        quick: only those of the default tests.
        measured: also those that depend on the processor.
    """
    module = importlib.import_module(f"tests.golden.{group}")
    found: dict[str, Any] = {}
    for name, value in _all(module, quick, measured):
        assert name not in found, f"{group} yields {name} twice"
        found[name] = json.loads(json.dumps(value))
    return found


def _all(module: Any, quick: bool, measured: bool) -> Iterator[tuple[str, Any]]:
    yield from module.golden(quick)
    if measured and hasattr(module, "measured"):
        yield from module.measured()


def recorded(group: str) -> dict[str, Any]:
    """What is committed of a group; nothing before it is recorded for the first time."""
    path = DATA / f"{group}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def record(group: str, values: dict[str, Any]) -> None:
    """Write the file of a group: one line for each value, in the order of their names.

    A module that defines `before_record(before, now)` may raise SystemExit there.
    """
    module = importlib.import_module(f"tests.golden.{group}")
    if hasattr(module, "before_record"):
        module.before_record(recorded(group), values)
    lines = (f"{json.dumps(name)}: {json.dumps(values[name], ensure_ascii=False)}" for name in sorted(values))
    (DATA / f"{group}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def differences(group: str, before: Mapping[str, Any], now: Mapping[str, Any], *, partial: bool = False) -> list[str]:
    """One line for each value that differs.

    Args:
        partial: `now` need not have every name.
    """
    differs = getattr(importlib.import_module(f"tests.golden.{group}"), "differs", _unequal)
    found = [f"{group}: {name} is new" for name in sorted(now.keys() - before.keys())]
    if not partial:
        found += [f"{group}: {name} is gone" for name in sorted(before.keys() - now.keys())]
    for name in sorted(before.keys() & now.keys()):
        if wrong := differs(name, before[name], now[name]):
            found.append(f"{group}: {name}: {wrong}")
    return found


def _unequal(name: str, before: Any, now: Any) -> str:
    return "" if before == now else "; ".join(changes(before, now))


_MOST_CHANGES, _SHOWN = 6, 160


def changes(before: Any, now: Any, where: str = "") -> list[str]:
    """What differs between two JSON values, each with its path; the first few."""
    found: list[str] = []
    _walk(before, now, where, found.append)
    return [*found[:_MOST_CHANGES], *([f"… {len(found)} changes in all"] if len(found) > _MOST_CHANGES else [])]


def _walk(before: Any, now: Any, where: str, tell: Callable[[str], None]) -> None:
    if before == now:
        return
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            place = f"{where}.{key}".lstrip(".")
            if key in before and key in now:
                _walk(before[key], now[key], place, tell)
            else:
                tell(f"{place} is {'gone' if key in before else 'new'}: {_short(before.get(key, now.get(key)))}")
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for place, pair in enumerate(zip(before, now, strict=True)):
            _walk(*pair, f"{where}[{place}]", tell)
    else:
        tell(f"{where or 'value'}: {_short(before)} -> {_short(now)}")


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text)} characters)"
