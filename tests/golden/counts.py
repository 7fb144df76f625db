"""What longctx costs the host: functions called, files opened, bytes read and processes started.

    longctx --help, longctx train --help, refusals     from the start of Python to its end
    1,000 documents                                    `--prepare_only` in a process that has imported everything
    a step                                             of a model of 8 layers, on rank 0, once libraries are warm

What a call of a function takes differs between machines; how many there are does not, with the same versions. So these
numbers are compared where the recorded versions are installed, which .ci/versions.txt pins, and may differ by 2%.
"""

from __future__ import annotations

import json
import os
import platform
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

from packaging.version import Version

from tests.golden.compare import recorded
from tests.golden.site import counter
from tests.workers import one_by_one, run_ranks

ROOT = Path(__file__).parents[2]
LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", "datasets", "trl", "peft")
TOLERANCE, SMALL, SLACK = 0.02, 50, 1
"""A count may differ by 2%, and one below 50 by 1."""

COMMANDS = {
    "longctx --help": "--help",
    "longctx train --help": "train --help",
    "a flag that is mistyped": "train --sq 2",
}
RUN = "--max_steps 5 --max_length 512 --logging_steps 1 --report_to none --disable_tqdm True --use_cpu True"
CHECKPOINTS = {"with": "True", "without": "False"}
LAYOUTS = {"sp 1": (1, ""), "ring 2 on FSDP2": (2, "--sp 2 --sp_backend ring")}
DOCUMENTS = (307, 128, 61, 16)
"""Tokens of the documents of every sequence."""
WARM_UP = 2
"""Steps before those that are counted."""


def golden(quick: bool) -> Iterator[tuple[str, Any]]:
    """Yield one number for each value, besides `versions`."""
    yield "versions", versions()
    with tempfile.TemporaryDirectory() as folder:
        found = of_commands(Path(folder))
        run_ranks(1, f"{__name__}:write_inputs", folder)
        for processes in (1, 2):
            found |= of_runs(Path(folder), processes)
    for what, counts in found.items():
        counts[counter.READ] >>= 10  # what /proc says of a process varies by some bytes
        yield from ((f"{what}: {name}", count) for name, count in zip(counter.NAMES, counts, strict=True))


def versions() -> dict[str, str]:
    python = ".".join(platform.python_version_tuple()[:2])
    return {"python": python} | {name: Version(version(name)).public for name in LIBRARIES}


# Whole processes


def of_commands(folder: Path) -> dict[str, list[int]]:
    """Run each command twice, the first time to fill caches."""
    kept = ("HOME", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "VIRTUAL_ENV")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    environment |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "COLUMNS": "80", "LC_ALL": "C.UTF-8"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    return {
        what: [_of_process(folder, flags.split(), environment) for _ in range(2)][1] for what, flags in COMMANDS.items()
    }


def _of_process(folder: Path, arguments: list[str], environment: Mapping[str, str]) -> list[int]:
    with tempfile.TemporaryDirectory() as counts:
        path = os.pathsep.join((str(Path(counter.__file__).parent), str(ROOT)))
        counting = {"PYTHONPATH": path, "GOLDEN_COUNTS": counts}
        command = [sys.executable, "-m", "longctx", *arguments]
        done = subprocess.run(command, cwd=folder, env={**environment, **counting}, capture_output=True, check=False)
        assert done.returncode in (0, 2), done.stderr.decode()
        return counter.total(counts)


# Runs in processes that have imported everything


