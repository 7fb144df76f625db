"""`exactness.json`: whether the first step of a run was compared with one device, and how closely it matched."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from longctx.untrusted.files import written_whole

EXACTNESS_FILE = "exactness.json"
"""The name of the file, in output_dir."""

TOLERANCES = {"fp32": 1e-5, "bf16": 1e-2}
"""Largest relative difference from one device in fp32, by the precision of the run: what rounding alone makes."""

NOT_THE_DEMO = "only the demo compares its first step. longctx verify compares a step of this model in this layout"
NOT_YET = "the demo compares it at its end, which this run has not reached"
NOT_LOGGED = "the log has no entry of step 1 alone, which --logging_steps 1 would write"


@dataclass(frozen=True, kw_only=True)
class Exactness:
    """The contents of the file. Without a comparison, only `compared` and `reason` have a value."""

    compared: bool
    reason: str | None = None
    """Why there was no comparison."""
    precision: str | None = None
    loss: tuple[float, float] | None = None
    """The logged loss of step 1, and that of one device in fp32, from the same weights and data."""
    grad_norm: tuple[float, float] | None = None
    difference: float | None = None
    """The larger of the two relative differences."""
    tolerance: float | None = None
    matched: bool | None = None
    """Whether the difference is within the tolerance."""

    @classmethod
    def of_start(cls, *, is_demo: bool, resume_from: Path | None) -> Exactness:
        """Return what is known when training starts: what an earlier start has found, if the run goes on from it."""
        earlier = None if resume_from is None else cls.read(resume_from.parent)
        if earlier is not None and earlier.compared:
            return earlier
        return cls(compared=False, reason=NOT_YET if is_demo else NOT_THE_DEMO)

    @classmethod
    def of_step(cls, loss: tuple[float, float], grad_norm: tuple[float, float], *, bf16: bool) -> Exactness:
        """Return the result of a comparison; each pair of numbers is that of the run and of one device."""
        difference = max(abs(run / one_device - 1) for run, one_device in (loss, grad_norm))
        precision = "bf16" if bf16 else "fp32"
        return cls(
            compared=True,
            precision=precision,
            loss=loss,
            grad_norm=grad_norm,
            difference=difference,
            tolerance=TOLERANCES[precision],
            matched=difference <= TOLERANCES[precision],
        )

    @classmethod
    def read(cls, folder: Path) -> Exactness | None:
        """Return what the file in a folder says; None without a file that this release can read."""
        try:
            found = cls(**json.loads((folder / EXACTNESS_FILE).read_text(encoding="utf-8")))
            str(found)  # fails for values of other types
        except (OSError, ValueError, TypeError, IndexError, RecursionError):
            return None
        return None if found.compared and (found.loss is None or found.grad_norm is None) else found

    def write(self, folder: Path) -> None:
        """Write the file atomically."""
        with written_whole(folder / EXACTNESS_FILE) as unfinished:
            unfinished.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    def __str__(self) -> str:
        if not self.compared or self.loss is None or self.grad_norm is None:
            return f"step 1 was not compared with one device: {self.reason}"
        ours, theirs = ("in bf16 ", "in fp32 ") if self.precision == "bf16" else ("", "")
        numbers = "loss {:.6f} and {:.6f}, gradient norm {:.6f} and {:.6f}".format(*self.loss, *self.grad_norm)
        if not self.matched:
            by = f"{self.difference:.0e}, more than {self.tolerance:.0e}"
            return f"step 1 {ours}differs from one device {theirs}by {by}: {numbers}"
        return f"step 1 {ours}matched one device {theirs}to {self.difference:.0e}: {numbers}"
