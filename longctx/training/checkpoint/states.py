"""Safetensors files with ranges of parameters and optimizer states, one tensor per `kind|start|name`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from longctx.training.checkpoint.files import CheckpointError, damage_named
from longctx.training.checkpoint.shards import ParameterShard
from longctx.training.checkpoint.soundness import check_values

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

    Raises:
        CheckpointError: for a file that cannot be read or does not hold ranges.
    """

    def __init__(self, folder: Path, *, last_step: int | None = None):
        """
        Args:
            last_step: the step of the checkpoint, which bounds the optimizer's step counts.
        """
        self.folder, self.last_step = folder, last_step
        self._ranges: dict[tuple[str, str], list[_Range]] = {}
        self._open: dict[Path, safe_open] = {}
        for path in sorted(folder.glob("states-*.safetensors")):
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
                self._ranges.setdefault((name, kind), []).append(_Range(int(start), stop, path, key))
        for ranges in self._ranges.values():
            ranges.sort()

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
        ranges = self._ranges.get((piece.name, kind), [])
        if not target.dim():
            if ranges:
                target.copy_(self._checked(piece.name, kind, ranges[0], slice(None)))
            return
        at, stop = piece.start, piece.start + len(target)
        for found in ranges:
            if found.stop <= at or found.start >= stop or found.start > at:
                continue
            upto = min(found.stop, stop)
            values = self._checked(piece.name, kind, found, slice(at - found.start, upto - found.start))
            target[at - piece.start : upto - piece.start].copy_(values)
            at = upto
        if at < stop:
            raise CheckpointError(
                f"{self.folder} lacks elements {at} to {stop} of {kind} of {piece.name}: it is of another model, or "
                "not all of its files are here."
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
                raise CheckpointError(f"{path} cannot be read: {error}") from None
        return self._open[path]
