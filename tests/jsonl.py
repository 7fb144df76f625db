"""JSON lines, one record a line, as data sets of tests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_lines(path: Path, records: Iterable[Any], end: str = "\n") -> str:
    """Write records to a file, whose folder is made; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(record, ensure_ascii=False) + end for record in records)
    path.write_text(text, encoding="utf-8", newline="")
    return str(path)
