"""The command line; see the package."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from .. import page
from . import reference
from .covering import covering_set, describe
from .judge import EXACT, Judge, Outcome
from .report import text_of, write
from .shrink import explains, shrink
from .space import Case, draw

LANES = 2
"""Cases that run side by side, unless --lanes says otherwise."""
REFERENCE = reference.__name__
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
}


class Session:
    """Cases that are run, their outcomes, and the distinct findings among them."""

    def __init__(self, judge: Judge, *, shrinks: bool):
        self.judge, self.shrinks = judge, shrinks
        self.outcomes: list[Outcome] = []
        self.found: list[Outcome] = []
        self._lock = Lock()

    def run_all(self, cases: Iterator[Case], *, lanes: int) -> None:
        """Judge cases side by side; each is drawn when there is room for it."""
        drawing = Lock()

        def lane() -> None:
            while True:
                with drawing:
                    case = next(cases, None)
                if case is None:
                    return
                self.run(case)

        with ThreadPoolExecutor(lanes) as pool:
            for done in [pool.submit(lane) for _ in range(lanes)]:
                done.result()

    def run(self, case: Case) -> None:
        """Judge a case, print the verdict, and shrink a finding that is new."""
        started = time.monotonic()
        outcome = self.judge(case)
        with self._lock:
            self.outcomes.append(outcome)
            self._print(outcome, time.monotonic() - started)
            is_new = outcome.is_finding and not any(explains(known, outcome) for known in self.found)
            if is_new:
                self.found.append(outcome)
                place = len(self.found) - 1
        if is_new and self.shrinks:
            smallest = shrink(outcome, self.judge)
            with self._lock:
                self.found[place] = smallest
                self._print_finding(smallest)
        elif is_new:
            self._print_finding(outcome)

    def _print(self, outcome: Outcome, seconds: float) -> None:
        what = outcome.detail.strip().replace("\n", " ")[:160] or _worst(outcome)
        line = f"{len(self.outcomes):5} {seconds:5.1f}s {outcome.status:15} {what}"
        print(f"{line}\n{'':28} {outcome.case.to_json()}", flush=True)

    def _print_finding(self, outcome: Outcome) -> None:
        print(f"\nFINDING: {outcome.status}: {outcome.detail.strip()}")
        print("".join(f"  {command}\n" for command in outcome.commands), end="")
        print(f"  in FOLDER, after --replay '{outcome.case.to_json()}' --keep FOLDER\n", flush=True)


def _worst(outcome: Outcome) -> str:
    return ", ".join(f"{name} {error:.0e}" for name, error in outcome.errors.items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 where there is a finding."""
    args = _parser().parse_args(arguments)
    started = time.monotonic()
    if args.report:
        Path(args.report).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="differential-") as scratch:
        work = Path(args.keep or scratch).absolute()
        os.environ |= ENVIRONMENT | {"HF_HOME": str(Path(scratch, "cache"))}
        from ..ranks import start_server

        start_server("peft", "datasets", REFERENCE)  # no module of longctx: the reference is forked from it, too
        session = Session(Judge(work, args.timeout, keeps=args.keep is not None), shrinks=not args.no_shrinking)
        session.run_all(_cases(args, started), lanes=args.lanes)
    if args.replay:
        print(session.outcomes[0].log)
    command = page.command("differential", arguments)
    exact = {outcome.case for outcome in session.outcomes if outcome.status == EXACT}
    note = describe(exact, args.seed) if args.default_set else ""
    text = text_of(session.outcomes, session.found, command=command, seconds=time.monotonic() - started, note=note)
    print(text if args.report is None else write(text, Path(args.report)))
    return int(bool(session.found))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.differential", description="Random training runs against an independent reference."
    )
    parser.add_argument("--seed", type=int, default=0, help="of the cases")
    parser.add_argument("--minutes", type=float, default=10, help="after which no further case is begun")
    parser.add_argument("--cases", type=int, help="how many to run, instead of --minutes")
    parser.add_argument("--default_set", action="store_true", help="the covering set instead of random cases")
    parser.add_argument("--replay", metavar="CASE", help="a case as JSON, or a file that holds it")
    parser.add_argument(
        "--where", nargs="+", metavar="NAME=VALUE", default=[], help="random cases with these values: method=dpo"
    )
    parser.add_argument("--keep", metavar="FOLDER", help="leave models, data and outputs there")
    parser.add_argument("--lanes", type=int, default=LANES, help="cases that run side by side")
    parser.add_argument("--timeout", type=float, default=120, help="seconds of a case")
    parser.add_argument("--no_shrinking", action="store_true", help="print findings as they are found")
    parser.add_argument("--report", metavar="FOLDER", help="write the report there, instead of printing it")
    return parser


def _cases(args: argparse.Namespace, started: float) -> Iterator[Case]:
    if args.replay:
        path = Path(args.replay)
        yield Case.from_json(args.replay if args.replay.lstrip().startswith("{") else path.read_text())
    elif args.default_set:
        yield from covering_set(args.seed)
    else:
        drawn = (draw(args.seed * 1_000_000 + number) for number in itertools.count())
        wanted = [condition.split("=", 1) for condition in args.where]
        cases = (case for case in drawn if all(str(getattr(case, name)).startswith(value) for name, value in wanted))
        for number, case in enumerate(cases):
            if number == args.cases or (args.cases is None and time.monotonic() - started > 60 * args.minutes):
                return
            yield case


if __name__ == "__main__":
    sys.exit(main())
