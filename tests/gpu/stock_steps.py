"""Steps of stock transformers without the kernels of flash-linear-attention, which only compute on GPUs.

    python -m tests.gpu.stock_steps FILE FAMILY ...

transformers calls them wherever the package can be imported, on the CPU too. So the references are computed in a
process that cannot import it.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.modules["fla"] = None  # type: ignore[assignment]  # before transformers looks for it

import torch  # noqa: E402

from tests.model.test_models import make_model, stock_step  # noqa: E402


def main() -> None:
    """Save {family: (loss, gradients)}. Where stock transformers fails, the family is left out, and its tests fail."""
    file, *families = sys.argv[1:]
    steps = {}
    for family in families:
        try:
            steps[family] = stock_step(make_model(family))[1:]
        except Exception as error:
            print(f"stock transformers cannot train {family}: {type(error).__name__}: {error}", file=sys.stderr)
    torch.save(steps, Path(file))


if __name__ == "__main__":
    main()
