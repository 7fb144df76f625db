"""A plan: every way to spread a run over a machine's devices, what it costs at each length, and the recommendation."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from longctx.forecast.cost import FREE_PART, GIB, Reach, cost, reach
from longctx.forecast.documents import RowLengths
from longctx.forecast.memory_options import AUTO
from longctx.forecast.memory_presets import CHUNK_TOKENS, with_options
from longctx.forecast.search import A_TIE, Choice, search
from longctx.forecast.seconds import forward_seconds
from longctx.forecast.shape import RunShape
from longctx.machine.here import Machine
from longctx.machine.speeds import TABLE
from longctx.model.rope import context_length, scaling_for
from longctx.settings.arrange import arrange
from longctx.settings.resolve import described, spreads
from longctx.settings.run import Run
from longctx.settings.values import Settings

WIDTH = 120
"""Width of printed lines."""

FARTHEST: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("longest", {}),
    ("balanced", {"sequence_chunk_size": CHUNK_TOKENS, "selective": False}),
    ("balanced", {"activation_offloading": True, "selective": False}),
)
"""Options with which sequences are longest, in one shape or another: the second leave the host to activations, and the
third are for shapes that refuse the others, such as those with 4-bit weights."""

SMALLER: Sequence[Mapping[str, Any]] = ({"use_peft": True}, {"use_peft": True, "load_in_4bit": True})
"""Flags that make a run smaller, the smallest change first."""

PAGE = "Every arrangement and length on a page: longctx plan … --html plan.html"
MOST_ADVICE = 4
"""Lines of advice, besides the one that names the page."""
WORTH_NAMING = 1.1
"""How many times faster another kernel has to be to be advised."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """What `longctx plan` prints and draws."""

    settings: Settings
    machine: Machine
    gpus: int
    runs: Mapping[str, Run]
    """By the name of their arrangement."""
    length: int
    """The length that a command is recommended for."""
    documents: RowLengths
    documents_file: Path | None
    choices: Mapping[int, Sequence[Choice]]
    """By length: the best memory options of every arrangement, the best of all first."""
    reaches: Mapping[str, tuple[Reach | None, Reach]]
    """By arrangement: the longest sequences with plain memory options, where they are supported, and with any."""

    @classmethod
    def of(
        cls,
        settings: Settings,
        machine: Machine,
        gpus: int,
        *,
        lengths: Sequence[int],
        documents: RowLengths,
        documents_file: Path | None = None,
        known: Mapping[int, Sequence[Choice]] = MappingProxyType({}),
    ) -> Plan:
        """Return the plan of a run.

        Args:
            settings: flags of the run. --max_length is the length to recommend for; None means the longest of `lengths`
                that fits, or a power of two if none does.
            gpus: devices of all nodes.
            documents: lengths of the documents of a row.
            known: choices at some of the lengths, which are not searched again.

        Raises:
            ValueError: for flags that no run can have.
        """
        asked = settings["max_length"] if settings.is_set("max_length") else None
        path = Path(settings["model_name_or_path"])
        model = str(path.parent) if path.name == "config.json" else settings["model_name_or_path"]
        values = settings.with_("command", model_name_or_path=model, max_length=None)
        if not (settings["dataset_name"] or settings["datasets"]):
            values = values.with_("command", dataset_name="DATA")
        runs = {_name(run.shape): run for run in spreads(values, machine, gpus)}
        far = {name: _farthest(run, machine) for name, run in runs.items()}
        most = max(far.values()).length
        length = asked or max((n for n in lengths if n <= most), default=1 << max(most.bit_length() - 1, 10))
        plan = cls(
            settings=values,
            machine=machine,
            gpus=gpus,
            runs=runs,
            length=length,
            documents=documents,
            documents_file=documents_file,
            choices={},
            reaches={},
        )
        choices = {n: known.get(n) or plan.at(n) for n in sorted({*lengths, length})}
        for one in (one for n in reversed(choices) for one in choices[n] if one.cost.fits):
            if far[name := name_of(one)].length < one.cost.length:  # options of the search that reach farther
                far[name] = reach(one.shape, machine)
        reaches = {name: (_plain(run, machine), far[name]) for name, run in runs.items()}
        return replace(plan, choices=choices, reaches=reaches)

    def at(self, length: int) -> list[Choice]:
        """Return the best memory options of every arrangement for rows of `length` tokens, the best of all first."""
        first = next(iter(self.runs.values()))
        return search(
            [_shape(run, self.machine) for run in self.runs.values()],
            self.machine,
            length,
            self.documents(length),
            memory=self.settings["memory"] if self.settings.is_set("memory") else AUTO,
            fixed=first.asked_memory_options,
            counts_experts=first.counts_experts,
        )

    @cache  # noqa: B019 (a plan lives as long as the command)
    def best(self, length: int, besides: int | None = None) -> Choice | None:
        """Return the best choice that fits and that training does not refuse; None if there is none.

        Args:
            length: of a row, one of `choices`.
            besides: a degree of sp that does not count.
        """
        fitting = (one for one in self.choices[length] if one.cost.fits and one.shape.sp != besides)
        return next(filter(self._resolves, fitting), None)

    def _resolves(self, choice: Choice) -> bool:
        """Whether training takes the flags of a choice."""
        with suppress(ValueError):
            settings, facts = self._described
            return bool(arrange(settings.with_("auto", **_values_of(choice)), facts))
        return False

    @cached_property
    def _described(self) -> Any:
        return described(self.settings, self.machine, self.gpus)

    def command(self, choice: Choice, length: int) -> str:
        """Return the command that trains so on rows of `length` tokens."""
        return f"{self.launcher} {self.run_flags(length)} {flags_of(choice)}"

    @property
    def launcher(self) -> str:
        """What starts the processes."""
        if self.machine.is_cpu:
            name = self.settings.method.module.rpartition(".")[2]
            return f"longctx {name} --use_cpu True --num_processes {self.gpus}"
        words = ["accelerate", "launch", *(["--multi_gpu"] if self.gpus > 1 else []), "--num_processes", str(self.gpus)]
        if self.gpus > self.machine.per_node:
            words += ["--num_machines", str(self.gpus // self.machine.per_node), "--machine_rank", "RANK"]
            words += ["--main_process_ip", "HOST", "--main_process_port", "29500"]
        return shlex.join([*words, "-m", self.settings.method.module])

    def run_flags(self, length: int) -> str:
        """Return the flags that do not depend on the arrangement."""
        scaling = self.scaling(length)
        ours = {"max_length", "sp", "sp_backend", "ring_size", "memory", "model_name_or_path", "learned", "no_learned"}
        ours |= {"rope_scaling"} if scaling else set()
        ours |= {"use_cpu", "num_processes"} if self.machine.is_cpu else set()
        words = ["--model_name_or_path", self.settings["model_name_or_path"]]
        words += _without(self.settings.arguments, ours)
        if self.settings["dataset_name"] == "DATA":
            words += ["--dataset_name", "DATA"]
        words += ["--max_length", str(length), *(["--rope_scaling", scaling] if scaling else [])]
        return shlex.join([*words, *([] if self.settings.is_set("output_dir") else ["--output_dir", "OUT"])])

    def scaling(self, length: int) -> str | None:
        """Return the --rope_scaling that rows of this length need beyond what was asked for; None if there is none."""
        with suppress(ValueError):
            return scaling_for(self.config, length)
        return None

    @property
    def config(self) -> Any:
        """The model's configuration, with --rope_scaling applied."""
        return next(iter(self.runs.values())).model_config

    def about_context(self, length: int) -> str:
        """Return what to know of a row beyond the model's context; empty if it is not."""
        context = context_length(self.config)
        if length <= context:
            return ""
        text = f"{length:,} tokens are beyond the model's context of {context:,}"
        try:
            return f"{text}, so the command has --rope_scaling {scaling_for(self.config, length)}."
        except ValueError as error:
            return f"{text}, and no --rope_scaling is known for it: {error}"


