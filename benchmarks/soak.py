"""Runs that are killed at random moments, again and again, and started anew: the same losses, the same weights.

    python -m benchmarks.soak                           # 200 kills over four layouts, about an hour on two cores
    python -m benchmarks.soak --layouts "ring of 4" --steps 2000 --kills 20 --kills_of_a_run 20 --reach 0.1

A run of `longctx.train` with --resume_from_checkpoint auto and a checkpoint every few steps is killed with all of its
ranks (SIGKILL, no warning) at a moment drawn at random from the time that a whole run takes, while it starts, trains or
saves, and started again; after every few kills it may finish. It is held against the same run without a kill: every
step is in the log once, with the same bits of loss and gradient norm and the same number of tokens, and the final
weights are equal bit by bit, so that no document was lost or repeated. What is left behind is counted, too: processes,
files in /dev/shm, and unfinished checkpoints once a run has finished.

While the run without a kill trains, every rank looks at its resident memory and open files. The table has
their means over the second quarter of the time, when everything has been used once, and over the last quarter, of the
rank that has grown most.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import psutil
import torch
from safetensors.torch import load_file

from . import page
from .elsewhere.steps import make_documents, write_model
from .ranks import Ending, run_group, start_server

LOOK_SECONDS = 0.2
PATIENCE = 7200.0
"""Seconds of a run that is not killed."""
RING, ULYSSES = ("--sp_backend", "ring"), ("--sp_backend", "ulysses")  # on FSDP2, on DeepSpeed ZeRO-3
LAYOUTS = {
    "1 process": (1, ()),
    "ring": (2, RING),
    "ulysses": (2, ULYSSES),
    "stream": (2, (*RING, "--dataset_streaming", "True")),
    "ring, saved later": (2, (*RING, "--save_async", "True")),
    "ring of 4": (4, RING),
    "ulysses of 4": (4, ULYSSES),
}
"""Processes, which are the degree of sequence parallelism, and flags."""
HEAD = "layout, kills, starts, steps logged, wrong, runs with other weights, memory of a rank, open files, left behind"
VALUES = ("step", "loss", "grad_norm", "num_tokens", "learning_rate")


class Plan(NamedTuple):
    """Of the kills of one layout."""

    kills: int
    kills_of_a_run: int
    """After so many a run may finish."""
    reach: float
    """A kill comes before this share of the time of a whole run."""
    steps: int


class Outcome(NamedTuple):
    """Of one layout."""

    kills: int
    starts: int
    steps: int
    """That were in the logs of finished runs."""
    wrong: int
    """Steps that were missing, repeated or other than in the run without a kill."""
    unequal: int
    """Finished runs with other weights."""
    memory: str
    """Resident, of the run without a kill."""
    files: str
    """Open in it."""
    left: str
    """What was left behind; empty if nothing was."""


def train(arguments: list[str]) -> dict[str, Any]:
    """On every rank."""
    from longctx.train import main

    memory, files, done = [], [], threading.Event()

    def look() -> None:
        while not done.wait(LOOK_SECONDS):
            memory.append(psutil.Process().memory_info().rss)
            files.append(psutil.Process().num_fds())

    watch = threading.Thread(target=look, daemon=True)
    watch.start()
    if code := main(arguments):
        raise RuntimeError(f"longctx.train ended with exit code {code}")
    done.set()
    watch.join()
    return {"memory": memory, "files": files}


def soak(layout: str, plan: Plan, folder: Path, draw: random.Random) -> Outcome:
    """Kill runs of one layout as often as the plan says.

    Raises:
        RuntimeError: if a run ends by itself other than well.
    """
    processes, flags = LAYOUTS[layout]
    common = [*_flags(folder, plan.steps), "--sp", str(processes), *flags]
    before = _left_behind()
    run = _run(processes, common, folder / "whole", timeout=PATIENCE)
    whole = run.seconds
    memory, files = (_growth([report[name] for report in run.reports]) for name in ("memory", "files"))
    grown = f"{memory[0] / 2**20:.0f} -> {memory[1] / 2**20:.0f} MiB", f"{files[0]:.1f} -> {files[1]:.1f}"
    expected, weights = _log(folder / "whole"), _weights(folder / "whole")
    starts = steps = wrong = unequal = done = 0
    while done < plan.kills:
        output = folder / "killed"
        shutil.rmtree(output, ignore_errors=True)
        killed = 0
        while True:
            may_finish = killed == plan.kills_of_a_run or done == plan.kills
            timeout = PATIENCE if may_finish else draw.uniform(0, plan.reach * whole)
            starts += 1
            run = _run(processes, common, output, timeout=timeout)
            if run.status == "ok":
                whole = run.seconds if killed == 0 else whole  # with what else the machine does now
                break
            killed, done = killed + 1, done + 1
        log = _log(output)
        steps += len(log)
        wrong += sum(a != b for a, b in zip(log, expected, strict=False)) + abs(len(log) - len(expected))
        found = _weights(output)
        unequal += not (
            found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)
        )
        unfinished = [str(path.name) for path in output.glob("*.partial")]
        if unfinished:
            return Outcome(done, starts, steps, wrong, unequal, *grown, ", ".join(unfinished))
    left = _left_behind() - before
    return Outcome(done, starts, steps, wrong, unequal, *grown, ", ".join(sorted(left)))


def _run(processes: int, flags: Sequence[str], output: Path, *, timeout: float) -> Ending:
    """Until it has finished, or is killed at the time-out."""
    ending = run_group(
        processes,
        train,
        [*flags, "--output_dir", str(output)],
        environment={},
        folder=output.with_name("ranks"),
        timeout=timeout,
    )
    if ending.status not in ("ok", "timeout"):
        raise RuntimeError(f"{ending.status}: {ending.error}\n{ending.log}")
    return ending


def _growth(ranks: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Means over the second and the last quarter of the rank that has grown most."""
    means = []
    for values in ranks:
        quarter = len(values) // 4
        means.append((mean(values[quarter : 2 * quarter]), mean(values[-quarter:])))
    return max(means, key=lambda pair: pair[1] - pair[0])


