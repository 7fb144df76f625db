"""The runs that `training` records. Each is trained once, in one group with others on as many ranks."""

from __future__ import annotations

import atexit
import json
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tests.workers import run_ranks

CHECKPOINT = Path(__file__).parent / "data" / "checkpoint"
"""Documents, and `checkpoint-2` of a run of the smallest model on ring 2, from when goldens were first recorded."""


class Run(NamedTuple):
    """A run of six steps, with four sequences in each."""

    processes: int
    flags: str
    """Besides those of all runs; `{root}` is the folder of models and data."""
    model: str = "{root}/small"
    method: str = "train"
    data: str = "{root}/documents"


COMMON = (
    "--max_steps 6 --learning_rate 5e-3 --max_length 160 --overlong split --train_sampling_strategy random "
    "--logging_steps 1 --per_device_train_batch_size 1 --report_to none --disable_tqdm True --use_cpu True"
)
SAVES = " --save_strategy steps --save_steps 2"
LARGEST_LOSS = SAVES + " --eval_strategy steps --eval_steps 2 --load_best_model_at_end True"
LARGEST_LOSS += " --metric_for_best_model loss --greater_is_better True"
LORA = " --use_peft True --lora_r 4 --lora_alpha 8 --lora_target_modules all-linear"
ONE = " --gradient_accumulation_steps 4"
RING = " --sp 2 --sp_backend ring"
RING_OF_2, ULYSSES_OF_2 = RING + ONE, " --sp 2 --sp_backend ulysses" + ONE
PADDED = " --packing False --per_device_train_batch_size 2 --gradient_accumulation_steps 2"
PAIRS = " --share_prompts True --overlong drop --max_length 512"
FURTHER = f" --resume_from_checkpoint {CHECKPOINT}/checkpoint-2" + ONE
SMALLEST = {"model": "{root}/smallest", "data": f"{CHECKPOINT}/documents.jsonl"}

QUICK = {"sp 1": Run(1, ONE + SAVES), "committed checkpoint on 1 process": Run(1, FURTHER + SAVES, **SMALLEST)}
RUNS = QUICK | {
    "sp 1, padded": Run(1, PADDED),
    "sp 1, stream": Run(1, ONE + " --dataset_streaming True"),
    "ring 2, FSDP2": Run(2, RING_OF_2 + SAVES),
    "ring 2, experts": Run(2, RING_OF_2 + " --router_aux_loss_coef 0.1", model="{root}/experts"),
    "ring 2, LoRA": Run(2, RING_OF_2 + SAVES + LORA),
    "ring 2, evaluation and best model": Run(2, RING_OF_2 + LARGEST_LOSS),
    "ring 2, weights only": Run(2, RING_OF_2 + SAVES + " --save_only_model True"),
    "ring 2, DPO": Run(2, RING_OF_2 + SAVES + PAIRS, method="dpo", data="{root}/pairs"),
    "dp 2": Run(2, " --sp 1 --gradient_accumulation_steps 2"),
    "Ulysses 2, ZeRO-3": Run(2, ULYSSES_OF_2 + SAVES),
    "committed checkpoint on ring 2": Run(2, RING + FURTHER, **SMALLEST),
}


class Outcome(NamedTuple):
    """What is left of a run."""

    folder: Path
    denominators: list[Any]
    """What the loss of each step is divided by."""

    @property
    def state(self) -> dict[str, Any]:
        """The trainer's state that is saved with the model."""
        return json.loads((self.folder / "trainer_state.json").read_text())

    @property
    def log(self) -> list[dict[str, Any]]:
        """The entries of its log, with dots between the names of nested values."""
        return [dict(flat(entry)) for entry in self.state["log_history"]]

    @property
    def checkpoint(self) -> Path | None:
        """The last one, if the run has saved any."""
        return max(self.folder.glob("checkpoint-*"), default=None)


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values of nested dictionaries, with dots between the names."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def outcome(name: str) -> Outcome:
    """The outcome of a run, which is trained when it, or another of its batch, is asked for."""
    return _outcomes(RUNS[name].processes, name in QUICK)[name]


@cache
def _outcomes(processes: int, quick: bool) -> dict[str, Outcome]:
    root, cases = _inputs(), {}
    for name, run in RUNS.items():
        if run.processes == processes and (name in QUICK) == quick:
            saving = "" if SAVES in run.flags else " --save_strategy no"
            paths = f" --model_name_or_path {run.model} --dataset_name {run.data} --output_dir '{root / name}'"
            cases[name] = run.method, shlex.split((COMMON + run.flags + saving + paths).format(root=root))
    found = run_ranks(processes, "tests.golden.ranks:train", cases, timeout=1200)[0]
    return {name: Outcome(root / name, found[name]) for name in cases}


@cache
def _inputs() -> Path:
    """The folder of models, data and output folders, which is removed at the end of the process."""
    root = Path(tempfile.mkdtemp(prefix="longctx-golden-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    run_ranks(1, "tests.golden.ranks:write_inputs", str(root))
    return root


def tensors_of(path: Path) -> dict[str, tuple[str, bytes]]:
    """Dtype with shape, and bytes, of each tensor in a safetensors file."""
    contents = path.read_bytes()
    start = 8 + int.from_bytes(contents[:8], "little")
    header = json.loads(contents[8:start])
    header.pop("__metadata__", None)
    return {
        name: (f"{of['dtype']} {of['shape']}", contents[slice(*(start + at for at in of["data_offsets"]))])
        for name, of in sorted(header.items())
    }
