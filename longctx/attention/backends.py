"""The registered attention backends. A new one is a record in a package of its own, and is imported and listed here."""

from __future__ import annotations

from longctx.attention.backend import Registry
from longctx.attention.hybrid import HYBRID
from longctx.ring.backend import GATHER, RING
from longctx.ulysses.backend import LOCAL, ULYSSES

BACKENDS = Registry()
"""All backends, in the order in which messages list them. Of two that are equal otherwise, `auto` takes the first."""

for _backend in (LOCAL, ULYSSES, RING, GATHER, HYBRID):
    BACKENDS.register(_backend)
