"""`pytest … --parity-page PATH`: what a run has found of training beside one process, as a page.

There is a page of training on soft GPUs, one of `longctx dpo`, and one of model types: each has the rows that were
started in its way.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable
from datetime import date
from importlib.metadata import version

Row = tuple[str, str, float, float, float]
"""The case, how it was started, and the relative errors: of the first step's loss, of its gradient's norm, and the
largest of all losses."""

STARTED_BY, DPO, MODELS = "soft GPUs", "torchrun, DPO", "torchrun, models"
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "trl", "peft")

_HEADS = {
    STARTED_BY: """# Training on soft GPUs beside one process

`pytest tests/gpu/test_soft_training.py --parity-page PATH` enters what it has found into this page, and so does
the same command with `-m long`. Soft GPUs are CUDA devices in host memory (`tests/softcuda`): training has the
branches, kernels and threads that it has on CUDA, and its processes talk through NCCL's interface. The reference is one
process on the CPU, in fp32, with dense attention. Each run takes five AdamW steps on packed documents, with `--sp 2`
where its name does not say otherwise. Errors are relative to the reference's numbers. Rows named bf16 show what
rounding costs, and the others are in fp32. Nothing here was measured on a GPU.
""",
    DPO: """# DPO beside TRL's DPOTrainer

`pytest tests/training/test_dpo.py --parity-page PATH` enters what it has found into this page, and so does the same
command with `-m long`. The reference is `trl.DPOTrainer` on one process of the CPU, in fp32, with one padded batch of
all pairs. Each run of `longctx dpo` takes three AdamW steps on the same pairs. Ulysses runs on DeepSpeed ZeRO-3, and
the others on FSDP2. Errors are relative to TRL's numbers. The test also compares every metric of the log, and an
evaluation after each step. Rows named bf16 show what rounding costs, and the others are in fp32. Losses that are
named with a suffix have another option: `-ld` is `--ld_alpha`, and the others are f-divergences.

Nothing here was measured on a GPU.
""",
    MODELS: """# Model types trained beside one process

`pytest -m long FILE --parity-page PATH` enters what it has found into this page, where FILE is
tests/model/test_multimodal.py or tests/training/test_engines_of_models.py. A small model of random weights is saved to
disk as the hub has it: a multimodal one whole, with its vision part. `longctx train` trains it for two AdamW steps on
packed documents. The reference is stock transformers on one process, in fp32, which sees one document at a time; of a
multimodal model, it is the whole. The tests also load what each run has saved with stock transformers, and compare its
logits with those of the trained reference.

Nothing here was measured on a GPU.
""",
}

_TABLE = """
Last written on {date} with Python {python}, {packages}.

| case | loss of step 1 | gradient norm of step 1 | largest of all losses |
| --- | --- | --- | --- |
"""


def page(before: str, rows: Iterable[Row], started_by: str = STARTED_BY) -> str:
    """Return the page with these rows; the other cases of the page `before` stay as they are.

    Args:
        started_by: whose rows the page has: STARTED_BY, DPO or MODELS.
    """
    lines = {line.split(" | ")[0]: line for line in before.splitlines() if re.match(r"\| .*\de[-+]\d", line)}
    for case, way, *errors in rows:
        if way == started_by:
            lines[f"| {case}"] = f"| {case} | {' | '.join(f'{error:.0e}' for error in errors)} |"
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    table = _TABLE.format(date=date.today(), python=platform.python_version(), packages=packages)
    return _HEADS[started_by] + table + "".join(f"{lines[case]}\n" for case in sorted(lines))


def read(text: str) -> dict[str, list[float]]:
    """Return {case: errors} of a page."""
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r"\| .*\de[-+]\d", line)]
    return {case: [float(error) for error in errors] for case, *errors in cells}
