"""Data sets that goldens make for themselves, in a temporary folder."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