def _shape(run: Run, machine: Machine) -> RunShape:
    return replace(run.shape, flash3=machine.kernel == "flash-attn 3")


def name_of(choice: Choice) -> str:
    """Return the name of a choice's arrangement, by which a plan knows its run."""
    return _name(choice.shape)


def _name(shape: RunShape) -> str:
    on = " on DeepSpeed" if shape.world_size == 1 and shape.zero_stage else ""
    return f"{shape.arrangement if shape.sp > 1 else 'sp 1'}{on}"


def flags_of(choice: Choice) -> str:
    """Return the flags of longctx train that select an arrangement and its memory options."""
    return shlex.join(word for name, value in _values_of(choice).items() for word in (f"--{name}", str(value)))


def _values_of(choice: Choice) -> dict[str, Any]:
    """Return the values of these flags, by name."""
    shape = choice.shape
    flags: dict[str, Any] = {"sp": shape.sp}
    if shape.sp > 1:
        flags["sp_backend"] = shape.arrangement.name
    if shape.backend.has_ring_size:
        flags["ring_size"] = shape.ring
    if shape.world_size == 1 and shape.zero_stage:
        flags["engine"] = "deepspeed"
    return flags | choice.memory_flags


def _without(arguments: Sequence[str], names: set[str]) -> list[str]:
    """Return a command line without these flags and their values."""
    kept, drops = [], False
    for word in arguments:
        if word.startswith("--"):
            drops = word[2:].partition("=")[0].replace("-", "_") in names
        if not drops:
            kept.append(word)
    return kept


