"""Formulas for a rank of FSDP2: the bytes that it reads, writes, sends and holds in host memory, and the seconds.

They cover the start of a run, a save and a resume.

Notation: P parameters, R ranks. FSDP2 cuts each parameter along its rows, so that rank r has the r-th of R equal
chunks, rounded up to whole rows. All sizes are in bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import prod
from typing import Any, NamedTuple

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from longctx.model.files import on_meta
from longctx.training.checkpoint.storage import FILE_BYTES as STATES_FILE
from longctx.training.checkpoint.storage import Ranges
from longctx.training.checkpoint.weights import FILE_BYTES as WEIGHTS_FILE
from longctx.training.checkpoint.weights import names_kept

NODE = 8
"""Ranks of a node."""
BUFFER = 4 << 20
"""Through which a rank reads rows."""
FIXED, MODULE = 6 << 20, 36 << 10
"""Host memory of a loading rank that does not grow with the model's width: once, and for each parameter's module."""
MEETINGS, GATHERINGS = 9, 2
"""Of all ranks over the store in a save, and how many of these gather reports: of weights, and of all files."""
STATES = ("exp_avg", "exp_avg_sq", "step")
DIGEST = "0" * 32
HEAD = "lm_head.weight"
"""The parameter that a model with a tied head does not have."""
RANDOM = 33_861
"""Bytes of the states of a rank's random number generators."""
MANIFEST_FIXED = 3_000
"""Bytes of longctx.json that are of settings, the model's configuration and files that do not depend on ranks."""
_SECONDS = dict.fromkeys(("data", "attention", "communication", "saving", "rest"), 0.123456789012345)
_METRICS = {
    "sums": [0.0] * 7,
    "total_tokens": 10**6,
    "longest_row": 10**5,
    "elapsed": 1000.123456789,
    "seconds": _SECONDS,
}
PROGRESS = {"metrics": _METRICS, "has_seen_labels": True, "loss": 0.0, "last_logged": 10, "total_loss": 123.45678901234}
"""What longctx.json says of a rank."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """What the formulas need of a model."""

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    """Of its parameters, all of which are trained."""
    stored: Mapping[str, tuple[int, ...]]
    """Of the tensors of its files, in the order of the parameters."""
    is_converted: bool = False
    """Whether Transformers' files hold weights of other names or shapes, which ranks cannot read by rows."""
    has_buffers: bool = False
    """Whether its files hold tensors that are not trained."""
    weights_file: int = WEIGHTS_FILE
    states_file: int = STATES_FILE

    @classmethod
    def of(cls, name: str, config: PretrainedConfig) -> Model:
        """Make the model on the meta device, and look at its parameters."""
        model = on_meta(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)
        shapes = {key: tuple(parameter.shape) for key, parameter in model.named_parameters()}
        stored = revert_weight_conversion(model, dict(model.named_parameters()))
        saved = model.state_dict().keys()
        return cls(
            name=name,
            shapes=shapes,
            stored={key: tuple(tensor.shape) for key, tensor in stored.items()},
            is_converted=not shapes.keys() <= names_kept(model),
            has_buffers=any(name not in shapes for name in saved if name != HEAD),
        )

    @cached_property
    def numel(self) -> int:
        """P."""
        return sum(map(prod, self.shapes.values()))

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of states that the ranges hold: weights as well, where the model's files do not hold them as trained."""
        return ("weight", *STATES) if self.is_converted else STATES

    @cached_property
    def files(self) -> list[list[str]]:
        """Return the tensors of each file of weights: whole layers in turn, as long as they fit."""
        layers: dict[str, list[str]] = {}
        for name in self.stored:
            found = re.match(r".*?\.\d+\.", name)
            layers.setdefault(found[0] if found else name, []).append(name)
        files: list[list[str]] = [[]]
        size = 0
        for names in layers.values():
            added = 4 * sum(prod(self.stored[name]) for name in names)
            if files[-1] and size + added > self.weights_file:
                files.append([])
                size = 0
            files[-1] += names
            size += added
        return files


