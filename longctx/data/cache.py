"""Keys and the folder of what is kept on disk for later runs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import datasets

# Raised when the same records would now give other tokens or other rows.
_VERSION = 3


def cache_key(*parts: Any) -> str:
    """Fingerprint of everything a cached result depends on."""
    return hashlib.sha256(json.dumps([_VERSION, *parts], sort_keys=True, default=str).encode()).hexdigest()[:32]


def cache_folder() -> Path:
    """The folder of plans and digests, beside the data sets that `datasets` keeps (HF_DATASETS_CACHE)."""
    return Path(datasets.config.HF_DATASETS_CACHE) / "longctx"
