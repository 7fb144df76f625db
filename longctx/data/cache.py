"""Keys of what `datasets` caches on disk for this stage."""

from __future__ import annotations

import hashlib
import json
from typing import Any

# Raised when the same records would now give other tokens or other rows.
_VERSION = 2


def cache_key(*parts: Any) -> str:
    """Fingerprint of everything a cached result depends on."""
    return hashlib.sha256(json.dumps([_VERSION, *parts], sort_keys=True, default=str).encode()).hexdigest()[:32]
