"""What a run's own reporting costs: every step's time with it against the step beside it without.

    python -m benchmarks.overhead
    python -m benchmarks.overhead --sp 1 4 --logging_steps 1 10 --pairs 20 --output FILE

One run of `tiny` on rows that all have the same documents. Steps with reporting count tokens, time their parts, name
regions and log; steps without do none of that, and are otherwise the same. They alternate, and so does the first of a
pair, so that a machine whose speed drifts slows both. `clock` and `processor` are the time of the steps with reporting
over that of those without, in blocks of as many pairs as a log line is steps, their median and quartiles: by the clock,
and by the processor time of rank 0, which other programs on the machine do not change.
`inside` is the processor time of rank 0 in the functions that report, and the number of regions times what entering
and leaving one takes, over that of a step without: what the ratio would be without noise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainerCallback

from longctx import regions
from longctx.run import build_trainer, finish, load, prepare
from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve
from longctx.training.trainer import SequenceTrainer

from . import page

DOCUMENTS = (0.6, 0.25, 0.12, 0.03)
"""Lengths of a row's documents, as parts of it."""
HEADER = ["sp", "logging_steps", "pairs", "s/step", "clock", "processor", "inside, ms", "inside", "regions × µs"]
WARM_UP = 4
"""Steps before the first pair."""


class AlternateReporting(TrainerCallback):
    """Switches reporting on and off from step to step, and times both."""

    def __init__(self, trainer: SequenceTrainer, logging_steps: int):
        self.trainer, self.logging_steps = trainer, logging_steps
        self.steps: list[tuple[bool, float, float]] = []
        """Whether with reporting, and seconds by the clock and of the processor."""
        self.inside = 0.0
        self.num_regions = 0
        self._add, self._log = trainer.step_metrics.add, trainer.log
        self._enter = regions.region.__enter__
        trainer.step_metrics.add = self._timed(self._add)  # type: ignore[method-assign]
        trainer.log = self._timed(self._log)  # type: ignore[method-assign]
        self.is_on = False
        self._began: tuple[float, float] | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.perf_counter(), time.process_time()
        if self._began is not None:
            self.steps.append((self.is_on, now[0] - self._began[0], now[1] - self._began[1]))
        pair, second = divmod(state.global_step - WARM_UP, 2)
        self.is_on = second == pair % 2
        clock = regions.clock
        if self.is_on and not clock.is_running:
            clock.is_running, clock._since = True, time.perf_counter()
        elif not self.is_on:
            clock.is_running = False
        regions.region.__enter__ = self._counted() if self.is_on else self._enter  # type: ignore[method-assign]
        self._began = now

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        num_on = sum(on for on, *_ in self.steps) + self.is_on
        control.should_log = self.is_on and num_on % self.logging_steps == 0

    def _counted(self) -> Callable[[regions.region], None]:
        def enter(region: regions.region) -> None:
            self.num_regions += 1
            self._enter(region)

        return enter

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on:
                return None
            begin = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.inside += time.thread_time() - begin

        return timed


def be_rank(arguments: list[str], logging_steps: int, result: Path) -> None:
    """Train, and leave the times of the steps on rank 0."""
    run = resolve(parse_flags(arguments), read_profile(), os.environ)
    prepared = prepare(run)
    trainer = build_trainer(prepared, load(prepared))
    reporting = AlternateReporting(trainer, logging_steps)
    trainer.add_callback(reporting)
    trainer.train()
    if trainer.sequence.rank == 0:
        on = sum(is_on for is_on, *_ in reporting.steps)
        found = {"steps": reporting.steps, "inside": reporting.inside / on, "regions": reporting.num_regions / on}
        result.write_text(json.dumps(found | {"region": seconds_of_a_region()}))
    finish()


def seconds_of_a_region(times: int = 20_000) -> float:
    """Processor time to enter and leave one that is a part of a step's time."""
    regions.clock.is_running, regions.clock._since = True, time.perf_counter()
    begin = time.thread_time()
    for _ in range(times):
        with regions.region("attention", "attention"):
            pass
    return (time.thread_time() - begin) / times


