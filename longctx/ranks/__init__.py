"""What ranks do together: agree, take turns, end together, and watch each other.

Which process is the first can be asked before a process group or TrainingArguments exist.
"""

from __future__ import annotations

import os

FAILED = 1
"""The exit code of a run that an error ends."""


def is_first_rank() -> bool:
    """Return whether this process is rank 0 of the run, or will be, as the first task of srun."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def is_first_on_node() -> bool:
    """Return whether this process is the first rank of its node."""
    return os.environ.get("LOCAL_RANK", "0") == "0"
