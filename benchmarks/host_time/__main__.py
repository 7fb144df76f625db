"""`python -m benchmarks.host_time`: see the package."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import host_time, page

from .page import figures, ratios, text_of
from .race import HERE, LAYOUTS, LOG_STEPS, MODES, ROOT, TRL, Case, cloned, race


def cases(layouts: Sequence[str], modes: Sequence[str], workers: Sequence[int]) -> Iterator[Case]:
    """Yield them; at sp 2 those without a worker that TRL has, too."""
    for number, mode, layout in itertools.product(workers, modes, layouts):
        if LAYOUTS[layout].ranks == 1 or (mode != "selective" and number == 0):
            yield Case(layout, mode, number)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = page.parser("host_time", host_time.__doc__)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="of activation checkpoints")
    parser.add_argument("--workers", nargs="+", type=int, choices=(0, 1), default=[0, 1], help="of the data loader")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each trainer after each start")
    parser.add_argument("--starts", type=int, default=5, help="of every process")
    parser.add_argument("--against", nargs="*", default=[], metavar="COMMIT", help="also train with these trees")
    parser.add_argument("--output", type=Path, help="also write the page here")
    options = parser.parse_args(arguments)
    if options.steps < LOG_STEPS or options.steps * options.starts < 2 * LOG_STEPS:
        parser.error(
            f"--steps {options.steps} --starts {options.starts} must be at least one block of {LOG_STEPS} steps a "
            "start and two in all, for quartiles"
        )
    command = page.command("host_time", arguments)
    contestants, pairs, said, text = [], [], [], ""
    with cloned(options.against) as others:
        trees = {HERE: ROOT, **others, TRL: ROOT}
        for case in cases(options.layouts, options.modes, options.workers):
            turns = race(case, trees, options.steps, options.starts)
            contestants += (rows := [*figures(case, turns)])
            for row, words in ratios(case, turns, next(iter(others), None)):
                pairs.append(row)
                said += words
                rows += [row, *words]
            print(*rows, sep="\n", file=sys.stderr, flush=True)
            text = text_of(command, contestants, pairs, said, options.steps, options.starts)
            if options.output:
                options.output.write_text(text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
