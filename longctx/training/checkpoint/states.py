"""Checks that the values and side files of a checkpoint are sound, and the states of random number generators."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from longctx.training.checkpoint.files import CheckpointError, Manifest, damage_named
from longctx.training.checkpoint.shards import name_without_wrappers


def random_file(folder: Path, rank: int) -> Path:
    """Return the file with the states of a rank's random number generators."""
    return folder / f"random-{rank:05d}.json"


def read_random_state(path: Path) -> dict[str, Any]:
    """Read the states of Python's, NumPy's and torch's generators, and check them on new generators.

    Raises:
        CheckpointError: if the file is damaged.
    """
    with damage_named(path):
        state = json.loads(path.read_text())
        version, numbers, gauss = state["python"]
        name, keys, *rest = state["numpy"]
        read: dict[str, Any] = {
            "python": (version, tuple(numbers), gauss),
            "numpy": (name, np.array(keys, dtype=np.uint32), *rest),
            "torch": torch.tensor(state["torch"], dtype=torch.uint8),
        }
        random.Random().setstate(read["python"])
        np.random.RandomState().set_state(read["numpy"])
        torch.Generator().set_state(read["torch"])
        if "cuda" in state:
            read["cuda"] = torch.tensor(state["cuda"], dtype=torch.uint8)
            if torch.cuda.is_available():
                torch.Generator("cuda").set_state(read["cuda"])
        return read


def random_state() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's generators as plain values."""
    version, numbers, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    state = {
        "python": [version, list(numbers), gauss],
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state().tolist(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().tolist()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Set the generators to what `read_random_state` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


_NON_NEGATIVE = frozenset({"exp_avg_sq", "square_avg", "step"})
"""Optimizer states that are never negative: means of squares, and counts."""

STATES_OF = {
    "adamw_torch": {"exp_avg": False, "exp_avg_sq": False, "step": True},
    "adamw_torch_fused": {"exp_avg": False, "exp_avg_sq": False, "step": True},
    "rmsprop": {"square_avg": False, "step": True},
    "sgd": {},
}
"""Supported --optim -> its states, with whether each is one value per parameter."""


def check_values(kind: str, values: Tensor, *, name: str, path: Path, last_step: int | None = None) -> None:
    """Check that values are finite, means of squares and counts not negative, and step counts at most `last_step`.

    Args:
        values: [n], or [] for one value of the whole parameter.
        last_step: the step of the checkpoint; None if unknown.

    Raises:
        CheckpointError: if not.
    """
    if not values.numel():
        return
    least, most = (float(value) for value in values.aminmax())
    if not (math.isfinite(least) and math.isfinite(most)):
        found = f"a value of {least if not math.isfinite(least) else most}"
    elif kind in _NON_NEGATIVE and least < 0:
        found = f"a value of {least:g}, below 0"
    elif kind == "step" and last_step is not None and not (most <= last_step and most.is_integer()):
        found = f"{most:g}, and the checkpoint is of step {last_step}"
    else:
        return
    raise CheckpointError(f"{path}: {kind} of {name} holds {found}. Resume from an earlier checkpoint.")


def check_kinds(folder: Path, optim: str, kinds: Mapping[str, bool], *, may_be_empty: bool) -> None:
    """Check that a checkpoint has exactly the states of this optimizer.

    Args:
        kinds: of states in the checkpoint, with whether each is one value per parameter.

    Raises:
        CheckpointError: if not.
    """
    if kinds != STATES_OF[optim] and (kinds or not may_be_empty):
        raise CheckpointError(
            f"{folder} holds the optimizer states {', '.join(sorted(kinds)) or 'of no kind'}, and --optim {optim} has "
            f"{', '.join(sorted(STATES_OF[optim])) or 'none'}. Resume from an earlier checkpoint."
        )


def check_side_files(folder: Path, manifest: Manifest, rank: int) -> None:
    """Check the other JSON files that a resumed run reads: the trainer's state, and this rank's random state.

    Raises:
        CheckpointError: with the file that is missing, damaged or of another step.
    """
    path = folder / TRAINER_STATE_NAME
    with damage_named(path):
        values = json.loads(path.read_text())
        for name, kinds in _STATE_TYPES.items():
            if not isinstance(values[name], kinds) or isinstance(values[name], bool):
                raise TypeError(f"{name} is {str(values[name])[:60]}")
        if values["global_step"] != manifest.step:
            raise ValueError(f"global_step is {values['global_step']}, and the checkpoint is of step {manifest.step}")
        for entry in values["log_history"]:
            if not _is_logged(entry):
                raise TypeError(f"log_history has an entry {str(entry)[:60]!r}")
        for state in (values["stateful_callbacks"] or {}).values():
            for part in state if isinstance(state, list) else [state]:
                if not isinstance(part["attributes"], dict):
                    raise TypeError("stateful_callbacks has no attributes")
        TrainerState.load_from_json(str(path))
    if (own := random_file(folder, rank)).is_file():
        read_random_state(own)


_STATE_TYPES: Mapping[str, Any] = {
    "best_global_step": int | None,
    "best_metric": int | float | None,
    "best_model_checkpoint": str | None,
    "epoch": int | float,
    "global_step": int,
    "log_history": list,
    "max_steps": int,
    "num_train_epochs": int | float,
    "stateful_callbacks": dict | None,
    "total_flos": int | float,
}
"""Fields of trainer_state.json that a resumed run uses -> their types."""

_LOGGED = ("loss", "eval_loss", "grad_norm", "learning_rate", "num_tokens")


def _is_logged(entry: Mapping[str, Any]) -> bool:
    """Whether an entry of the log has what the page of a run and the model card take for granted."""
    numbers = [entry["step"], *(entry.get(name, 0) for name in _LOGGED)]
    numbers += [*_leaves(entry.get("seconds", {})), *_leaves(entry.get("memory", {}))]
    return isinstance(entry.get("packing", {}), dict) and all(isinstance(number, int | float) for number in numbers)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _leaves(part)
    else:
        yield value


def nonfinite_weights(model: nn.Module) -> list[str]:
    """Return the names of trained parameters with NaN or infinite values in this rank's part."""
    found = []
    for name, parameter in model.named_parameters():
        held = getattr(parameter, "ds_tensor", parameter.data) if parameter.requires_grad else None
        if isinstance(held, DTensor):
            held = held.to_local()
        if held is not None and held.numel() and not torch.isfinite(torch.linalg.vector_norm(held, math.inf)):
            found.append(name_without_wrappers(name))
    return found