def _flags(folder: Path, steps: int) -> list[str]:
    """Of a small model, and of documents of about 17 steps."""
    model, data = folder / "model", folder / "data.jsonl"
    if not data.exists():
        write_model(str(model))
        lengths = [random.Random(0).randint(2, 120) for _ in range(150)]
        records = [{"input_ids": ids, "labels": labels} for ids, labels in make_documents(lengths)]
        data.write_text("".join(json.dumps(record) + "\n" for record in records))
    save_steps = min(25, steps // 8)
    flags = (
        f"--max_steps {steps} --save_strategy steps --save_steps {save_steps} --save_total_limit 2 --logging_steps 1"
    )
    flags += " --max_length 256 --per_device_train_batch_size 1 --gradient_accumulation_steps 2 --learning_rate 5e-3"
    flags += " --report_to none --disable_tqdm True --use_cpu True --resume_from_checkpoint auto"
    return [*flags.split(), "--model_name_or_path", str(model), "--dataset_name", str(data)]


def _log(output: Path) -> list[tuple[Any, ...]]:
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return [tuple(entry[name] for name in VALUES) for entry in history if "loss" in entry]


def _weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "model.safetensors")


def _left_behind() -> set[str]:
    """Files of shared memory, and processes below this one."""
    shared = {f"/dev/shm/{path.name}" for path in Path("/dev/shm").iterdir()}
    return shared | {f"process {process.pid}" for process in psutil.Process().children(recursive=True)}


def report(layouts: Sequence[str], whole: Plan, seed: int) -> Iterator[str]:
    """The table, a row as soon as it is known."""
    start_server()
    yield page.head(HEAD.split(", "))
    with tempfile.TemporaryDirectory() as folder:
        share, rest = divmod(whole.kills, len(layouts))
        for number, layout in enumerate(layouts):
            path = Path(folder, str(number))
            path.mkdir()
            plan = whole._replace(kills=share + (number < rest))
            outcome = soak(layout, plan, path, random.Random(f"{seed} {layout}"))
            yield page.row([layout, *(str(value) for value in outcome[:-1]), outcome.left or "nothing"])


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1 if a step or a weight was other than in the run without a kill, or something was left behind."""
    parser = page.parser("soak", __doc__)
    parser.add_argument("--kills", type=int, default=200, help="Over all layouts. Default: 200.")
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS)[:4])
    parser.add_argument("--kills_of_a_run", type=int, default=5, help="After so many a run may finish. Default: 5.")
    parser.add_argument(
        "--reach",
        type=float,
        default=1.2,
        help="Kills come before this share of a whole run's time. Default: 1.2.",
    )
    parser.add_argument("--steps", type=int, default=24, help="Of a run, at least 8. Default: 24.")
    parser.add_argument("--seed", type=int, default=0, help="Of the moments. Default: 0.")
    parser.add_argument("--output", type=Path, help="Also write the table here.")
    options = parser.parse_args(arguments)
    plan = Plan(options.kills, options.kills_of_a_run, options.reach, options.steps)
    output, lines = page.Report(options.output), []
    output.add(*page.heading("Runs that are killed", page.command("soak", arguments), page.device()))
    output.add(page.explained(__doc__), "")
    for text in report(options.layouts, plan, options.seed):
        output.add(text)
        lines.append(text)
    rows = [text.split("|")[1:-1] for text in lines[1:]]
    return int(any(row[4].strip() != "0" or row[5].strip() != "0" or row[-1].strip() != "nothing" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
