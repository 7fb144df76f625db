"""The command lines of a case in its spelling, and the plan that the reference follows."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from longctx.model.allow_list import AUXILIARY_LOSS_MODELS

from .data import SEED, Data, Steps, make_data, steps_of
from .models import name_of
from .reference import MOST_SEARCHED
from .space import LAUNCHERS, Case
from .values import PREFERENCES

ZERO = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
}
"""What `accelerate launch` exports for configs/zero….yaml, besides the stage."""

OLDER_NAMES = {"max_length": "max_seq_length", "dtype": "torch_dtype"}

ADAPTERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lora": ({}, {"r": 16, "lora_alpha": 32}),
    "rslora all-linear": (
        {"lora_target_modules": "all-linear", "use_rslora": True, "lora_r": 4, "lora_alpha": 8},
        {"target_modules": "all-linear", "use_rslora": True, "r": 4, "lora_alpha": 8},
    ),
    "dora": (
        {"use_dora": True, "lora_r": 3, "lora_target_modules": "all-linear"},
        {"use_dora": True, "r": 3, "lora_alpha": 32, "target_modules": "all-linear"},
    ),
    "norm": (
        {"lora_modules_to_save": ["norm"], "lora_target_modules": "all-linear"},
        {"modules_to_save": ["norm"], "r": 16, "lora_alpha": 32, "target_modules": "all-linear"},
    ),
    "embeddings": (
        {"lora_modules_to_save": ["embed_tokens"], "lora_target_modules": "all-linear"},
        {"modules_to_save": ["embed_tokens"], "r": 16, "lora_alpha": 32, "target_modules": "all-linear"},
    ),
    "head": (
        {"lora_modules_to_save": ["lm_head"], "lora_target_modules": "all-linear"},
        {"modules_to_save": ["lm_head"], "r": 16, "lora_alpha": 32, "target_modules": "all-linear"},
    ),
    "regular expression": (
        {"lora_target_modules": ".*1.*_proj", "lora_r": 2},
        {"target_modules": ".*1.*_proj", "r": 2, "lora_alpha": 32},
    ),
}
"""Our flags, and peft's own names for them."""

RESUMED_ON: dict[str, dict[str, Any]] = {
    "same": {},
    "one process": {"sp": 1, "dp": 1, "dp_replicate": 1, "engine": "auto", "backend": "auto"},
    "ring": {"sp": 2, "dp": 1, "dp_replicate": 1, "engine": "fsdp2", "backend": "ring"},
    "ulysses": {"sp": 2, "dp": 1, "dp_replicate": 1, "engine": "deepspeed", "backend": "ulysses"},
    "dp": {"sp": 1, "dp": 2, "dp_replicate": 1, "engine": "fsdp2", "backend": "auto"},
    "zero2": {"sp": 2, "dp": 1, "dp_replicate": 1, "engine": "zero2", "backend": "auto"},
}


