"""Which cases of a test plain pytest runs, and which are long tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

FAMILIES = {
    *("llama", "olmo", "granite", "apertus", "qwen3_moe", "axk1", "gpt_oss, sinks and windows", "dots1, windows"),
    *("gemma2, windows, capped scores", "llama4_text, chunks, temperatures", "qwen3_next", "nemotron_h", "lfm2"),
}
"""Of every part that models differ in: norms, MLPs, experts, latent and recurrent layers, windows, caps and sinks."""


def few(cases: Iterable[Any], kept: int | Collection[Any] = FAMILIES) -> list[Any]:
    """Mark all cases but some as long. Each case is a test's only parameter.

    Args:
        kept: those that plain pytest runs, or how many from the first on.
    """
    return [
        pytest.param(case, marks=[pytest.mark.long] * (not (n < kept if isinstance(kept, int) else case in kept)))
        for n, case in enumerate(cases)
    ]


def together(cases: Iterable[Any], some: Collection[Any]) -> list[Any]:
    """Return parameters of a test of several cases at once: some for plain pytest, the others as a long test."""
    others = [case for case in cases if case not in some]
    return [pytest.param(some, id="some"), pytest.param(others, id="others", marks=pytest.mark.long)]