def chunk(shape: tuple[int, ...], rank: int, num_ranks: int) -> tuple[int, int]:
    """Return the range (start, stop) of a flattened parameter that a rank holds, in elements."""
    rows, width = -(-shape[0] // num_ranks), prod(shape[1:])
    return min(rank * rows, shape[0]) * width, min((rank + 1) * rows, shape[0]) * width


def elements(model: Model, rank: int, num_ranks: int) -> int:
    """Return how many elements a rank has; rank 0 has the most, about P / R."""
    return sum(stop - start for start, stop in (chunk(shape, rank, num_ranks) for shape in model.shapes.values()))


# Start


def read_in_loading(model: Model, rank: int, num_ranks: int, *, stored: int = 2) -> int:
    """Return the bytes of weights that a rank reads: its rows, or all of a converted model on rank 0.

    Args:
        stored: bytes of a weight in the files.
    """
    if model.is_converted:
        return stored * model.numel * (rank == 0)
    return stored * elements(model, rank, num_ranks)


def opened_in_loading(model: Model, rank: int, num_ranks: int, *, num_files: int) -> int:
    """Return how often a rank opens files of weights.

    It opens each for its header three times, once more where a tied head might be stored, and once for each tensor.
    """
    if model.is_converted:
        raise ValueError("ranks do not read these weights by rows")
    return (3 + (HEAD not in model.shapes)) * num_files + sum(
        start < stop for start, stop in map_chunks(model, rank, num_ranks)
    )


def map_chunks(model: Model, rank: int, num_ranks: int) -> Iterator[tuple[int, int]]:
    """Yield the range that a rank holds of each parameter, in the order of the parameters. A range may be empty."""
    return (chunk(shape, rank, num_ranks) for shape in model.shapes.values())


def host_in_loading(model: Model, rank: int, num_ranks: int, *, on_host: bool = True) -> int:
    """Return the peak of a rank's host memory while it loads, beyond what its imports take.

    Of a converted model, rank 0 has an fp32 copy, which it sends parameter by parameter. Pages of files that it has
    mapped, which the system can take back, are left out.

    Args:
        on_host: whether shards are in host memory, which they are on the CPU and where parameters are offloaded. They
            are fp32. On a GPU, only the buffer is.
    """
    shard = 4 * elements(model, 0, num_ranks) * on_host
    beside = BUFFER
    if model.is_converted:
        beside = 4 * (model.numel if rank == 0 else max(map(prod, model.shapes.values())) * on_host)
    return shard + beside + FIXED + MODULE * len(model.shapes)


# Save


def header(names: Mapping[str, list[int]], *, text: bool = False) -> int:
    """Return the bytes of a safetensors file's header.

    Args:
        names: tensor -> its shape; all are fp32.
        text: whether the file says what wrote it.
    """
    said: dict[str, Any] = {"__metadata__": {"format": "pt"}} if text else {}
    at = 0
    for name in sorted(names):
        end = at + 4 * prod(names[name])
        said[name] = {"dtype": "F32", "shape": names[name], "data_offsets": [at, end]}
        at = end
    length = len(json.dumps(said, separators=(",", ":")))
    return 8 + -(-length // 8) * 8


def weights_written(model: Model, rank: int, num_ranks: int) -> list[int]:
    """Return the sizes of the files of weights that a rank writes: file n is written by rank n mod R."""
    mine = model.files[rank::num_ranks]
    shapes = ({name: list(model.stored[name]) for name in names} for names in mine)
    return [header(held, text=True) + 4 * sum(map(prod, held.values())) for held in shapes]


def ranges_of(model: Model, rank: int, num_ranks: int) -> Ranges:
    """Return the ranges that a rank writes, by file: another file begins when the next range would not fit."""
    files: dict[str, dict[str, list[int]]] = {}
    size = 0
    for name, shape in model.shapes.items():
        start, stop = chunk(shape, rank, num_ranks)
        if start == stop:
            continue
        added = 4 * (stop - start) * (len(model.kinds) - 1) + 4
        if not files or size + added > model.states_file:
            file = f"states-{rank:05d}-{len(files):03d}.safetensors"
            files[file], size = {}, 0
        files[file][name] = [start, stop]
        size += added
    return files


def states_written(model: Model, ranges: Ranges) -> list[int]:
    """Return the sizes of a rank's files of states: two moments of fp32 for each element, and a count of steps."""
    return [_states_file(model, held) for held in ranges.values()]


def _states_file(model: Model, held: Mapping[str, Sequence[int]]) -> int:
    shapes = {
        f"{kind}|{start}|{name}": [] if kind == "step" else [stop - start]
        for name, (start, stop) in held.items()
        for kind in model.kinds
    }
    return header(shapes) + 4 * sum(map(prod, shapes.values()))


def host_in_saving(weights: Sequence[int], states: Sequence[int], *, is_async: bool = False) -> int:
    """Return a rank's host memory while it saves: the larger of a file of weights and a file of states.

    Args:
        weights, states: the sizes of the rank's files.
        is_async: whether copies of all of them are made first, as with --save_async.
    """
    return sum((*weights, *states)) if is_async else max((*weights, *states), default=0)


def report_of(model: Model, rank: int, ranges: Ranges, num_ranks: int) -> int:
    """Return the bytes of what a rank tells rank 0 in a save: its weights, its files and its progress."""
    weights, states = weights_written(model, rank, num_ranks), states_written(model, ranges)
    count = len(model.files)
    numbers = range(rank + 1, count + 1, num_ranks)
    names = [
        f"model-{number:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors" for number in numbers
    ]
    files = dict(zip([*names, *ranges], [*weights, *states], strict=True)) | {f"random-{rank:05d}.json": RANDOM}
    described = {name: {"bytes": size, "xxh3": DIGEST} for name, size in files.items()}
    kinds = {kind: kind == "step" for kind in model.kinds}
    of_files = {"files": described, "ranges": ranges, "kinds": kinds, "progress": PROGRESS, "lanes": {}}
    held = zip(names, weights, model.files[rank::num_ranks], strict=True)
    of_weights = [[dict.fromkeys(tensors, file), size] for file, size, tensors in held]
    return len(json.dumps(of_files)) + len(json.dumps(of_weights))


def calls_in_saving(rank: int, num_ranks: int) -> int:
    """Return how often a rank writes to the store in a save; rank 0 also deletes each rank's reports.

    Ranks that wait for others ask again and again, less and less often, which depends on time and is not counted.
    """
    return 2 * MEETINGS + (MEETINGS + GATHERINGS * num_ranks if rank == 0 else 0)


def index_bytes(model: Model, layout: Sequence[Ranges]) -> int:
    """Return the size of index.json, which every rank reads that resumes: two numbers for each range.

    Args:
        layout: the ranges of all ranks.
    """
    files = [*chain.from_iterable(layout)]
    numbers = {file: number for number, file in enumerate(files)}
    held: dict[str, dict[str, list[int]]] = {}
    for ranges in layout:
        for file, names in ranges.items():
            for name, (start, _) in names.items():
                of = held.setdefault(name, {"starts": [], "files": []})
                of["starts"].append(start)
                of["files"].append(numbers[file])
    kinds = {kind: kind == "step" for kind in model.kinds}
    return len(json.dumps({"kinds": kinds, "files": files, "parameters": held}))


def manifest_bytes(model: Model, layout: Sequence[Ranges]) -> int:
    """Return the size of longctx.json, which every rank reads that resumes: files, shapes and the ranks' progress."""
    weights = [f"model-{number:05d}-of-00000.safetensors" for number, _ in enumerate(model.files)]
    names = [*weights, *chain.from_iterable(layout), *(f"random-{rank:05d}.json" for rank, _ in enumerate(layout))]
    files = {name: {"bytes": 10**9, "xxh3": DIGEST} for name in names}
    said = {"parameters": model.shapes, "progress": {"ranks": [PROGRESS] * len(layout)}, "files": files}
    return len(json.dumps(said, indent=1)) + MANIFEST_FIXED


# Resume


def read_in_resuming(model: Model, rank: int, num_ranks: int) -> int:
    """Return the bytes that a rank reads of weights and states: 12 for each element, and a count of steps a tensor."""
    tensors = sum(start < stop for start, stop in map_chunks(model, rank, num_ranks))
    return 12 * elements(model, rank, num_ranks) + 4 * tensors


def files_in_resuming(model: Model, rank: int, num_ranks: int, num_writers: int) -> tuple[int, int]:
    """Return how many files of states and of weights a rank opens that resumes.

    Args:
        num_ranks: that resume.
        num_writers: ranks that wrote the checkpoint.
    """
    layout: dict[int, Ranges] = {}
    states, tensors = set(), set()
    for name, shape in model.shapes.items():
        start, stop = chunk(shape, rank, num_ranks)
        if start == stop:
            continue
        tensors.add(name)
        written = chunk(shape, 0, num_writers)[1]  # by each
        for writer in range(start // written, -(-stop // written)):
            if writer not in layout:
                layout[writer] = ranges_of(model, writer, num_writers)
            states |= {file for file, names in layout[writer].items() if name in names}
    weights = 0 if model.is_converted else sum(bool(tensors & {*names}) for names in model.files)
    return len(states), weights


def read_in_checking(model: Model, layout: Sequence[Ranges], num_ranks: int) -> int:
    """Return what all ranks that resume read to check a checkpoint: every file once, and a few small ones each.

    Each of them reads longctx.json twice, and its own random state again.
    """
    written = 4 * (len(model.kinds) - 1) * model.numel + 4 * model.numel
    random = RANDOM * (len(layout) + min(num_ranks, len(layout)))
    return written + index_bytes(model, layout) + random + 2 * num_ranks * manifest_bytes(model, layout)


def host_in_resuming(model: Model, num_ranks: int) -> int:
    """Return a rank's host memory while it resumes: its moments, which it reads through a buffer."""
    return 8 * elements(model, 0, num_ranks) + BUFFER


# Seconds


class Bandwidth(NamedTuple):
    """Bytes per second of files."""

    node: float
    """That a node reads or writes."""
    storage: float
    """That all nodes together read or write."""

    def of(self, total: float, most: float) -> float:
        """Return the seconds that the bytes of all nodes, of which one has the most, take."""
        return max(total / self.storage, most / self.node)


def seconds(model: Model, num_ranks: int, written: Sequence[int], speed: Bandwidth) -> list[float]:
    """Return the seconds that files take when a run starts, saves and resumes, at a stated bandwidth.

    - Start: rank 0 digests the model's files where there are several nodes or files hold what is not trained (once: the
      digests are kept), and ranks read their rows, or rank 0 all of them.
    - Save: ranks write files of weights in turn, each while the others gather theirs, so that the first node has most.
      Then all ranks write their states at once.
    - Resume: ranks share the digests of all files, and read what they need.

    Args:
        written: bytes of states that each rank writes.
    """
    whole, weights = 2 * model.numel, 4 * model.numel
    is_digested = num_ranks > NODE or model.has_buffers
    first = sum(elements(model, rank, num_ranks) for rank in range(min(NODE, num_ranks)))  # of a node
    states = speed.of(sum(written), sum(written[:NODE]))
    files = [4 * sum(prod(model.stored[name]) for name in file) for file in model.files]
    most = sum(size for number, size in enumerate(files) if number % num_ranks < NODE)
    checked = weights + sum(written)
    return [
        speed.of(whole, whole) * is_digested + speed.of(whole, whole if model.is_converted else 2 * first),
        speed.of(weights, most) + states,
        speed.of(checked, checked * min(NODE, num_ranks) / num_ranks) + speed.of(12 * model.numel, 12 * first),
    ]
