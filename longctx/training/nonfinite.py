"""Reports of steps whose gradient is NaN or infinite, with their documents and a remedy."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

NON_FINITE_FILE = "nonfinite.jsonl"
"""File in output_dir with a line for each such step."""

REMEDY = (
    "Look at these documents; lower --learning_rate; or leave such steps out with --on_nonfinite skip. Weights and "
    "checkpoints are those of the steps before it."
)
_SHOWN = 8


class NonFiniteError(ValueError):
    """Raised on every rank for NaN or infinite gradients or weights."""


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """A step whose gradient is NaN or infinite."""

    step: int
    """Number of the step, counted from 1 as in the log."""
    grad_norm: str
    """`nan` or `inf`."""
    rows: list[int] | None
    """Row numbers of all ranks and micro-batches; None for a stream."""
    documents: list[int] | None
    """Document numbers in these rows, from 0 in data set order after --shuffle_dataset."""

    def append_to(self, path: Path) -> None:
        """Append the step to a file as a line of JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(asdict(self)) + "\n")

    def __str__(self) -> str:
        of = "of a stream"
        if self.documents is not None:
            more = f" and {len(self.documents) - _SHOWN} more" if len(self.documents) > _SHOWN else ""
            of = f"with documents {', '.join(map(str, self.documents[:_SHOWN]))}{more}"
        return f"the gradient of step {self.step}, {of}, has the norm {self.grad_norm}"