@dataclass(frozen=True, kw_only=True)
class Command:
    """One run of longctx."""

    processes: int
    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    launcher: tuple[str, ...] = ()
    """A real command line to put before the arguments; else ranks are forked, as torchrun would start them."""

    def pasted(self) -> str:
        """What a user types."""
        words = self.launcher or ("torchrun", "--nproc_per_node", str(self.processes), "-m", self.module)
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return " ".join([*variables, *map(_quoted, (*words, *self.arguments))])


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A case on disk."""

    case: Case
    folder: Path
    commands: tuple[Command, ...]
    """One after the other: a resumed run is two."""
    plan: dict[str, Any]
    """For the reference, but for what the log says."""
    total: int | None
    """Steps of the whole run; None where it depends on how rows are packed."""


def prepare(case: Case, models: Path, folder: Path) -> Prepared:
    """Write the data of a case; its model is in `models` already."""
    data = make_data(case, folder)
    if case.order == "random" and len(data.documents) > MOST_SEARCHED:
        case = replace(case, order="whole")
    layouts = [case] + ([replace(case, **RESUMED_ON[case.resume])] if case.resume else [])
    steps = steps_of(case, data.documents, layouts=layouts)
    output = folder / "output"
    flags = _flags(case, data, steps, model=models / name_of(case), output=output)
    commands = [_command(case, flags, folder)]
    if case.resume:
        # The first run saves every step, and the second goes on from its first one.
        first, again = dict(flags), dict(flags)
        first |= {"save_strategy": "steps", "save_steps": 1}
        again |= {"save_strategy": "no", "resume_from_checkpoint": str(output / "checkpoint-1")}
        other = layouts[1]
        again |= _layout(other) | {"per_device_train_batch_size": steps.rows // (other.dp * other.accumulation)}
        again = {name: value for name, value in again.items() if value is not None}
        commands = [_command(case, first, folder), _command(other, again, folder)]
    return Prepared(
        case=case,
        folder=folder,
        commands=tuple(commands),
        plan=_plan(case, data, steps, model=models / name_of(case), output=output),
        total=steps.total,
    )


# ------------------------------------------------------------------------------------------------
# Flags
# ------------------------------------------------------------------------------------------------


def _flags(case: Case, data: Data, steps: Steps, *, model: Path, output: Path) -> dict[str, Any]:
    """Every flag by its name, with a Python value."""
    schedule, _, schedule_kwargs = case.schedule.partition(" ")
    flags: dict[str, Any] = {
        "model_name_or_path": str(model),
        **data.flags,
        "output_dir": str(output),
        "max_length": case.max_length,
        "per_device_train_batch_size": steps.batch,
        "gradient_accumulation_steps": case.accumulation,
        "learning_rate": case.learning_rate,
        "optim": case.optimizer,
        "lr_scheduler_type": schedule,
        "max_grad_norm": case.clipping,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "packing": case.packing not in ("none", "padding_free"),
    }
    flags |= {"num_train_epochs": case.epochs} if case.epochs else {"max_steps": case.steps}
    flags |= _layout(case)
    flags |= _memory_options(case)
    optional = {
        "lr_scheduler_kwargs": schedule_kwargs,
        "warmup_steps": case.warmup,
        "weight_decay": case.weight_decay,
        "label_smoothing" if case.reads_pairs else "label_smoothing_factor": case.smoothing,
        "dataloader_drop_last": case.drop_last,
        "rope_scaling": case.rope_scaling,
        "model_init_kwargs": case.model_init_kwargs,
        "padding_free": case.packing == "padding_free",
        "packing_strategy": "bfd_split" if case.packing == "bfd_split" else "",
        "overlong": "" if case.overlong == "raise" else case.overlong,
        "train_sampling_strategy": "sequential" if case.order == "sequential" else "",
    }
    flags |= {name: value for name, value in optional.items() if value}
    if case.model in AUXILIARY_LOSS_MODELS:  # whose own coefficient is above 0
        flags["router_aux_loss_coef"] = case.aux_loss
    flags |= PREFERENCES.get(case.method, {})
    if not case.share_prompts:
        flags["share_prompts"] = False
    if case.adapter:
        flags |= {"use_peft": True} | ADAPTERS[case.adapter][0]
    flags |= _evaluation(case)
    if case.unlucky:
        name, _, value = case.unlucky.partition(" ")
        flags[name] = value
    return flags


def _layout(case: Case) -> dict[str, Any]:
    """Flags of degrees, backend and engine; None takes a flag out."""
    return {
        "sp": case.sp if case.sp > 1 else None,
        "sp_backend": case.backend if case.backend != "auto" and case.sp > 1 else None,
        "dp_replicate": case.dp_replicate if case.dp_replicate > 1 else None,
        "engine": case.engine if case.engine in ("fsdp2", "deepspeed") else None,
    }


def _memory_options(case: Case) -> dict[str, Any]:
    kwargs = {"every 2": {"every_n_layers": 2}, "selective": {"selective": True}}
    kwargs |= {"not selective": {"selective": False}, "reentrant": {"use_reentrant": True}}
    flags: dict[str, Any] = {"memory": case.memory} if case.memory != "balanced" else {}
    if case.checkpointing in ("True", "False"):
        flags["gradient_checkpointing"] = case.checkpointing == "True"
    elif case.checkpointing:
        flags["gradient_checkpointing_kwargs"] = json.dumps(kwargs[case.checkpointing])
    if case.sequence_chunk_size:
        flags["sequence_chunk_size"] = case.sequence_chunk_size
    if case.tiled_mlp == "True":
        flags["tiled_mlp"] = True
    elif case.tiled_mlp:
        flags |= {"tiled_mlp": True, "tiled_mlp_num_shards": int(case.tiled_mlp)}
    if case.heads_k_stride:
        flags["heads_k_stride"] = case.heads_k_stride
    if case.activation_offloading:
        flags["activation_offloading"] = True
    for kind in ("optimizer", "param"):
        if case.offload in (kind, "both"):
            flags[f"offload_{kind}_device"] = "cpu"
    if case.loss_type != "nll":
        flags["loss_type"] = case.loss_type
    return flags


def _evaluation(case: Case) -> dict[str, Any]:
    if not case.evaluation:
        return {}
    flags: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2}
    if case.evaluation == "epoch":
        flags = {"eval_strategy": "epoch"}
    if case.evaluation == "at the start":
        flags["eval_on_start"] = True
    if case.evaluation == "best model":
        flags |= {"load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 1}
    if case.evaluation == "early stopping":
        flags |= {"early_stopping_patience": 1, "greater_is_better": True}
    if case.evaluation == "packed otherwise":
        flags["eval_packing"] = case.packing in ("none", "padding_free")
    return flags


# ------------------------------------------------------------------------------------------------
# Spelling
# ------------------------------------------------------------------------------------------------


def _command(case: Case, flags: Mapping[str, Any], folder: Path) -> Command:
    given = {name: value for name, value in flags.items() if value is not None}
    environment = {}
    if case.engine.startswith("zero") and case.spelling != "--accelerate_config":
        environment = ZERO | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": case.engine.removeprefix("zero")}
    launcher: tuple[str, ...] = ()
    if case.spelling in LAUNCHERS:
        launcher = _launcher(case.spelling, case.processes, _module(case))
        if case.spelling != "torchrun":
            given.setdefault("num_processes", case.processes)
        if case.spelling == "--accelerate_config":
            given["accelerate_config"] = case.engine if case.engine.startswith("zero") else "fsdp2"
            given.pop("engine", None)
    return Command(
        processes=case.processes,
        module=_module(case),
        arguments=tuple(_spelled(case.spelling, given, folder)),
        environment=environment,
        launcher=launcher,
    )


def _module(case: Case) -> str:
    return "longctx.dpo" if case.reads_pairs else "longctx.train"


def _launcher(spelling: str, processes: int, module: str) -> tuple[str, ...]:
    scripts = Path(sys.executable).parent
    return {
        "accelerate launch": (str(scripts / "accelerate"), "launch", "-m", module),
        "torchrun": (str(scripts / "torchrun"), "--nproc_per_node", str(processes), "-m", module),
        "longctx train": (str(scripts / "longctx"), module.rpartition(".")[2]),
    }.get(spelling, (sys.executable, "-m", module))


def _spelled(spelling: str, flags: Mapping[str, Any], folder: Path) -> list[str]:
    """The same settings in other words."""
    if spelling == "equals":
        return [word for name, value in flags.items() for word in _words(name, value, equals=True)]
    if spelling == "dashes":
        return [word for name, value in flags.items() for word in _words(name.replace("_", "-"), value)]
    if spelling == "older names":
        older = {OLDER_NAMES.get(name, name): value for name, value in {**flags, "dtype": "float32"}.items()}
        return [word for name, value in older.items() for word in _words(name, value)]
    if spelling in ("yaml", "yaml and flags"):
        in_file = dict(flags) if spelling == "yaml" else dict(list(flags.items())[::2])
        for name in ("dataset_weights", "lr_scheduler_kwargs", "model_init_kwargs"):  # YAML's own lists and mappings
            if isinstance(in_file.get(name), str):
                in_file[name] = json.loads(in_file[name])
        if "datasets" in in_file:
            in_file["datasets"] = [{"path": path} for path in in_file["datasets"]]
        path = folder / f"run-{len(list(folder.glob('run-*.yaml')))}.yaml"
        path.write_text(yaml.safe_dump(in_file))
        rest = {name: value for name, value in flags.items() if name not in in_file}
        return ["--config", str(path), *(word for name, value in rest.items() for word in _words(name, value))]
    return [word for name, value in flags.items() for word in _words(name, value)]


def _words(name: str, value: Any, *, equals: bool = False) -> list[str]:
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={value}"] if equals else [f"--{name}", str(value)]


def _quoted(word: str) -> str:
    return shlex.quote(os.path.basename(word) if word.startswith(str(Path(sys.executable).parent)) else word)


# ------------------------------------------------------------------------------------------------
# The reference's plan
# ------------------------------------------------------------------------------------------------


def _plan(case: Case, data: Data, steps: Steps, *, model: Path, output: Path) -> dict[str, Any]:
    schedule, _, schedule_kwargs = case.schedule.partition(" ")
    return {
        "model": str(model),
        "model_init_kwargs": json.loads(case.model_init_kwargs or "{}"),
        "rope_scaling": _rope(case.rope_scaling),
        "adapter": ADAPTERS[case.adapter][1] if case.adapter else None,
        "seed": SEED,
        "perturbation": 0.0,
        "documents": data.documents,
        "evaluation": data.evaluation,
        "evaluate_at": [],
        "preference": _preference(case) if case.reads_pairs else None,
        "order": case.order,
        "rows": steps.rows,
        "drop_last": case.drop_last,
        "num_steps": steps.total,
        "steps_per_epoch": steps.per_epoch,
        "stops_early": case.evaluation == "early stopping",
        "tokens": None,
        "losses": None,
        "epochs": None,
        "smoothing": case.smoothing,
        "aux_loss": case.aux_loss,
        "clipping": case.clipping,
        "optimizer": case.optimizer,
        "learning_rate": case.learning_rate,
        "weight_decay": case.weight_decay,
        "schedule": schedule,
        "schedule_kwargs": json.loads(schedule_kwargs or "{}"),
        "warmup": case.warmup,
        "saved": str(output),
    }


def _preference(case: Case) -> dict[str, Any]:
    return {"loss_type": ["sigmoid"], **PREFERENCES[case.method], "label_smoothing": case.smoothing}


def _rope(spelled: str) -> dict[str, Any] | None:
    """`yarn:4` and JSON in transformers' words; Llama 3's bounds are those of Llama 3.1."""
    if not spelled:
        return None
    if spelled.startswith("{"):
        return dict(json.loads(spelled))
    kind, _, factor = spelled.partition(":")
    bounds = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    return {"rope_type": kind, "factor": float(factor)} | bounds


def evaluated_at(case: Case, num_steps: int, steps_per_epoch: int | None) -> Sequence[int]:
    """After which steps the run evaluates, 0 for before the first."""
    if not case.evaluation:
        return []
    if case.evaluation == "epoch":
        per_epoch = steps_per_epoch or num_steps
        ends = {step for step in range(1, num_steps + 1) if step % per_epoch == 0}
        return sorted(ends | {num_steps})
    return [0] * (case.evaluation == "at the start") + list(range(1, num_steps + 1))
