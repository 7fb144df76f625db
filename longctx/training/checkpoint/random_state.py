"""The states of random number generators, kept in a JSON file for each rank."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longctx.training.checkpoint.files import damage_named


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
