"""A packing plan on disk: one .npz file, without pickles, under a key of everything that the plan depends on."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from longctx.untrusted.files import written_whole

from .overlong import PackingReport
from .plan import Packing

_ARRAYS = ("indices", "offsets", "starts", "stops")


def plan_path(folder: Path, key: str) -> Path:
    """Return the file that holds the plan of this key."""
    return folder / f"plan-{key}.npz"


def save_plan(folder: Path, key: str, packing: Packing, report: PackingReport) -> None:
    """Write a plan and its report. A reader sees the whole file or none; a missing `folder` is created.

    Raises:
        OSError: if the file cannot be written.
    """
    arrays = {name: getattr(packing, name) for name in _ARRAYS if getattr(packing, name) is not None}
    header = {"key": key, "capacity": packing.capacity, "report": asdict(report), "arrays": list(arrays)}
    with written_whole(plan_path(folder, key)) as unfinished, open(unfinished, "xb") as file:
        np.savez(file, header=np.array(json.dumps(header)), **arrays)


def load_plan(folder: Path, key: str) -> tuple[Packing, PackingReport] | None:
    """Return the plan and report that `save_plan` wrote for this key, or None without a whole file."""
    try:
        with np.load(plan_path(folder, key), allow_pickle=False) as file:
            header = json.loads(str(file["header"]))
            arrays = {name: file[name] for name in header["arrays"]}
        if header["key"] != key:
            return None
        packing = Packing(**arrays, capacity=header["capacity"])
        report = PackingReport(**header["report"])
    except Exception:  # damage shows as an error of the zip, NumPy, JSON or text decoder, whichever meets it
        return None
    return (packing, report) if _is_sound(packing) and report.packs == len(packing) else None


def _is_sound(packing: Packing) -> bool:
    """Return whether the arrays have the types and lengths of a plan."""
    pieces = (len(packing.indices),)
    return (
        packing.indices.dtype.kind == "u"
        and packing.indices.shape == pieces
        and packing.offsets.dtype == np.int64
        and packing.offsets[0] == 0
        and bool((np.diff(packing.offsets) >= 0).all())
        and all(a is None or (a.dtype == np.int64 and a.shape == pieces) for a in (packing.starts, packing.stops))
    )
