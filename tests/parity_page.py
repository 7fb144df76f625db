"""`pytest … --parity-page PATH`: what a run has found of training on soft GPUs beside one process, as a page."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable
from importlib.metadata import version

Row = tuple[str, str, float, float, float]
"""The case, how it was started, and the relative errors: of the first step's loss, of its gradient's norm, and the
largest of all losses."""

STARTED_BY = "soft GPUs"
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "trl")

_HEAD = """# Training on soft GPUs beside one process

`pytest tests/gpu/test_soft_training.py --parity-page PATH` enters what it has found into this page, and so does
the same command with `-m long`. Soft GPUs are CUDA devices in host memory (`tests/softcuda`): training has the
branches, kernels and threads that it has on CUDA, and its processes talk through NCCL's interface. The reference is one
process on the CPU, in fp32, with dense attention. Each run takes five AdamW steps on packed documents, with `--sp 2`
where its name does not say otherwise. Errors are relative to the reference's numbers. Rows named bf16 show what
rounding costs, and the others are in fp32. Nothing here was measured on a GPU.

Last written with Python {python}, {packages}.

| case | loss of step 1 | gradient norm of step 1 | largest of all losses |
| --- | --- | --- | --- |
"""


def page(before: str, rows: Iterable[Row]) -> str:
    """Return the page with these rows; the other cases of the page `before` stay as they are."""
    lines = {line.split(" | ")[0]: line for line in before.splitlines() if re.match(r"\| .*\de[-+]\d", line)}
    for case, started_by, *errors in rows:
        if started_by == STARTED_BY:
            lines[f"| {case}"] = f"| {case} | {' | '.join(f'{error:.0e}' for error in errors)} |"
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    head = _HEAD.format(python=platform.python_version(), packages=packages)
    return head + "".join(f"{lines[case]}\n" for case in sorted(lines))


def read(text: str) -> dict[str, list[float]]:
    """Return {case: errors} of a page."""
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r"\| .*\de[-+]\d", line)]
    return {case: [float(error) for error in errors] for case, *errors in cells}
