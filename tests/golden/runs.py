"""The runs that `training` and `folders` record. Each is trained once in a process, with others of as many ranks."""

from __future__ import annotations

import atexit
import importlib.util
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
"""Documents, and `checkpoint-2` of the run "smallest model, ring 2", from when goldens were first recorded."""


class Run(NamedTuple):
    """A run of six steps, with four sequences in each."""

    processes: int
    flags: str
    """Besides those of all runs; `{root}` is the folder of models and data."""
    model: str = "{root}/small"
    method: str = "train"
    data: str = "{root}/documents"
    environment: Mapping[str, str] = {}
    sent: str = ""
    """A signal that ends the run before its fourth step."""
    after: str = ""
    """The run, ended by a signal, whose output folder this one goes on in."""


COMMON = (
    "--max_steps 6 --learning_rate 5e-3 --max_length 160 --overlong split --train_sampling_strategy random "
    "--logging_steps 1 --per_device_train_batch_size 1 --report_to none --disable_tqdm True --use_cpu True"
)
SAVES = " --save_strategy steps --save_steps 2"
EVALUATES = SAVES + " --eval_strategy steps --eval_steps 2 --load_best_model_at_end True"
LARGEST_LOSS = EVALUATES + " --metric_for_best_model loss --greater_is_better True"
LORA = " --use_peft True --lora_r 4 --lora_alpha 8 --lora_target_modules all-linear"
RING, GATHER = " --sp 2 --sp_backend ring", " --sp 2 --sp_backend gather"
ULYSSES = " --sp 2 --sp_backend ulysses"
ONE = " --gradient_accumulation_steps 4"
RING_OF_2, ULYSSES_OF_2 = RING + ONE, ULYSSES + ONE
PADDED = " --packing False --per_device_train_batch_size 2 --gradient_accumulation_steps 2"
STREAM = " --dataset_streaming True"
PAIRS = " --share_prompts True --overlong drop --max_length 512"
ZERO_2 = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
FURTHER = f" --resume_from_checkpoint {CHECKPOINT}/checkpoint-2 --gradient_accumulation_steps 4"
SMALLEST = {"model": "{root}/smallest", "data": f"{CHECKPOINT}/documents.jsonl"}

