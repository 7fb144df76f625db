"""Train on preferences (DPO): `accelerate launch -m longctx.dpo --sp 4`, or `python -m longctx.dpo`, or torchrun."""

from __future__ import annotations

import sys

from longctx import train
from longctx.settings.dpo import DPO


def main(arguments: list[str] | None = None) -> int:
    """Train on pairs of answers, and return the exit code, as `longctx.train.main` does."""
    return train.main(arguments, DPO)


if __name__ == "__main__":
    sys.exit(main())