def _plain(run: Run, machine: Machine) -> Reach | None:
    """Return the longest sequences with plain memory options; None if the run refuses them."""
    with suppress(ValueError):
        return reach(with_options(_shape(run, machine), "balanced", run.asked_memory_options, CHUNK_TOKENS), machine)
    return None


def _farthest(run: Run, machine: Machine) -> Reach:
    """Return the longest sequences with plain memory options, or those of FARTHEST that reach farthest."""
    found = [_plain(run, machine) or Reach(0, "device")]
    for memory, options in FARTHEST:
        with suppress(ValueError):
            far = with_options(_shape(run, machine), memory, {**options, **run.asked_memory_options}, 2**30)
            found.append(reach(far, machine))
    return max(found)


# As text


def as_text(plan: Plan) -> str:
    """Return the plan as text, which is Markdown too: what is assumed, the recommendation, a table, and advice."""
    best = plan.best(plan.length)
    parts = [_assumptions(plan), *(_nothing_fits(plan) if best is None else _recommended(plan, best))]
    if best is not None:
        parts.append(f"    {plan.command(best, plan.length)}")
    parts.append(
        "Longest sequence that fits with --memory balanced and with any memory options, and tokens/s a device at each "
        "length:"
    )
    parts += [_table(plan), *_advice(plan, best), PAGE]
    return "\n\n".join(part if part.startswith("    ") else _wrapped(part) for part in parts)


def _wrapped(text: str) -> str:
    lines = text.split("\n")
    return "\n".join(textwrap.fill(one, WIDTH, subsequent_indent="  " * one.startswith("- ")) for one in lines)


def _assumptions(plan: Plan) -> str:
    machine = plan.machine
    kernel = f"{machine.kernel}{' and cuDNN' * (machine.of_long_documents is not None)}, " if machine.kernel else ""
    device = "" if machine.is_cpu else f" of {machine.device_bytes / GIB:.0f} GiB"
    rows = f"one {'pair' if plan.settings.method.reads_pairs else 'document'} a sequence (--document_lengths)"
    runs = machine.correction.runs
    learned = f" Corrected by {runs} run{'s' * (runs > 1)} on this kind of GPU (--no_learned)." if runs else ""
    return (
        f"Predicted for {plan.settings['model_name_or_path']} on {plan.gpus} × {machine.device}{device}, "
        f"{machine.per_node} a node with {machine.host_bytes / GIB:,.0f} GiB of host memory (--host_memory_gib), "
        f"{kernel}{f'documents of {plan.documents_file}' if plan.documents_file else rows}.{learned}"
    )


