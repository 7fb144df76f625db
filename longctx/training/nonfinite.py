"""Steps whose gradient is NaN or infinite: which documents they had, and whether the run goes on without them."""

from __future__ import annotations

import json
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn

from longctx.packing import PackedStream

NON_FINITE_FILE = "nonfinite.jsonl"
"""File in output_dir with a line for each such step: its number as in the log, the norm, and the numbers of rows and
documents, from 0 in data set order after --shuffle_dataset; None for a stream."""
_SHOWN = 8


class NonFiniteError(ValueError):
    """Raised on every rank for NaN or infinite gradients or weights."""


def meet_nonfinite(trainer: Any, model: nn.Module, grad_norm: float) -> None:
    """Record the step, and skip it; DeepSpeed skips it by itself.

    Raises:
        NonFiniteError: with --on_nonfinite stop.
    """
    rows, documents = documents_of_step(trainer)
    step, path = trainer.state.global_step + 1, Path(trainer.args.output_dir) / NON_FINITE_FILE
    if trainer.args.should_save:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            line = {"step": step, "grad_norm": str(grad_norm), "rows": rows, "documents": documents}
            file.write(json.dumps(line) + "\n")
    of = "of a stream"
    if documents is not None:
        more = f" and {len(documents) - _SHOWN} more" if len(documents) > _SHOWN else ""
        of = f"with documents {', '.join(map(str, documents[:_SHOWN]))}{more}"
    met = f"the gradient of step {step}, {of}, has the norm {grad_norm}"
    if trainer.on_nonfinite == "stop":
        raise NonFiniteError(
            f"{met}; it is written to {path}. Look at these documents; lower --learning_rate; or leave such steps out "
            "with --on_nonfinite skip. Weights and checkpoints are those of the steps before it."
        )
    if trainer.args.should_save:
        warnings.warn(f"{met}: the step is left out; see {path}", stacklevel=2)
    if not trainer.is_deepspeed_enabled:
        model.zero_grad()  # the optimizer skips weights without a gradient


def documents_of_step(trainer: Any) -> tuple[list[int] | None, list[int] | None]:
    """Return the numbers of the rows and of the documents that the current step has on all ranks; None for a stream."""
    if isinstance(trainer.train_dataset, PackedStream):
        return None, None
    sampler = trainer.step_sampler(dp_rank=0)
    epoch, step = divmod(trainer.state.global_step, sampler.num_steps)
    sampler.set_epoch(epoch)
    rows = next(islice(sampler.steps(), step, None)).tolist()
    packing = getattr(trainer.train_dataset, "packing", None)
    return rows, rows if packing is None else [int(n) for row in rows for n in packing.documents(row)]
