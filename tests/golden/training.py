"""What training runs do, step by step: counts, the log, what they save for resuming, and the files that they leave.

Committed are integers, names and learning rates, with losses and gradient norms in four digits, which must agree to
0.2%; of files, their names, the names in their JSON, and names, dtypes and shapes of tensors. `measured` has the same
runs' losses and everything else in the log, in all digits, and a digest of the final weights. The committed checkpoint
must resume, to the committed losses.
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
from tests.golden.runs import QUICK, RUNS, Outcome, flat, outcome, tensors_of

TIMED = re.compile(r"second|runtime|memory|mfu|(attention|communication|data)_fraction")
"""Names in the log of what is measured, and never the same twice."""
STEP = ("step", "num_tokens", "epoch", "learning_rate", "padding_fraction", "attention_imbalance")
STATE = ("global_step", "max_steps", "num_train_epochs", "train_batch_size", "best_global_step", "total_flos")
"""What no rounding of the model's arithmetic can change."""
ABOUT = ("loss", "grad_norm", "eval_loss", "train_loss", "rewards/margins")
OF_THE_MACHINE = ("base_model", "dataset_name", "files", "model_config")
"""Values that identify data and model, and depend on folders, on random weights, or on transformers' release."""
KINDS = ("sp 1", "ring 2, FSDP2", "ring 2, LoRA", "ring 2, weights only", "ring 2, DPO", "Ulysses 2, ZeRO-3")
"""Runs whose folders differ in kind."""
WITHIN = 2e-3


def golden(quick: bool) -> Iterator[tuple[str, Any]]:
    for name in QUICK if quick else RUNS:
        ended = outcome(name)
        yield f"{name}: steps", _steps(ended)
        yield f"{name}: names in the log", _names(ended, outcome("sp 1") if name != "sp 1" else None)
        yield f"{name}: about", _about(ended)
        if manifest := _manifest(ended):
            yield f"{name}: manifest", manifest
        if name in KINDS:
            for folder in filter(None, (ended.folder, ended.checkpoint)):
                where = "output folder" if folder == ended.folder else folder.name
                yield f"{name}: {where}", {path.name: _described(path) for path in sorted(folder.iterdir())}


def measured() -> Iterator[tuple[str, Any]]:
    for name in RUNS:
        yield f"{name}: trace", _trace(outcome(name))
        yield f"{name}: weights", _weights(outcome(name).folder)


def differs(name: str, recorded: Any, now: Any) -> str:
    if name.endswith(": about") and recorded.keys() == now.keys():
        pairs = [(key, *pair) for key in recorded for pair in zip(recorded[key], now[key], strict=False)]
        lengths = any(len(recorded[key]) != len(now[key]) for key in recorded)
        far = [
            f"{key} {before} -> {after}"
            for key, before, after in pairs
            if abs(after - before) > WITHIN * max(abs(before), 0.1)
        ]
        return "; ".join(far) or ("another number of values" if lengths else "")
    return "; ".join(changes(_by_word(recorded), _by_word(now)))


def _by_word(value: Any) -> Any:
    """The value with texts of several names as dictionaries, so that a difference names the one that is new or gone."""
    if isinstance(value, dict):
        return {name: _by_word(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_by_word(part) for part in value]
    return dict.fromkeys(value.split(), "") if isinstance(value, str) and " " in value else value


def _steps(run: Outcome) -> dict[str, Any]:
    """Integers, and ratios of integers, of each step."""
    entries = [entry for entry in run.log if "loss" in entry]
    found = {name: [_rounded(entry.get(name)) for entry in entries] for name in STEP}
    found |= {name: run.state[name] for name in STATE}
    packing = {name: value for name, value in run.log[0].items() if name.startswith("packing.")}
    evaluated = [entry["step"] for entry in run.log if "eval_loss" in entry]
    return found | {"denominators": run.denominators, "evaluated": evaluated} | packing


def _names(run: Outcome, other: Outcome | None) -> list[dict[str, Any]]:
    """The names in the log's entries, and the steps whose entries have them.

    Args:
        other: a run whose entries are alike; then only what is more (+) and less (-) than in the most similar of them.
    """
    found: dict[tuple[str, ...], list[int]] = {}
    for entry in run.log:
        names = set(entry)
        if other is not None:
            like = max((set(of) for of in other.log), key=lambda of: len(of & names) - len(of - names))
            names = {f"+{name}" for name in names - like} | {f"-{name}" for name in like - names}
        found.setdefault(tuple(sorted(names)), []).append(entry["step"])
    return [{"steps": steps, "names": " ".join(names)} for names, steps in found.items()]


def _about(run: Outcome) -> dict[str, list[float]]:
    """Losses and gradient norms in four digits."""
    held = {name: [round(float(f"{entry[name]:.4g}"), 6) + 0.0 for entry in run.log if name in entry] for name in ABOUT}
    return {name: values for name, values in held.items() if values}


def _manifest(run: Outcome) -> dict[str, Any] | None:
    """What the last checkpoint says of itself; None if the run has none, or has saved weights alone."""
    path = run.checkpoint and run.checkpoint / "longctx.json"
    if path is None or not path.exists():
        return None
    manifest = json.loads(path.read_text())
    data = manifest["data"].items()
    return {
        "names": sorted(manifest),
        **{name: manifest[name] for name in ("format", "step", "layout", "optimization", "position")},
        "data": {
            name: sorted(value) if name == "model_config" else value
            for name, value in data
            if name not in OF_THE_MACHINE
        },
        "data of this machine": [name for name, _ in data if name in OF_THE_MACHINE],
        "progress of a rank": sorted(name for name, _ in flat(manifest["progress"]["ranks"][0])),
        "ranks": len(manifest["progress"]["ranks"]),
    }


def _described(path: Path) -> Any:
    """Return what a file holds by name.

    That is the keys of a JSON file, and of a safetensors file how many layers have each tensor. Of other files, "".
    """
    if path.suffix == ".safetensors":
        kinds = ((re.sub(r"layers\.\d+", "layers.*", name), kind) for name, (kind, _) in tensors_of(path).items())
        return {name: f"{count} × {kind}" for (name, kind), count in Counter(kinds).items()}
    return " ".join(sorted(json.loads(path.read_text()))) if path.suffix == ".json" else ""


def _trace(run: Outcome) -> list[dict[str, Any]]:
    return [{name: _hex(value) for name, value in entry.items() if not TIMED.search(name)} for entry in run.log]


def _hex(value: Any) -> Any:
    if isinstance(value, list):
        return [_hex(part) for part in value]
    return value.hex() if isinstance(value, float) else value


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _weights(folder: Path) -> dict[str, str]:
    """A digest of all tensors in each safetensors file of a folder, with their names, dtypes and shapes."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        state = xxhash.xxh3_64()
        for name, (kind, contents) in tensors_of(path).items():
            state.update(f"{name} {kind}".encode() + contents)
        found[path.name] = state.hexdigest()
    return found
