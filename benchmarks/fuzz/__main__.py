"""The command line and the processes that read damaged files; see the package."""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import cast

from .. import fuzz, page
from .damage import damage
from .kinds import KINDS, model_folder, tiny, usual_settings

SECONDS = 600
"""For one file, however busy the machine."""
MEMORY_BYTES = 8 << 30
"""Of one process, for any number of files."""
OUTCOMES = ("read", "refused", "unnamed", "wrong", "other error", "crash", "time-out")
FAILURES = OUTCOMES[2:]


def try_file(name: str, number: int, seed: int) -> tuple[str, str]:
    """Make, damage and read one file; returns the outcome and what there is to say of it."""
    kind, draw = KINDS[name], random.Random(f"{seed} {name} {number}")
    with tempfile.TemporaryDirectory(dir=os.environ["FUZZ_FOLDER"]) as folder:
        import datasets

        datasets.config.HF_DATASETS_CACHE = Path(folder, "cache")
        path = kind.write(Path(folder), draw)
        path.write_bytes(damage(path.read_bytes(), draw))
        if keep := os.environ.get("FUZZ_KEEP"):
            shutil.copy(path, keep)
        try:
            complaint = kind.read(path, Path(folder))
        except ValueError as error:
            message = str(error)
            return ("refused" if folder in message else "unnamed"), f"{type(error).__name__}: {message}"
        except Exception as error:
            return "other error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        return ("wrong", complaint) if complaint else ("read", "")


def _work(names: Sequence[str], numbers: Sequence[int], seed: int, output: int) -> None:
    """In a process of its own: a line for each file, before and after."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    for name, number in zip(names, numbers, strict=True):
        signal.alarm(SECONDS)
        outcome, message = try_file(name, number, seed)
        os.write(output, (json.dumps([outcome, ascii(message[:600])]) + "\n").encode())
    signal.alarm(0)


def run(names: Sequence[str], numbers: Sequence[int], seed: int, processes: int) -> Iterator[tuple[str, int, str, str]]:
    """(kind, number, outcome, message) of each file; a process that ends is replaced, and its last file noted."""
    running: dict[int, tuple[int, deque[int]]] = {}

    def start(share: deque[int]) -> None:
        reading, writing = os.pipe()
        process = os.fork()
        if process == 0:
            try:
                _work([names[at] for at in share], [numbers[at] for at in share], seed, writing)
            finally:
                os._exit(0)
        os.close(writing)
        running[reading] = process, share

    for share in (deque(range(first, len(names), processes)) for first in range(processes)):
        if share:
            start(share)
    while running:
        for reading in cast(list[int], wait(list(running))):
            process, share = running[reading]
            if lines := os.read(reading, 1 << 20).splitlines():  # whole ones, as they are short
                for text in lines:
                    at = share.popleft()
                    yield names[at], numbers[at], *json.loads(text)
                continue
            os.close(reading)
            del running[reading]
            status = os.waitpid(process, 0)[1]
            if share:
                timed_out = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
                at = share.popleft()
                yield names[at], numbers[at], "time-out" if timed_out else "crash", f"exit status {status}"
            if share:
                start(share)


def report(kinds: Sequence[str], files: int, seed: int, processes: int) -> Iterator[str]:
    """The table; each failure goes to stderr."""
    share, rest = divmod(files, len(kinds))
    names = [kind for at, kind in enumerate(kinds) for _ in range(share + (at < rest))]
    numbers = [number for at in range(len(kinds)) for number in range(share + (at < rest))]
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    for name, number, outcome, message in run(names, numbers, seed, processes):
        counts[name][outcome] += 1
        if outcome in FAILURES:
            print(f"{outcome}: {name} {number}: {message}", file=sys.stderr, flush=True)
    yield page.head(["kind", "files", *OUTCOMES])
    for kind, found in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
        yield page.row([kind, f"{found.total():,}", *(f"{found[outcome]:,}" for outcome in OUTCOMES)])


def _warm_up() -> None:
    """What every process needs, imported once."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    import datasets

    from longctx.model import load  # noqa: F401
    from longctx.training import dataset  # noqa: F401
    from longctx.training.checkpoint.files import read_manifest  # noqa: F401

    datasets.disable_progress_bars()
    usual_settings()
    tiny()
    model_folder()


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1 if a file did neither: give the right tokens, or the typed error."""
    parser = page.parser("fuzz", fuzz.__doc__)
    parser.add_argument("--files", type=int, default=10_000, help="Over all kinds. Default: 10000.")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0, help="Of the damage. Default: 0.")
    parser.add_argument("--processes", type=int, default=2, help="At a time. Default: 2.")
    parser.add_argument("--output", type=Path, help="Also write the table here.")
    options = parser.parse_args(arguments)
    head = page.heading("Damaged files", page.command("fuzz", arguments), page.device())
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(FUZZ_FOLDER=folder, HF_HUB_OFFLINE="1")
        _warm_up()
        lines = list(report(options.kinds, options.files, options.seed, options.processes))
        logging.disable(logging.NOTSET)
    page.Report(options.output).add(*head, page.explained(fuzz.__doc__), "", *lines)
    total = lines[-1].split("|")[1:-1]
    return int(any(cell.strip() != "0" for cell in total[4:]))


if __name__ == "__main__":
    sys.exit(main())
