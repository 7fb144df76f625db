"""Data sets that goldens make for themselves, in a temporary folder."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets


@contextmanager
def own_folder() -> Iterator[Path]:
    """A temporary folder, in which `datasets` keeps its cache, too."""
    before, shows = datasets.config.HF_DATASETS_CACHE, datasets.is_progress_bar_enabled()
    with tempfile.TemporaryDirectory() as folder:
        datasets.config.HF_DATASETS_CACHE = Path(folder, "cache")
        datasets.disable_progress_bars()
        try:
            yield Path(folder)
        finally:
            datasets.config.HF_DATASETS_CACHE = before
            if shows:
                datasets.enable_progress_bars()


def write_lines(path: Path, records: Sequence[Any]) -> str:
    """Write records as JSON lines; return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return str(path)
