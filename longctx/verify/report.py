"""The result of a verification: a table for people, and the same as JSON for scripts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """One thing that was compared."""

    name: str
    value: str | float
    """What was found; a number is an error, relative to one device."""
    bound: str | float
    """What it should be; a number is the largest error allowed."""
    ok: bool
    detail: str
    """What was compared; where it is off, what that means and what to do."""


@dataclass(frozen=True)
class Finding:
    """Something about the machine."""

    name: str
    value: str
    remedy: str = ""
    """What to do; empty where all is well."""


def error_check(name: str, error: float, bound: float, detail: str) -> Check:
    """A relative error that must not be above its bound; NaN is. JSON has no notation for what is not finite."""
    value = error if math.isfinite(error) else str(error)
    return Check(name, value, bound, error <= bound, detail)


def culprit(checks: Sequence[Check]) -> Check | None:
    """Return the first check that failed. They are in the order of cause and effect."""
    return next((check for check in checks if not check.ok), None)


def as_table(checks: Sequence[Check]) -> str:
    """Lines of: check, value, bound, ok or OFF, detail."""
    rows = [(c.name, _text(c.value), _text(c.bound), "ok" if c.ok else "OFF", c.detail) for c in checks]
    return _aligned([("check", "value", "bound", "", ""), *rows])


def as_advice(findings: Sequence[Finding]) -> str:
    """Lines of: machine, finding, ok or what to do."""
    rows = [(finding.name, finding.value, finding.remedy or "ok") for finding in findings]
    return _aligned([("machine", "finding", ""), *rows])


def as_json(run: Mapping[str, Any], checks: Sequence[Check], machine: Sequence[Finding]) -> str:
    """One object: `ok`, `culprit` (the first check that is off, or null), `run`, `checks` and `machine`."""
    off = culprit(checks)
    result = {
        "ok": off is None,
        "culprit": off.name if off else None,
        "run": run,
        "checks": [asdict(check) for check in checks],
        "machine": [asdict(finding) for finding in machine],
    }
    return json.dumps(result, indent=2, ensure_ascii=False)


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.1e}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """All columns but the last as wide as their widest cell."""
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]]) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
