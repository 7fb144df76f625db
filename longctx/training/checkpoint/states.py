"""The states of a checkpoint, and checks that its values and files are sound.

Safetensors files hold ranges of parameters and optimizer states, one tensor per `kind|start|name`. A JSON file for each
rank holds the states of its random number generators.
"""

from __future__ import annotations

import json
import math
import random
from bisect import insort
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from longctx.training.checkpoint.files import CheckpointError, Manifest, damage_named
from longctx.training.checkpoint.shards import ParameterShard, name_without_wrappers


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
    "adamw_torch": ({"exp_avg", "exp_avg_sq"}, {"step"}),
    "adamw_torch_fused": ({"exp_avg", "exp_avg_sq"}, {"step"}),
    "rmsprop": ({"square_avg"}, {"step"}),
    "sgd": (set(), set()),
}
"""Supported --optim -> states with a value per element, and those with one per parameter."""


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


def check_kinds(folder: Path, optim: str, vectors: set[str], scalars: set[str], *, may_be_empty: bool) -> None:
    """Check that a checkpoint has exactly the states of this optimizer.

    Raises:
        CheckpointError: if not.
    """
    if may_be_empty and not vectors and not scalars:
        return
    expected, found = set.union(*STATES_OF[optim]), vectors | scalars
    if (vectors, scalars) != STATES_OF[optim]:
        raise CheckpointError(
            f"{folder} holds the optimizer states {', '.join(sorted(found)) or 'of no kind'}, and --optim {optim} has "
            f"{', '.join(sorted(expected)) or 'none'}. Resume from an earlier checkpoint."
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
            if not all(
                isinstance(part["attributes"], dict) for part in (state if isinstance(state, list) else [state])
            ):
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


FILE_BYTES = 2 << 30
"""Most bytes in a file, unless one tensor has more, and so in host memory at a time."""


_DTYPES = ("F32", "BF16", "F16", "F64")


def write_states(
    folder: Path, held: Iterable[ParameterShard], rank: int, *, file_bytes: int = FILE_BYTES
) -> list[Path]:
    """Write this rank's ranges, except copies, and return the files."""
    files: list[Path] = []
    tensors: dict[str, Tensor] = {}
    size = 0
    for piece in held:
        if piece.is_copy:
            continue
        for kind, tensor in piece.states.items():
            if size and size + tensor.nbytes > file_bytes:
                files.append(_write(folder, tensors, rank, len(files)))
                tensors, size = {}, 0
            tensors[f"{kind}|{piece.start}|{piece.name}"] = tensor.detach().to("cpu", copy=True).contiguous()
            size += tensor.nbytes
    if tensors:
        files.append(_write(folder, tensors, rank, len(files)))
    return files


def _write(folder: Path, tensors: dict[str, Tensor], rank: int, number: int) -> Path:
    path = folder / f"states-{rank:05d}-{number:03d}.safetensors"
    save_file(tensors, path)
    return path


def _parts(path: Path, key: str) -> list[str]:
    parts = key.split("|", 2)
    if len(parts) < 3 or not parts[1].isdecimal():
        raise CheckpointError(f"{path} holds {key!r}, expected 'kind|start|name'. Resume from an earlier checkpoint.")
    return parts


class _Range(NamedTuple):
    start: int
    stop: int
    """End of the range in the flattened parameter; `start` for a single value."""
    path: Path
    key: str


class StateReader:
    """Reads ranges from a folder's files, whatever layout wrote them.

    It opens the files of one rank after another until it has what it is asked for. On the layout that wrote them, they
    are those of the rank itself.

    Raises:
        CheckpointError: for a file that cannot be read or does not hold ranges.
    """

    def __init__(self, folder: Path, *, rank: int = 0, num_ranks: int = 1, last_step: int | None = None):
        """
        Args:
            rank, num_ranks: of the reader, from which it knows where to look first.
            last_step: the step of the checkpoint, which bounds the optimizer's step counts.
        """
        self.folder, self.last_step = folder, last_step
        self._ranges: dict[tuple[str, str], list[_Range]] = {}
        self._open: dict[Path, safe_open] = {}
        files = sorted(folder.glob("states-*.safetensors"))
        of_ranks = [[*of_rank] for _, of_rank in groupby(files, key=lambda path: path.name.split("-")[1])]
        middle = (rank + 0.5) * len(of_ranks) / num_ranks - 0.5
        self._unread = [of_ranks[n] for n in sorted(range(len(of_ranks)), key=lambda n: abs(n - middle))]
        self._read_next()

    def find(self, kinds: set[str]) -> None:
        """Open files until all of these kinds of states are among them, or none is left."""
        while not kinds <= {kind for _, kind in self._ranges} and self._read_next():
            pass

    def _read_next(self) -> bool:
        """Open the files of one more rank, and return whether there was one."""
        if not self._unread:
            return False
        for path in self._unread.pop(0):
            file = self._file(path)
            for key in file.keys():  # noqa: SIM118  (no mapping)
                kind, start, name = _parts(path, key)
                shape, dtype = file.get_slice(key).get_shape(), file.get_slice(key).get_dtype()
                if len(shape) > 1 or dtype not in _DTYPES:
                    raise CheckpointError(
                        f"{path} holds {key!r} of type {dtype} and shape {shape}; expected a flat range of "
                        f"{', '.join(_DTYPES)}. Resume from an earlier checkpoint."
                    )
                stop = int(start) + (shape[0] if shape else 0)
                insort(self._ranges.setdefault((name, kind), []), _Range(int(start), stop, path, key))
        return True

    def kinds(self, *, scalars: bool) -> list[str]:
        """Return the kinds of states with one value per parameter if `scalars`, else one per element."""
        found = {kind for (_, kind), ranges in self._ranges.items() if (ranges[0].start == ranges[0].stop) == scalars}
        return sorted(found)

    def fill(self, piece: ParameterShard, *, only: Iterable[str] | None = None) -> None:
        """Fill the piece's views with its range from the files.

        Raises:
            CheckpointError: if they lack a part of it.
        """
        for kind, target in piece.states.items():
            if only is None or kind in only:
                self._fill(piece, kind, target)

    def _fill(self, piece: ParameterShard, kind: str, target: Tensor) -> None:
        if not target.dim():  # in the files of the parameter, which are open
            if ranges := self._ranges.get((piece.name, kind)):
                target.copy_(self._checked(piece.name, kind, ranges[0], slice(None)))
            return
        at, stop = piece.start, piece.start + len(target)
        while at < stop:
            for found in self._ranges.get((piece.name, kind), ()):
                if found.stop <= at or found.start >= stop or found.start > at:
                    continue
                upto = min(found.stop, stop)
                values = self._checked(piece.name, kind, found, slice(at - found.start, upto - found.start))
                target[at - piece.start : upto - piece.start].copy_(values)
                at = upto
            if at < stop and not self._read_next():
                raise CheckpointError(
                    f"{self.folder} lacks elements {at} to {stop} of {kind} of {piece.name}: it is of another model, "
                    "or not all of its files are here."
                )

    def _checked(self, name: str, kind: str, found: _Range, part: slice) -> Tensor:
        """Read values, and check that training can continue from them.

        Raises:
            CheckpointError: if not, or if a single value's entry holds several or none.
        """
        with damage_named(found.path):
            is_scalar = found.start == found.stop
            file = self._file(found.path)
            values: Tensor = file.get_tensor(found.key) if is_scalar else file.get_slice(found.key)[part]
            if is_scalar and values.numel() != 1:
                raise ValueError(f"{found.key!r} has {values.numel()} values")
        check_values(kind, values, name=name, path=found.path, last_step=self.last_step)
        return values

    def _file(self, path: Path) -> safe_open:
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt").__enter__()
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} cannot be read ({error}). Resume from an earlier checkpoint.") from None
        return self._open[path]
