"""A resolved run: everything that is decided before processes start, and its description in print."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from transformers import PretrainedConfig
from trl import SFTConfig

from longctx.attention.backends import BACKENDS
from longctx.attention.choice import BackendChoice, Documents, choose_backend, chunking_backend
from longctx.attention.cost import Setup
from longctx.data import name_data
from longctx.forecast.cost import Cost, cost
from longctx.forecast.documents import assumed
from longctx.forecast.memory_options import MemoryOptions
from longctx.forecast.memory_presets import asked_memory_options, prefers_ulysses, with_options
from longctx.forecast.model_sizes import ModelSizes
from longctx.forecast.shape import RunShape
from longctx.launch.console import Line
from longctx.layers.liger import describe_liger
from longctx.machine.here import Machine, devices_per_node
from longctx.model.allow_list import auxiliary_loss_coefficient
from longctx.model.branches import branch_obstacle
from longctx.sequence.mesh import ParallelDims
from longctx.settings.launcher import Launcher
from longctx.settings.values import Settings


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a run finds: the model, the machine and the launcher, which no flag that auto varies changes."""

    model_config: PretrainedConfig
    machine: Machine
    launcher: Launcher
    gpus: int
    """GPUs that a process sees."""
    env: Mapping[str, str]
    """The environment, for the launcher's ranks and nodes."""
    is_here: bool = True
    """Whether the machine is this one, which is looked at then."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that is decided before processes start. What follows from it is a property."""

    flags: Settings
    """What was asked for, with who asked, and the values that follow for the machine."""
    facts: Facts
    world_size: int
    backend: BackendChoice
    engine: str = "none"
    """deepspeed, fsdp2, fsdp1 or none (one process)."""
    engine_reason: str = ""
    layout_reason: str = ""
    """What --sp auto and --memory auto chose, and why."""
    next_choice: str = ""
    """The flags of what they would choose next that needs less memory; empty if there is nothing."""
    forecast: Cost | None = None
    """What the run's steps are predicted to take; None before it is asked for."""

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Every flag's final value: the user's, the profile's, the preset's or the default.

        Raises:
            ValueError: for a memory option or a padding that the run cannot use.
        """
        padding = {"pad_to_multiple_of": self._multiple}
        shared = {"share_prompts": self.prompts_obstacle is None} if self.flags.method.reads_pairs else {}
        return {**self.flags, **padding, **self.memory_options.settings(), **shared}

    @property
    def _multiple(self) -> int:
        """What rows are padded to a multiple of."""
        given, dims = given_multiple(self.flags), self.dims
        if given is not None and given % dims.multiple:
            raise ValueError(
                f"--pad_to_multiple_of {given} is not a multiple of {dims.multiple}, which ring {dims.ring} × ulysses "
                f"{dims.ulysses} needs. Leave it out, or use {math.lcm(given, dims.multiple)}."
            )
        return given or dims.multiple

    def decide(self, *notes: str, **values: Any) -> Run:
        """Return the run with further notes, and with values that follow from others."""
        return replace(self, flags=self.flags.decided(**values).note(*notes))

    @property
    def notes(self) -> tuple[str, ...]:
        """Printed when the run starts."""
        return self.flags.notes

    @property
    def model_config(self) -> PretrainedConfig:
        """The model's configuration, as the flags change it."""
        return self.facts.model_config

    @property
    def use_cpu(self) -> bool:
        """Whether the run is on the CPU, as asked for or without a GPU."""
        return bool(self.flags["use_cpu"])

    @cached_property
    def dims(self) -> ParallelDims:
        """The degrees of parallelism."""
        degrees, copies = self.backend.arrangement, self.flags["dp_replicate"] or 1
        return ParallelDims.arrange(self.world_size, ring=degrees.ring, ulysses=degrees.ulysses, dp_replicate=copies)

    @cached_property
    def setup(self) -> Setup:
        """What the choice of a backend depends on, besides the data."""
        return attention_setup(self.flags, self.facts, self.world_size)

    @property
    def zero_stage(self) -> int | None:
        """The stage of DeepSpeed's ZeRO; None on another engine."""
        asked = self.facts.launcher.zero_stage
        return (3 if asked is None else asked) if self.engine == "deepspeed" else None

    @property
    def promotes_engine(self) -> bool:
        """Whether the launcher named no engine, so that longctx tells accelerate."""
        return self.facts.launcher.engine is None and self.engine != "none"

    @property
    def asked_memory_options(self) -> dict[str, Any]:
        """Memory options that the user or the profile set, by flag."""
        return asked_memory_options(self.flags)

    @property
    def has_group(self) -> bool:
        """Whether the run's processes form a group; DeepSpeed makes one of a single process, too."""
        return self.world_size > 1 or self.engine == "deepspeed"

    @property
    def choice(self) -> dict[str, Any]:
        """What auto chose, and for which devices: a run that resumes on as many and such takes it again."""
        devices = f"{self.world_size} × {self.machine.device}"
        return {**self.decided, "devices": devices} if self.decided["chosen"] else {}

    @property
    def decided(self) -> dict[str, Any]:
        """What one process decides for all, as JSON can express it: what auto chose, and the output folder."""
        chosen = {name: self.flags[name] for name, origin in self.flags.origins.items() if origin == "auto"}
        return {"chosen": chosen, "reason": self.layout_reason, "output_dir": self.flags["output_dir"]}

    @cached_property
    def _shape(self) -> RunShape:
        """Return `shape`, before it is decided whether the exchange overlaps with attention."""
        shape = RunShape.of_values(
            ModelSizes.of_config(self.model_config),
            self.flags,
            dims=self.dims,
            arrangement=self.backend.arrangement,
            engine=self.engine,
            zero_stage=self.zero_stage,
        )
        return with_options(shape, self.flags["memory"], self.asked_memory_options, self.flags["max_length"])

    @property
    def shape(self) -> RunShape:
        """What memory and seconds are predicted from.

        Raises:
            ValueError: for a memory option that the run cannot use.
        """
        options = replace(self._shape.options, overlap_exchange=self.overlaps_exchange)
        return replace(self._shape, options=options)

    @property
    def memory_options(self) -> MemoryOptions:
        """The resolved value of every memory option.

        Raises:
            ValueError: for one that the run cannot use.
        """
        return self._shape.options

    @property
    def machine(self) -> Machine:
        """The machine that the run is on."""
        return self.setup.machine

    @property
    def counts_experts(self) -> bool:
        """Whether micro-batches run forward once more, to count the experts that their tokens choose."""
        return auxiliary_loss_coefficient(self.model_config) > 0

    @property
    def prompts_obstacle(self) -> str | None:
        """Why the answers of a pair do not share their prompt; None if they do."""
        if not self.flags["share_prompts"]:
            return "as --share_prompts False asks"
        return branch_obstacle(
            self.model_config,
            backend_has_branches=BACKENDS[self.backend.name].has_branches,
            is_chunked=self.memory_options.sequence_chunk_size is not None,
        )

    @property
    def overlaps_exchange(self) -> bool:
        """Whether some heads are exchanged while others are attended to: as asked for, or where that is faster."""
        if self.memory_options.overlap_exchange is not None:
            return self.memory_options.overlap_exchange
        all_at_once = self.memory_options.heads_k_stride is None and self.memory_options.sequence_chunk_size is None
        return all_at_once and self.backend.overlaps_exchange

    @property
    def liger_parts(self) -> tuple[str, ...] | None:
        """The parts of the model that Liger computes; None without --use_liger_kernel."""
        return tuple(self.settings["liger_kernel_config"]) if self.settings["use_liger_kernel"] else None

    def cost(self, documents: Sequence[int] | None = None) -> Cost:
        """Return what the run's steps are predicted to take.

        Args:
            documents: lengths of the documents in one sequence; None assumes some where sequences are packed.
        """
        length = self.settings["max_length"]
        row = list(documents or assumed(length, packed=self.settings["packing"]))
        multiple = self.settings["pad_to_multiple_of"]
        padded = -(-length // multiple) * multiple
        return cost(self.shape, self.machine, padded, row, counts_experts=self.counts_experts)

    def training_arguments(self) -> dict[str, Any]:
        """Return keywords for SFTConfig."""
        names = [f.name for f in fields(SFTConfig) if f.init and f.name in self.settings]
        rows = {name: self.flags.flag(name) for name in names}
        chosen = {name: self.settings[name] for name, row in rows.items() if not (row.idle or row.instead)}
        if self.flags.method.reads_pairs:
            del chosen["loss_type"]  # of longctx.training.preference
        chosen |= {"use_liger_kernel": False, "liger_kernel_config": None}  # longctx.layers.liger has put them in place
        chosen |= {"torch_compile": False, "torch_compile_backend": None, "torch_compile_mode": None}  # by layer
        chosen["pad_token"] = None  # the tokenizer has it already; TRL warns about the flag
        if self.use_cpu and self.has_group:  # the state that training.engines.start_on_cpu made
            chosen["accelerator_config"] = {"use_configured_state": True}
        return chosen

    def with_backend(self, backend: BackendChoice) -> Run:
        """Return the run with another backend. The engine stays, since its processes run."""
        if backend.arrangement == self.backend.arrangement:
            return replace(self, backend=backend)
        reason = f"chosen before the data was read, for {self.backend.arrangement}"
        return replace(self, backend=backend, engine_reason=reason)

    def summary(self) -> list[Line]:
        """Return what was decided, each line with and without its reasons."""
        settings = self.settings
        precision = "bf16" if settings["bf16"] else "fp32"
        engine = f"{self.engine} ZeRO-{self.zero_stage}" if self.zero_stage is not None else self.engine
        layout = "packed" if settings["packing"] else "padding-free" if settings["padding_free"] else "padded"
        data = f"{name_data(settings)}, {layout}, max_length {settings['max_length']:,}"
        multiple = f"padded to a multiple of {settings['pad_to_multiple_of']}"
        is_chosen = self.flags["sp_backend"] == "auto" and self.dims.sp > 1
        lines = [
            Line("mesh", self.dims.short(), str(self.dims)),
            Line("backend", f"{self.backend.arrangement}{' (auto)' * is_chosen}", self.backend.describe()),
            Line("engine", engine, f"{engine} ({self.engine_reason})"),
            Line("device", f"{'CPU, gloo' if self.use_cpu else 'GPU, NCCL'}, {precision}"),
            Line("memory", self.memory_options.describe()),
            Line("model", f"{settings['model_name_or_path']} ({self.model_config.get_text_config().model_type})"),
            Line("data", data, f"{data}, overlong {settings['overlong']}, {multiple}"),
        ]
        if self.flags.method.reads_pairs:
            obstacle = self.prompts_obstacle
            lines.append(Line("prompts", f"with each answer, {obstacle}" if obstacle else "once for both answers"))
        if self.layout_reason:
            lines.append(Line("auto", self.layout_reason))
        if self.forecast is not None and not self.use_cpu:
            lines.append(Line("forecast", f"{self.forecast.describe()} (predicted)"))
        if self.liger_parts is not None:
            lines.append(Line("liger", describe_liger(self.liger_parts)))
        if settings["torch_compile"]:
            lines.append(Line("compile", "layers, around their attention; the first steps take longer"))
        if self.flags.is_demo and self.changed:
            lines.append(Line("preset", f"{len(self.changed)} flags have the demo's values", self._changes()))
        elif self.changed:
            lines.append(Line("defaults", self._changes()))
        return lines + [Line("note", note) for note in self.notes]

    def describe(self) -> list[str]:
        """Return `summary` with its reasons, as text."""
        return [str(line) for line in self.summary()]

    @property
    def sequences_per_step(self) -> int:
        """Sequences of an optimizer step, over all ranks and micro-batches."""
        settings = self.settings
        return settings["per_device_train_batch_size"] * self.dims.dp * settings["gradient_accumulation_steps"]

    def describe_batch(self) -> list[Line]:
        """Return the sequences and tokens of an optimizer step."""
        dims, settings, sequences = self.dims, self.settings, self.sequences_per_step
        micro, accumulation = settings["per_device_train_batch_size"], settings["gradient_accumulation_steps"]
        length = settings["max_length"]
        batch = f"{sequences} {'sequence' if sequences == 1 else 'sequences'} a step"
        equation = (
            f"per_device_train_batch_size {micro} × (world {dims.world_size} / sp {dims.sp}) × "
            f"gradient_accumulation_steps {accumulation}"
        )
        lines = [
            Line("batch", batch, f"{batch} = {equation}"),
            Line("tokens", f"up to {sequences * length:,} a step, {micro * length // dims.sp:,} a rank at a time"),
        ]
        if coefficient := auxiliary_loss_coefficient(self.model_config):
            loss = f"the loss includes {coefficient:g} × the routers' auxiliary loss over all tokens of a step"
            counted = "; micro-batches run forward once more, without gradients, to count the experts that they choose"
            lines.append(Line("routers", loss + counted * (accumulation > 1)))
        return lines

    @property
    def changed(self) -> dict[str, Any]:
        """Values that nobody set and that differ from TRL's defaults, by flag."""
        names = sorted(self.flags.filled)
        return {n: self.settings[n] for n in names if self.settings[n] != self.flags.flag(n).default}

    def _changes(self) -> str:
        """Return `changed` as text; except for the demo, with TRL's defaults."""
        if self.flags.is_demo:
            return " ".join(f"--{name} {value}" for name, value in self.changed.items())
        return ", ".join(f"--{n} {value} (TRL: {self.flags.flag(n).default})" for n, value in self.changed.items())


def row_length(settings: Mapping[str, Any]) -> int:
    """Return the tokens of a micro-batch when flattened to one row."""
    return int(settings["max_length"] * settings["per_device_train_batch_size"])


def given_multiple(asked: Settings) -> int | None:
    """Return --pad_to_multiple_of, and None where it is left to the backend."""
    multiple = asked["pad_to_multiple_of"]
    return multiple if isinstance(multiple, int) else None


def attention_setup(settings: Settings, facts: Facts, world_size: int) -> Setup:
    """Return the heads and speeds that the choice of a backend needs."""
    gpus = 0 if settings["use_cpu"] else facts.gpus
    machine = facts.machine if gpus else Machine.of("CPU", 1, host_bytes=facts.machine.host_bytes)
    return Setup.of_model(
        facts.model_config,
        settings["sp"] or 1,
        element_size=2 if settings["bf16"] or settings["dtype"] == "bfloat16" else 4,
        machine=replace(machine, per_node=devices_per_node(world_size, facts.env, gpus)),
    )


def spread(
    settings: Settings, setup: Setup, documents: Documents, before: BackendChoice | None = None
) -> BackendChoice:
    """Return the backend for these documents.

    For a sequence-chunked step, `auto` means the backend that has least of it on the device.

    Args:
        before: an earlier choice of `auto`, which changes to a much better one alone.
    """
    name = str(settings["sp_backend"])
    chunks = setup.sp > 1 and setup.recurrent is None
    if name == "auto" and chunks and prefers_ulysses(settings["memory"], asked_memory_options(settings)):
        name = chunking_backend(setup) or name
    choice = choose_backend(
        name,
        setup,
        documents,
        ring_size=settings["ring_size"],
        pad_to_multiple_of=given_multiple(settings),
        before=before,
    )
    if name == settings["sp_backend"]:
        return choice
    return replace(choice, reason="auto: the sequence-chunked step has least on the device")