def measure(sp: int, logging_steps: int, *, length: int, pairs: int, folder: Path) -> dict[str, Any]:
    """A run of its own, at sp 4 on ring attention."""
    rng, data = np.random.default_rng(0), folder / "data.jsonl"
    sizes = [int(part * length) for part in DOCUMENTS]
    sizes[-1] = length - sum(sizes[:-1])
    with data.open("w") as file:
        for _ in range(8):
            for size in sizes:
                file.write(json.dumps({"input_ids": rng.integers(3, 250, size).tolist()}) + "\n")
    flags = ["--model_name_or_path", "tiny", "--dataset_name", str(data), "--max_length", str(length), "--sp", str(sp)]
    flags += ["--per_device_train_batch_size", "1", "--max_steps", str(WARM_UP + 2 * pairs + 1), "--use_cpu", "True"]
    flags += ["--save_strategy", "no", "--disable_tqdm", "True", "--output_dir", str(folder / "out")]
    flags += ["--overwrite_output_dir", "True"]
    flags += ["--sp_backend", "ring"] if sp > 1 else []
    result = folder / "result.json"
    own = ["--be_rank", str(result), "--logging_steps", str(logging_steps), "--", *flags]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(sp)]
    command = [sys.executable, *launcher, "-m", "benchmarks.overhead", *own]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    return json.loads(result.read_text())


def row(sp: int, logging_steps: int, found: dict[str, Any]) -> list[str]:
    steps = found["steps"][WARM_UP:]
    pairs = [{step[0]: step[1:] for step in steps[i : i + 2]} for i in range(0, len(steps) - 1, 2)]
    blocks = [pairs[i : i + logging_steps] for i in range(0, len(pairs) - logging_steps + 1, logging_steps)]
    clock, processor = (_ratio(blocks, time) for time in (0, 1))
    step = statistics.median(pair[False][1] for pair in pairs)
    inside = found["inside"] + found["regions"] * found["region"]
    counts, ms = (str(number) for number in (sp, logging_steps, len(pairs))), f"{1000 * inside:.2f}"
    of_regions = f"{found['regions']:.0f} × {1e6 * found['region']:.1f}"
    return [*counts, f"{step:.2f}", clock, processor, ms, f"{inside / step:.2%}", of_regions]


def _ratio(blocks: list[list[dict[bool, Sequence[float]]]], time: int) -> str:
    """Less 1; of the first (the clock's) or second (the processor's) time."""
    ratios = [sum(pair[True][time] for pair in block) / sum(pair[False][time] for pair in block) for block in blocks]
    if len(ratios) == 1:
        return f"{ratios[0] - 1:+.1%}"
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle - 1:+.1%} ({low - 1:+.1%} to {high - 1:+.1%})"


def main(arguments: list[str] | None = None) -> int:
    parser = page.parser("overhead", __doc__)
    parser.add_argument("--sp", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--logging_steps", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--max_length", type=int, default=8192)
    parser.add_argument("--pairs", type=int, default=20, help="of steps with and without reporting")
    parser.add_argument("--output", type=Path, help="also write the table here")
    parser.add_argument("--be_rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("flags", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.be_rank:
        be_rank(options.flags, options.logging_steps[0], options.be_rank)
        return 0
    report = page.Report(options.output)
    facts = f"{page.device()}, gloo", f"rows of {options.max_length:,} tokens"
    report.add(*page.heading("What a run's own reporting costs", page.command("overhead", arguments), *facts))
    report.add(page.explained(__doc__), "", page.head(HEADER))
    for sp in options.sp:
        for logging_steps in options.logging_steps:
            with tempfile.TemporaryDirectory() as folder:
                size = {"length": options.max_length, "pairs": options.pairs}
                found = measure(sp, logging_steps, folder=Path(folder), **size)
            report.add(page.row(row(sp, logging_steps, found)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
