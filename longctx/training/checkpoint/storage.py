"""Ranges of parameters and optimizer states in safetensors files, which a run with any layout reads.

Each rank writes files of its own, with one tensor per `kind|start|name`. The index says where each range begins and in
which file it is, so that a rank opens only the files that hold its part. Weights that the model's own files hold as
they are trained are read from there.
"""

from __future__ import annotations

import functools
import json
import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from io import BufferedReader
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from longctx.model.rows import BLOCK_BYTES, StoredWeight, stored_in
from longctx.training.checkpoint.files import CheckpointError, damage_named
from longctx.training.checkpoint.shards import WEIGHT, ParameterShard
from longctx.training.checkpoint.states import check_values

INDEX = "index.json"
FILE_BYTES = 2 << 30
"""Most bytes in a file, unless one range has more, and so in host memory at a time."""

_DTYPES = ("F32", "BF16", "F16", "F64")
_FILE = re.compile(r"states-\d{5}-\d{3}\.safetensors")

Ranges = Mapping[str, Mapping[str, Sequence[int]]]
"""The ranges of a rank, as {file: {parameter: [start, stop]}}, in elements of the flattened parameter."""


def write_states(
    folder: Path,
    held: Iterable[ParameterShard],
    rank: int,
    *,
    leave_out: Collection[str] = (),
    file_bytes: int = FILE_BYTES,
) -> tuple[dict[str, dict[str, list[int]]], dict[str, bool]]:
    """Write this rank's ranges, except copies.

    Args:
        leave_out: kinds of states that are not written.

    Returns:
        The files with their ranges, as `Ranges`, and the kinds of states, with whether each is one value per parameter.
    """
    ranges: dict[str, dict[str, list[int]]] = {}
    kinds: dict[str, bool] = {}
    tensors: dict[str, Tensor] = {}
    names: dict[str, list[int]] = {}

    def write() -> None:
        file = f"states-{rank:05d}-{len(ranges):03d}.safetensors"
        save_file(tensors, folder / file)
        ranges[file] = dict(names)
        tensors.clear()
        names.clear()

    for piece in held:
        states = {kind: tensor for kind, tensor in piece.states.items() if kind not in leave_out}
        if piece.is_copy or not states:
            continue
        size = sum(tensor.nbytes for tensor in (*tensors.values(), *states.values()))
        if tensors and size > file_bytes:
            write()
        for kind, tensor in states.items():
            kinds[kind] = not tensor.dim()
            tensors[f"{kind}|{piece.start}|{piece.name}"] = tensor.detach().to("cpu", copy=True).contiguous()
        names[piece.name] = [piece.start, piece.start + piece.length]
    if tensors:
        write()
    return ranges, kinds


def write_index(
    folder: Path, ranges: Iterable[Ranges], kinds: Mapping[str, bool], parameters: Mapping[str, Sequence[int]]
) -> None:
    """Write where the ranges of all ranks are.

    Args:
        ranges: of each rank.
        kinds: as `write_states` returns them, of all ranks.
        parameters: name -> shape of each trained parameter.

    Raises:
        ValueError: if ranges overlap or leave a gap: a later run could not read the parameter.
    """
    files: list[str] = []
    held: dict[str, list[tuple[int, int, int]]] = {}
    for file, names in ((file, names) for of_rank in ranges for file, names in of_rank.items()):
        for name, (start, stop) in names.items():
            held.setdefault(name, []).append((start, stop, len(files)))
        files.append(file)
    if kinds and held.keys() != parameters.keys():
        raise ValueError(f"no rank holds a range of {sorted(held.keys() ^ parameters.keys())[0]}")
    for name, found in held.items():
        found.sort()
        borders = [0, *(border for start, stop, _ in found for border in (start, stop)), prod(parameters[name])]
        if any(before != after for before, after in list(pairwise(borders))[::2]):
            raise ValueError(f"the ranks hold {name} in ranges that overlap or leave a gap ({str(borders[1:-1])[:80]})")
    index = {
        "kinds": kinds,
        "files": files,
        "parameters": {
            name: {"starts": [start for start, *_ in found], "files": [file for *_, file in found]}
            for name, found in held.items()
        },
    }
    (folder / INDEX).write_text(json.dumps(index))


