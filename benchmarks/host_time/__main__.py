"""`python -m benchmarks.host_time`: see the package."""

from __future__ import annotations

import argparse
import itertools
import shlex
import sys
from pathlib import Path

from benchmarks import host_time

from .page import figures, owners, page, ratios
from .race import HERE, LAYOUTS, LOG_STEPS, MODES, ROOT, TRL, Case, cloned, race


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.host_time", description=(host_time.__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="of activation checkpoints")
    parser.add_argument("--workers", nargs="+", type=int, choices=(0, 1), default=[0], help="of the data loader")
    parser.add_argument("--steps", type=int, default=60, help="timed steps of each trainer")
    parser.add_argument("--against", nargs="*", default=[], metavar="COMMIT", help="also train with these trees")
    parser.add_argument("--owners", type=int, default=0, metavar="N", help="print the N functions that call most")
    parser.add_argument("--output", type=Path, help="also write the page here")
    options = parser.parse_args(arguments)
    if options.steps < 2 * LOG_STEPS:
        parser.error(f"--steps {options.steps} must be at least {2 * LOG_STEPS}, two blocks, for quartiles")
    contestants, pairs, said = [], [], []
    with cloned(options.against) as others:
        trees = {HERE: ROOT, **others, TRL: ROOT}
        for place in itertools.product(options.layouts, options.modes, options.workers):
            case = Case(*place)
            turns = race(case, trees, options.steps, with_owners=options.owners > 0)
            contestants += (rows := [*figures(case, turns)])
            for row, words in ratios(case, turns, next(iter(others), None)):
                pairs.append(row)
                said += words
                rows += [row, *words]
            for name, of in turns.items():
                rows += owners(name, of.owned, options.owners)
            print(*rows, sep="\n", file=sys.stderr, flush=True)
    given = sys.argv[1:] if arguments is None else arguments
    shown = [word for word in given if word != "--output" and word != str(options.output)]
    text = page("".join(f" {shlex.quote(word)}" for word in shown), contestants, pairs, said, options.steps)
    print(text, end="")
    if options.output:
        options.output.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