def _recommended(plan: Plan, best: Choice) -> Iterator[str]:
    of, machine, shape = best.cost, plan.machine, best.shape
    free = f"leaves {FREE_PART:.0%} of the memory free" if best.level == 0 else "fits; none leaves 10% of it free"
    engine = "" if shape.engine == "none" else f" on {shape.engine_name}"
    parts = ", ".join(f"{name} {_seconds(s)}" for name, s in _by_size(of.seconds) if s >= 0.01 * of.step_seconds)
    sequences = of.tokens // of.length
    lines = [
        f"Recommended for {plan.length:,} tokens: {name_of(best)}{engine}, the simplest of those within 2% of the "
        f"fastest that {free}.",
        f"- Speed: {of.speed:,.0f} tokens/s a device; a step of {sequences} sequence{'s' * (sequences > 1)} takes "
        f"{_seconds(of.step_seconds)} s ({parts}).",
    ]
    if of.device:
        lines.append(f"- Device: {_peak(of.device, machine.device_bytes, of.moment)}.")
    lines.append(f"- Host, a node: {_peak(of.host, machine.host_bytes, of.host_moment)}.")
    lines.append(f"- Disk: {_size(of.disk['checkpoint'])} for each checkpoint.")
    if plan.settings.method.reads_pairs:
        seconds = forward_seconds(shape, dict(of.seconds))
        lines.append(
            "- Before the first step, the reference model's log-probabilities take one forward pass over all "
            f"sequences: {_seconds(seconds)} s for those of a step."
        )
    yield "\n".join(lines)


def _peak(sizes: Mapping[str, float], limit: float, moment: str) -> str:
    name, largest = _by_size(sizes)[0]
    total = sum(sizes.values()) / GIB
    return f"{total:,.1f} of {limit / GIB:,.1f} GiB; peak: {moment}; largest part: {name}, {_size(largest)}"