def of_runs(folder: Path, processes: int) -> dict[str, list[int]]:
    """Count in runs of every layout of so many processes."""
    cases = {}
    if processes == 1:
        prepare = f"--prepare_only True --model_name_or_path tiny --max_length 4096 --dataset_name {folder}"
        cases |= {"prepare first": f"{prepare}/first.jsonl", "prepare": f"{prepare}/second.jsonl"}
    layouts = {layout: flags for layout, (ranks, flags) in LAYOUTS.items() if ranks == processes}
    given = f"--model_name_or_path {folder}/model --dataset_name {folder}/rows.jsonl {RUN}"
    for (layout, flags), (how, value) in product(layouts.items(), CHECKPOINTS.items()):
        step = f"a step at {layout}, {how} activation checkpoints"
        cases[step] = f"{given} {flags} --gradient_checkpointing {value} --save_strategy no"
    backend = None if processes == 1 else "gloo"
    marks = run_ranks(processes, f"{__name__}:marks_of_runs", str(folder), cases, backend=backend, timeout=1200)[0]
    found = {what: _of_step(marks[what]) for what in cases if what.startswith("a step")}
    if processes == 1:
        found["1,000 documents tokenised"] = _between(*(marks["prepare"][place][1] for place in (0, -1)))
    return found


Marks = list[tuple[str, list[int]]]
"""Events of a run in their order, each with the counts up to there."""


def _between(before: list[int], after: list[int]) -> list[int]:
    return [late - early for early, late in zip(before, after, strict=True)]


def _of_step(marks: Marks) -> list[int]:
    """Return the least of each count over steps after the first ones."""
    begins = [counts for event, counts in marks if event == "on_step_begin"][WARM_UP:]
    return [min(counts) for counts in zip(*map(_between, begins, begins[1:]), strict=True)]


def write_inputs(folder: str) -> None:
    """Write a model of 8 layers, sequences for it, and two data sets of texts."""
    from longctx.model.tiny import tiny_config, tiny_model, tiny_tokenizer
    from tests.training.test_training import make_documents, write_jsonl

    config = tiny_config()
    config.update({"num_hidden_layers": 8, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16})
    config.layer_types = ["full_attention"] * 8
    tiny_model(config=config).save_pretrained(f"{folder}/model")
    tiny_tokenizer().save_pretrained(f"{folder}/model")
    write_jsonl(Path(folder, "rows.jsonl"), make_documents(DOCUMENTS * 8, masked=0))
    numbers = random.Random(0)
    for name in ("first", "second"):
        texts = (" ".join(str(numbers.random()) for _ in range(20)) for _ in range(1000))
        Path(folder, f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def marks_of_runs(folder: str, cases: Mapping[str, str]) -> dict[str, Marks]:
    """Train every case on this rank, and return its marks: all events of the Trainer, and the begin and end."""
    import datasets
    from transformers.trainer_callback import CallbackHandler

    from longctx.train import main
    from tests.training.test_training import log_of

    if os.environ["WORLD_SIZE"] == "1":
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
    os.chdir(folder)
    datasets.config.HF_DATASETS_CACHE = f"{folder}/cache-of-runs"
    marks: dict[str, Marks] = {}
    counts = tempfile.mkdtemp(dir=folder)
    counter.start(counts)
    call_event = CallbackHandler.call_event

    def marked(self: Any, event: str, *arguments: Any, **keywords: Any) -> Any:
        marks[case].append((event, counter.read()))
        return call_event(self, event, *arguments, **keywords)

    CallbackHandler.call_event = marked  # type: ignore[method-assign]
    for case, flags in one_by_one(cases):
        marks[case] = [("begin", counter.read())]
        (main if "--prepare_only" in flags else log_of)(flags.split())
        marks[case].append(("end", counter.read()))
    counter.stop()
    return marks


def differs(name: str, before: Any, now: Any) -> str:
    """Return how a count rose or fell, or "" if it did not. With other versions, say that nothing is compared."""
    if name == "versions" and before != now:
        print(f"counts are not compared: they are recorded with {before}, and here is {now}", file=sys.stderr)
    if name == "versions" or recorded("counts").get("versions") != versions():
        return ""
    if abs(now - before) <= (SLACK if before < SMALL else TOLERANCE * before):
        return ""
    return f"{'rose' if now > before else 'fell'} from {before:,} to {now:,}"
