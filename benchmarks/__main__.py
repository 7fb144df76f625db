"""`python -m benchmarks`: what each benchmark shows, and how many minutes it takes on two cores."""

from __future__ import annotations

import ast
from pathlib import Path

MINUTES = {
    "attention": "10",
    "closed_form": "1, 20 with --traces",
    "differential": "as --minutes says",
    "elsewhere": "15",
    "fuzz": "5 to 15",
    "gpu": "60 on a GPU, in slices of 9",
    "host_time": "15",
    "links": "10",
    "max_length": "10 on tiny",
    "mutants": "150, and goes on where it was interrupted",
    "overhead": "10",
    "packing": "5",
    "plan": "5",
    "planned": "15",
    "scale": "30",
    "scaling": "10",
    "small_gpus": "1",
    "soak": "60",
    "step_time": "1",
    "streaming": "3",
}
"""Minutes that `python -m benchmarks.NAME` takes without further flags."""


def first_line(name: str) -> str:
    """Return what a benchmark's module or package says of itself first."""
    folder = Path(__file__).parent
    path = folder / name / "__init__.py" if (folder / name).is_dir() else folder / f"{name}.py"
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def main() -> None:
    """Print the list."""
    for name, minutes in MINUTES.items():
        print(f"python -m benchmarks.{name:13} {first_line(name)} Minutes, roughly: {minutes}.")
    print("\nResults: benchmarks/results/README.md")


if __name__ == "__main__":
    main()
