"""The files that runs leave: of the model in the output folder, and of the last checkpoint.

Committed are the names of files, the names in their JSON, and the names, dtypes and shapes of their tensors. `measured`
has digests of their contents.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from tests.golden.compare import changes
from tests.golden.runs import QUICK, RUNS, inputs, outcome, tensors_of
from tests.golden.training import by_word, weights

KINDS = (
    *(
        "sp 1",
        "ring 2, FSDP2",
        "ring 2, untied head",
        "ring 2, LoRA",
        "ring 2, QLoRA",
        "ring 2, bf16",
        "ring 2, experts",
    ),
    *(
        "ring 2, evaluation and best model",
        "ring 2, weights only",
        "ring 2, DPO",
        "Ulysses 2, ZeRO-3",
        "Ulysses 2, LoRA",
    ),
)
"""Runs whose folders differ in kind."""
UNLIKE = ("trainer_state.json", "longctx.json", "training_args.bin", "run_report.html", "adapter_config.json")
"""Files with times, with the paths of this machine, or with a set whose order depends on the hash seed."""


def golden(quick: bool) -> Iterator[tuple[str, Any]]:
    for name, folder in _folders(quick):
        yield name, {path.name: _described(path) for path in sorted(folder.iterdir())}


def measured() -> Iterator[tuple[str, Any]]:
    for name, folder in _folders(quick=False):
        texts = (path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix != ".safetensors")
        yield (
            f"{name}: bytes",
            weights(folder) | {path.name: _digest(path) for path in texts if path.name not in UNLIKE},
        )


def differs(name: str, recorded: Any, now: Any) -> str:
    return "; ".join(changes(by_word(recorded), by_word(now)))


def _folders(quick: bool) -> Iterator[tuple[str, Path]]:
    for name in KINDS:
        if name not in RUNS or (quick and name not in QUICK):
            continue
        ended = outcome(name)
        yield f"{name}: output folder", ended.folder
        if ended.checkpoint:
            yield f"{name}: {ended.checkpoint.name}", ended.checkpoint


def _described(path: Path) -> Any:
    """What a file holds by name, with layers counted; "" for one that is not JSON or safetensors."""
    if path.suffix == ".safetensors":
        kinds = ((re.sub(r"layers\.\d+", "layers.*", name), kind) for name, (kind, _) in tensors_of(path).items())
        return {name: f"{count} × {kind}" for (name, kind), count in Counter(kinds).items()}
    return " ".join(sorted(json.loads(path.read_text()))) if path.suffix == ".json" else ""


def _digest(path: Path) -> str:
    """Of a text, without the folder of this process."""
    return xxhash.xxh3_64(path.read_bytes().replace(str(inputs()).encode(), b"")).hexdigest()