class StateReader:
    """Reads ranges from a folder's files, whatever layout wrote them. It opens only files that hold them.

    Raises:
        CheckpointError: for an index or a file that cannot be read, or that does not hold what the index says.
    """

    def __init__(self, folder: Path, parameters: Mapping[str, Sequence[int]], *, last_step: int | None = None):
        """
        Args:
            parameters: name -> shape of each trained parameter.
            last_step: the step of the checkpoint, which bounds the optimizer's step counts.
        """
        self.folder, self.parameters, self.last_step = folder, parameters, last_step
        self._stored: dict[Path, tuple[BufferedReader, dict[str, StoredWeight]]] = {}
        self._buffer = np.empty(BLOCK_BYTES, dtype=np.uint8)
        with damage_named(folder / INDEX):
            index = json.loads((folder / INDEX).read_text())
            self.kinds: dict[str, bool] = {str(kind): bool(is_scalar) for kind, is_scalar in index["kinds"].items()}
            self._files = [str(name) for name in index["files"]]
            if wrong := [name for name in self._files if not _FILE.fullmatch(name)]:
                raise ValueError(f"{wrong[0]!r} is not the name of a file of states")
            self._ranges = {
                name: _checked_ranges(name, held, prod(parameters.get(name, ())), len(self._files))
                for name, held in index["parameters"].items()
            }

    def fill(self, piece: ParameterShard) -> None:
        """Fill the piece's views with its range from the files.

        Raises:
            CheckpointError: if they lack a part of it.
        """
        for kind, target in piece.states.items():
            if kind == WEIGHT and WEIGHT not in self.kinds:
                self._fill_from_model(piece, target)
            else:
                self._fill(piece, kind, target)

    def _fill(self, piece: ParameterShard, kind: str, target: Tensor) -> None:
        if piece.name not in self._ranges:
            raise CheckpointError(f"{self.folder / INDEX} has no ranges of {piece.name}: it is of another model.")
        starts, files = self._ranges[piece.name]
        borders = [*starts, prod(piece.shape)]
        at, stop = piece.start, piece.start + piece.length
        while at < stop:
            number = bisect_right(starts, at) - 1
            start, end = borders[number : number + 2]
            upto = min(end, stop)
            path = self.folder / self._files[files[number]]
            with damage_named(path):
                key, is_scalar = f"{kind}|{start}|{piece.name}", not target.dim()
                part = target if is_scalar else target[at - piece.start : upto - piece.start]
                self._read(path, key, [] if is_scalar else [end - start], 0 if is_scalar else at - start, part)
                check_values(kind, part, name=piece.name, path=path, last_step=self.last_step)
            if is_scalar:
                return
            at = upto

    def _read(self, path: Path, key: str, shape: Sequence[int], first: int, into: Tensor) -> None:
        """Read the values of a stored tensor from the `first` on.

        A mapped file, of which the system would read ahead, is not used.
        """
        if path not in self._stored:
            with safe_open(path, framework="pt"):
                pass  # which checks the header
            self._stored[path] = path.open("rb"), dict(stored_in(path))
        file, stored = self._stored[path]
        found = stored.get(key)
        if found is None:
            raise SafetensorError(f"File does not contain tensor {key}")
        if found.shape != tuple(shape) or found.kind not in _DTYPES:
            raise ValueError(
                f"{key!r} is of type {found.kind} and shape {list(found.shape)}, expected {list(shape) or 'one value'} "
                f"of {', '.join(_DTYPES)}"
            )
        found.read(first, into, self._buffer, file)

    def _fill_from_model(self, piece: ParameterShard, target: Tensor) -> None:
        """Read a range of a weight from the model's files."""
        with damage_named(self.folder / SAFE_WEIGHTS_INDEX_NAME):
            file = self._weight_map.get(piece.name, SAFE_WEIGHTS_NAME)
            if Path(file).name != file:
                raise CheckpointError(f"{self.folder / SAFE_WEIGHTS_INDEX_NAME} names {file!r}, outside its folder.")
        path = self.folder / file
        with damage_named(path):
            self._read(path, piece.name, piece.shape, piece.start, target)
            check_values(WEIGHT, target, name=piece.name, path=path)

    @functools.cached_property
    def _weight_map(self) -> dict[str, str]:
        index = self.folder / SAFE_WEIGHTS_INDEX_NAME
        return dict(json.loads(index.read_text())["weight_map"]) if index.exists() else {}


def _checked_ranges(name: str, held: Any, numel: int, num_files: int) -> tuple[list[int], list[int]]:
    """Return where the ranges of a parameter start, and the files that hold them."""
    starts, files = held["starts"], held["files"]
    if not all(type(number) is int for number in (*starts, *files)) or len(starts) != len(files) or not starts:
        raise TypeError(f"{name} has the ranges {str(held)[:60]}")
    borders = [*starts, numel]
    if starts[0] != 0 or any(before >= after for before, after in pairwise(borders)):
        raise ValueError(f"the ranges of {name} start at {str(starts)[:60]}, of {numel:,} elements")
    if not all(0 <= file < num_files for file in files):
        raise ValueError(f"{name} is in the files {str(files)[:60]}, of {num_files}")
    return starts, files