QUICK = {"sp 1": Run(1, ONE + SAVES), "committed checkpoint on 1 process": Run(1, FURTHER + SAVES, **SMALLEST)}
RUNS = QUICK | {
    "sp 1, padded": Run(1, PADDED),
    "sp 1, stream": Run(1, ONE + STREAM),
    "sp 1, label smoothing": Run(1, ONE + " --label_smoothing_factor 0.1"),
    "ring 2, FSDP2": Run(2, RING_OF_2 + SAVES),
    "ring 2, padded": Run(2, RING + PADDED),
    "ring 2, untied head": Run(2, RING_OF_2 + SAVES, model="{root}/untied"),
    "ring 2, stream": Run(2, RING_OF_2 + SAVES + STREAM),
    "ring 2, bf16": Run(2, RING_OF_2 + " --bf16 True"),
    "ring 2, label smoothing": Run(2, RING_OF_2 + " --label_smoothing_factor 0.1"),
    "ring 2, tiled MLP": Run(2, RING_OF_2 + " --tiled_mlp True --tiled_mlp_num_shards 3"),
    "ring 2, no checkpointing": Run(2, RING_OF_2 + " --gradient_checkpointing False"),
    "ring 2, selective": Run(2, RING_OF_2 + """ --activation_checkpointing_kwargs '{{"selective": true}}'"""),
    "ring 2, whole layers": Run(2, RING_OF_2 + """ --activation_checkpointing_kwargs '{{"selective": false}}'"""),
    "ring 2, experts": Run(2, RING_OF_2 + " --router_aux_loss_coef 0.1", model="{root}/experts"),
    "ring 2, LoRA": Run(2, RING_OF_2 + SAVES + LORA),
    "ring 2, QLoRA": Run(2, RING_OF_2 + LORA + " --load_in_4bit True", model="{root}/wide"),
    "ring 2, evaluation and best model": Run(2, RING_OF_2 + LARGEST_LOSS),
    "ring 2, weights only": Run(2, RING_OF_2 + SAVES + " --save_only_model True"),
    "ring 2, DPO": Run(2, RING_OF_2 + SAVES + PAIRS, method="dpo", data="{root}/pairs"),
    "gather 2": Run(2, GATHER + ONE),
    "dp 2": Run(2, " --sp 1 --gradient_accumulation_steps 2"),
    "Ulysses 2, ZeRO-3": Run(2, ULYSSES_OF_2 + SAVES),
    "Ulysses 2, padded": Run(2, ULYSSES + PADDED),
    "Ulysses 2, bf16": Run(2, ULYSSES_OF_2 + " --bf16 True"),
    "Ulysses 2, chunked layers": Run(2, ULYSSES_OF_2 + " --sequence_chunk_size 50"),
    "Ulysses 2, selective": Run(2, ULYSSES_OF_2 + """ --activation_checkpointing_kwargs '{{"selective": true}}'"""),
    "Ulysses 2, experts": Run(2, ULYSSES_OF_2 + " --router_aux_loss_coef 0.1", model="{root}/experts"),
    "Ulysses 2, LoRA": Run(2, ULYSSES_OF_2 + SAVES + LORA),
    "Ulysses 2, evaluation and best model": Run(2, ULYSSES_OF_2 + EVALUATES),
    "Ulysses 2, DPO": Run(2, ULYSSES_OF_2 + PAIRS, method="dpo", data="{root}/pairs"),
    "Ulysses 2, ZeRO-2": Run(2, ULYSSES_OF_2, environment=ZERO_2),
    "smallest model, ring 2": Run(2, RING_OF_2 + SAVES, **SMALLEST),
    "committed checkpoint on ring 2": Run(2, RING + FURTHER, **SMALLEST),
    "committed checkpoint on Ulysses 2": Run(2, ULYSSES + FURTHER, **SMALLEST),
    "hybrid 4": Run(4, " --sp 4 --sp_backend hybrid --gradient_accumulation_steps 4"),
    "HSDP, ring 2": Run(4, RING + " --dp_replicate 2 --gradient_accumulation_steps 2"),
    "Ulysses 2 × dp 2, ZeRO-3": Run(4, ULYSSES + " --gradient_accumulation_steps 2"),
}
KILLED = ("sp 1", "ring 2, FSDP2", "ring 2, stream", "ring 2, LoRA", "ring 2, DPO", "Ulysses 2, ZeRO-3")
ENDED = {f"{name}, killed": (name, "SIGKILL") for name in KILLED} | {"sp 1, stopped": ("sp 1", "SIGTERM")}
RUNS |= {name: RUNS[whole]._replace(sent=sent) for name, (whole, sent) in ENDED.items()}
RUNS |= {
    f"{name}, resumed": RUNS[whole]._replace(flags=RUNS[whole].flags + " --resume_from_checkpoint auto", after=name)
    for name, (whole, _) in ENDED.items()
}
RESUMED = {f"{name}, resumed": whole for name, (whole, _) in ENDED.items()}
"""Runs that go on after a signal, by name, and the same runs without one."""
if importlib.util.find_spec("bitsandbytes") is None:  # the comparison then says that the values are gone
    del RUNS["ring 2, QLoRA"]


class Outcome(NamedTuple):
    """What is left of a run."""

    folder: Path
    denominators: list[Any]
    """What the loss of each step is divided by; empty for a run that was killed."""
    left: list[str]
    """Names in its folder when it had ended."""

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
    return _outcomes(next(batch for batch in _batches() if name in batch))[name]


@cache
def _batches() -> list[tuple[str, ...]]:
    """Names of runs that share a process group. A kill ends the group, so that each killed run has one of its own."""
    found: dict[Any, list[str]] = {}
    for name, run in RUNS.items():
        of = name if run.sent == "SIGKILL" else (run.processes, bool(run.after), name in QUICK)
        found.setdefault(of, []).append(name)
    return [tuple(names) for names in found.values()]


@cache
def _outcomes(batch: tuple[str, ...]) -> dict[str, Outcome]:
    for ended in {RUNS[name].after for name in batch} - {""}:
        outcome(ended)
    cases = {name: (RUNS[name].method, arguments_of(name), RUNS[name].environment, RUNS[name].sent) for name in batch}
    try:
        found = run_ranks(RUNS[batch[0]].processes, "tests.golden.ranks:train", cases, timeout=1200)[0]
    except AssertionError as error:
        if RUNS[batch[0]].sent != "SIGKILL" or "the process that leads the ranks has ended" not in str(error):
            raise
        found = {name: [] for name in batch}
    folders = {name: _folder_of(name) for name in batch}
    return {name: Outcome(of, found[name], sorted(path.name for path in of.iterdir())) for name, of in folders.items()}


def arguments_of(name: str) -> list[str]:
    """The flags of a run, as in its command."""
    run, root = RUNS[name], inputs()
    saving = "" if SAVES in run.flags else " --save_strategy no"
    paths = f" --model_name_or_path {run.model} --dataset_name {run.data} --output_dir '{_folder_of(name)}'"
    return shlex.split((COMMON + run.flags + saving + paths).format(root=root))


def _folder_of(name: str) -> Path:
    return inputs() / (RUNS[name].after or name)


@cache
def inputs() -> Path:
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
