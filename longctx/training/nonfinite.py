"""Steps whose gradient is NaN or infinite: which documents they had, and what to do."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

NON_FINITE_FILE = "nonfinite.jsonl"
"""In output_dir, a line for each such step."""

REMEDY = (
    "Look at these documents; lower --learning_rate; or leave such steps out with --on_nonfinite skip. Weights and "
    "checkpoints are those of the steps before it."
)
_SHOWN = 8


class NonFiniteError(ValueError):
    """On every rank, before the weights change."""


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """One such step."""

    step: int
    """Counted from 1, as in the log."""
    grad_norm: str
    """nan or inf."""
    rows: list[int] | None
    """Of all ranks and micro-batches; None where rows have no numbers."""
    documents: list[int] | None
    """In these rows, in data set order from 0, after --shuffle_dataset."""

    def append_to(self, path: Path) -> None:
        """As a line of JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(asdict(self)) + "\n")

    def __str__(self) -> str:
        of = "of a stream"
        if self.documents is not None:
            more = f" and {len(self.documents) - _SHOWN} more" if len(self.documents) > _SHOWN else ""
            of = f"with documents {', '.join(map(str, self.documents[:_SHOWN]))}{more}"
        return f"the gradient of step {self.step}, {of}, has the norm {self.grad_norm}"
