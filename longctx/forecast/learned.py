"""Corrections of the forecast by what earlier runs on the same kind of GPU took.

A small file per kind of GPU and attention kernel, in the user's cache, has the ratio of measured to predicted seconds
and bytes. They correct what longctx plan, --sp auto and --memory auto forecast; never the packing of data.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from longctx.forecast.cost import Cost
from longctx.machine.here import Correction, Machine
from longctx.machine.speeds import CUDNN
from longctx.untrusted.files import written_whole

MOST_RUNS = 5
"""A run counts for at least one part in this many."""
BOUNDS = (0.5, 2.0)
"""Corrections beyond these say that something else was measured than what was predicted; they are left out."""


def corrected(machine: Machine) -> Machine:
    """Return the machine with the corrections that are known for its devices and kernels."""
    found = []
    for kernel in dict.fromkeys((machine.kernel, CUDNN)):
        with suppress(OSError, ValueError, KeyError, TypeError):
            of = json.loads(_file(machine.device, kernel).read_text(encoding="utf-8"))
            values = float(of["seconds"]), float(of["bytes"])
            if all(BOUNDS[0] <= value <= BOUNDS[1] for value in values):
                found.append((kernel, Correction(*values, int(of["runs"]))))
    return replace(machine, corrections=tuple(found))


def learn(cost: Cost, kernel: str, *, speed: float, allocated_bytes: float) -> None:
    """Take a run into the corrections, by what its first steps took beside what was predicted.

    Args:
        cost: what was predicted, corrections included.
        kernel: of attention, as the prediction assumed.
        speed: tokens a second and device.
        allocated_bytes: on the fullest device.
    """
    before = dict(cost.machine.corrections).get(kernel, Correction())
    ratios = before.seconds * cost.speed / speed, before.memory * allocated_bytes / cost.allocated_bytes
    if not all(BOUNDS[0] <= ratio <= BOUNDS[1] for ratio in ratios):
        return
    of_run = 1 / min(before.runs + 1, MOST_RUNS)
    seconds, memory = (
        old ** (1 - of_run) * ratio**of_run for old, ratio in zip((before.seconds, before.memory), ratios, strict=True)
    )
    path = _file(cost.machine.device, kernel)
    with suppress(OSError):  # a cache that cannot be written is no reason to fail
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as unfinished:
            unfinished.write_text(json.dumps({"seconds": seconds, "bytes": memory, "runs": before.runs + 1}) + "\n")


def _file(device: str, kernel: str) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    name = re.sub(r"\W+", "-", f"{device} {kernel}")
    return Path(cache).expanduser() / "longctx" / "learned" / f"{name}.json"
