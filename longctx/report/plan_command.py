"""The command that starts a planned run, with every flag that its forecast assumes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from longctx.forecast.candidates import Candidate
from longctx.model.rope import scaling_for

ASSUMED = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "bf16": True, "dtype": "float32"}
"""Flags of longctx.train that a plan assumes, unless `Commands.adapter` has them."""


@dataclass(frozen=True, kw_only=True)
class Commands:
    """The commands of a plan, which differ in devices, length and arrangement."""

    config: PretrainedConfig
    """The model's, with `rope_scaling` applied."""
    model: str
    """Its name, its folder, or the config.json in it."""
    revision: str
    rope_scaling: str | None
    """The --rope_scaling that was asked for."""
    adapter: Mapping[str, Any]
    """Flags of longctx.train about adapters."""
    gpus_per_node: int

    def command(self, candidate: Candidate, length: int) -> str:
        """Return the command that trains the candidate on sequences of `length` tokens."""
        parts = [self.launcher(candidate.dims.world_size), self.run_flags(), self.rope_flags(length)]
        return " ".join(part for part in [*parts, length_flags(candidate, length)] if part)

    def launcher(self, gpus: int) -> str:
        """Return what starts so many processes."""
        words = ["accelerate", "launch", *(["--multi_gpu"] if gpus > 1 else []), "--num_processes", str(gpus)]
        if gpus > self.gpus_per_node:
            words += ["--num_machines", str(gpus // self.gpus_per_node), "--machine_rank", "RANK"]
            words += ["--main_process_ip", "HOST", "--main_process_port", "29500"]
        return shlex.join([*words, "-m", "longctx.train"])

    def run_flags(self) -> str:
        """Return the flags that depend neither on the arrangement nor on the length."""
        words = ["--model_name_or_path", str(model_folder(self.model)), "--dataset_name", "DATA"]
        words += ["--model_revision", self.revision] if self.revision != "main" else []
        if self.adapter["use_peft"]:
            words += ["--use_peft", "True", "--lora_r", str(self.adapter["lora_r"])]
        for name in ("load_in_4bit", "use_bnb_nested_quant"):
            words += [f"--{name}", "True"] if self.adapter.get(name) else []
        assumed = {name: self.adapter.get(name, value) for name, value in ASSUMED.items()}
        return shlex.join([*words, *(word for name, value in assumed.items() for word in (f"--{name}", str(value)))])

    def rope_flags(self, length: int) -> str:
        """Return the flag that extends the model's context to this length; empty if there is none."""
        scaling = self.context(length)["rope_scaling"] or self.rope_scaling
        return shlex.join(["--rope_scaling", scaling]) if scaling else ""

    def context(self, length: int) -> dict[str, Any]:
        """Return the model's context, and the --rope_scaling that a longer sequence needs or why there is none."""
        scaling = problem = None
        try:
            scaling = scaling_for(self.config, length)
        except ValueError as error:
            problem = str(error)
        context = self.config.get_text_config().max_position_embeddings
        return {"tokens": context, "length": length, "rope_scaling": scaling, "problem": problem}


def length_flags(candidate: Candidate, length: int) -> str:
    """Return the length's flag and those that select the candidate."""
    return shlex.join(["--max_length", str(length), *candidate.flags()])


def model_folder(model: str) -> Path:
    """Return the model's folder if the name is that of its config.json, else the name."""
    return Path(model).parent if Path(model).is_file() else Path(model)