def _by_size(sizes: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(sizes.items(), key=lambda item: -item[1])


def _nothing_fits(plan: Plan) -> Iterator[str]:
    nearest = plan.choices[plan.length][0]
    of = nearest.cost
    largest = ", ".join(f"{name} {_size(size)}" for name, size in _by_size(getattr(of, of.binds))[:3])
    yield (
        f"Nothing fits {plan.length:,} tokens. The nearest, {nearest.label}, needs {of.used:.0%} of the {of.binds}'s "
        f"memory ({largest})."
    )
    name, (_, far) = max(plan.reaches.items(), key=lambda item: item[1][1].length)
    yield _smallest_change(plan) + (
        f" Without it, at most {far.length:,} tokens fit, with {name}." if far.length else ""
    )


def _smallest_change(plan: Plan) -> str:
    """Return the smallest change with which sequences of this length fit."""
    smaller = [{k: v for k, v in flags.items() if not plan.settings[k]} for flags in SMALLER]
    changes: list[tuple[Mapping[str, Any], int]] = [(flags, plan.gpus) for flags in smaller if flags]
    changes += [({}, times * plan.gpus) for times in (2, 4, 8, 16, 32)]
    for flags, gpus in changes:
        with suppress(ValueError):
            settings = plan.settings.with_("command", **flags)
            runs = {_name(run.shape): run for run in spreads(settings, plan.machine, gpus)}
            if any(one.cost.fits for one in replace(plan, settings=settings, gpus=gpus, runs=runs).at(plan.length)):
                many = f"--gpus {gpus} --gpus_per_node {plan.machine.per_node}"
                change = " ".join(f"--{name} {value}" for name, value in flags.items()) or many
                return f"The smallest change that fits: {change}."
    return "Neither an adapter nor 32 times the devices make it fit."


def _table(plan: Plan) -> str:
    """Return a table with the reach and the speeds of every arrangement, indented as Markdown's verbatim text."""
    rows = [["arrangement", "sp", "dp", "balanced", "any options", *(f"at {n:,}" for n in plan.choices)]]
    for name, run in plan.runs.items():
        plain, farthest = plan.reaches[name]
        speeds = [_speed(next((one for one in of if name_of(one) == name), None)) for of in plan.choices.values()]
        reaches = [f"{n:,}" if n else "–" for n in (plain.length if plain else 0, farthest.length)]
        rows.append([name, str(run.dims.sp), str(run.dims.dp), *reaches, *speeds])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    first, *others = widths
    lines = ("  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]) for row in rows)
    return "\n".join(f"    {line}" for line in lines)


def _speed(choice: Choice | None) -> str:
    """Return tokens a second and device; the memory that is full where they do not fit."""
    if choice is None or not choice.cost.fits:
        return "host full" if choice is not None and choice.cost.binds == "host" else "–"
    return f"{choice.cost.speed:,.0f}"


def _advice(plan: Plan, best: Choice | None) -> list[str]:
    """Return at most MOST_ADVICE lines."""
    lines = [plan.about_context(plan.length)] if best is not None else []
    if best is not None:
        if best.shape.world_size > plan.machine.per_node:
            lines.append("Run the command on every node, with RANK 0 on the first, and HOST that node's address.")
        second = plan.best(plan.length, besides=best.shape.sp)
        if second is not None:
            lines.append(f"Next best: {second.speed:,.0f} tokens/s a device with {flags_of(second)}")
        lines += [_other_engine(plan, best), _faster_kernel(plan, best)]
    return [line for line in lines if line][:MOST_ADVICE]


def _other_engine(plan: Plan, best: Choice) -> str:
    """Return how much faster the recommendation is on the other engine; empty if it is not, or if a flag names one."""
    shape = best.shape
    if plan.settings.is_set("engine") or shape.world_size == 1 or shape.quantized_weight_bytes is not None:
        return ""
    other = replace(shape, engine="fsdp2" if shape.zero_stage is not None else "zero3")
    fixed, documents = next(iter(plan.runs.values())).asked_memory_options, plan.documents(plan.length)
    for one in search([other], plan.machine, plan.length, documents, fixed=fixed):
        if one.level == 0 and one.speed > A_TIE * best.speed:
            return f"With --engine {other.engine_name}: {one.speed:,.0f} tokens/s a device with {flags_of(one)}"
    return ""


def _faster_kernel(plan: Plan, best: Choice) -> str:
    """Return the attention kernel with which a step is much faster; empty if there is none."""
    machine, documents = plan.machine, plan.documents(plan.length)
    row = TABLE.row(machine.device)
    if row is None or not machine.kernel:  # measured, whatever the kernel
        return ""
    found = []
    for kernel in TABLE.kernels(row).keys() - {machine.with_documents(documents).kernel}:
        other = Machine.of(machine.device, machine.per_node, kernel, host_bytes=machine.host_bytes)
        of = cost(best.shape, replace(other, device_bytes=machine.device_bytes), plan.length, documents)
        found.append((of.speed, kernel))
    speed, kernel = max(found, default=(0.0, ""))
    if speed <= WORTH_NAMING * best.speed:
        return ""
    return f"With {kernel} installed: {speed:,.0f} tokens/s a device; --kernel {shlex.quote(kernel)} plans with it."


def _seconds(value: float) -> str:
    return f"{value:,.1f}" if value >= 1 else f"{value:.2g}"


def _size(size: float) -> str:
    return f"{size / GIB:,.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.1f} MiB"
