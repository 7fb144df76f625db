"""A plan: every way to spread a run over a machine's devices, what it costs at each length, and the recommendation."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from longctx.forecast.cost import FREE_PART, GIB, Reach, cost, reach
from longctx.forecast.documents import RowLengths
from longctx.forecast.memory_options import AUTO
from longctx.forecast.memory_presets import CHUNK_TOKENS, with_options
from longctx.forecast.search import A_TIE, Choice, as_flags, search
from longctx.forecast.seconds import forward_seconds
from longctx.forecast.shape import RunShape
from longctx.machine.here import Machine
from longctx.machine.speeds import TABLE
from longctx.model.rope import context_length, scaling_for
from longctx.settings.arrange import arranged
from longctx.settings.resolve import described, spreads
from longctx.settings.run import Facts, Run
from longctx.settings.values import Settings

WIDTH = 120
"""Width of printed lines."""

DATA = "DATA"
"""What a command has in the place of a data set that is not given."""

FAR: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("balanced", {}),
    ("longest", {}),
    ("balanced", {"sequence_chunk_size": CHUNK_TOKENS, "selective": False}),
    ("balanced", {"activation_offloading": True, "selective": False}),
)
"""Plain memory options, and those with which sequences are longest, in one shape or another: the third leave the host
to activations, and the fourth are for shapes that refuse the others, such as those with 4-bit weights."""

SMALLER: Sequence[tuple[Mapping[str, Any], int]] = (
    ({"use_peft": True}, 1),
    ({"use_peft": True, "load_in_4bit": True}, 1),
    *(({}, times) for times in (2, 4, 8, 16, 32)),
)
"""Changes with which more fits, the smallest first: flags, and how many times the devices."""

PAGE = "Every arrangement and length on a page: longctx plan … --html plan.html"
MOST_ADVICE = 4
"""Lines of advice, besides the one that names the page."""
WORTH_NAMING = 1.1
"""How many times faster another kernel has to be to be advised."""


@dataclass(frozen=True, eq=False)
class Plan:
    """What `longctx plan` prints and draws. Flags that no run can have raise a ValueError once it is looked at."""

    asked: Settings
    """Flags of the run. --max_length is the length to recommend a command for."""
    machine: Machine
    gpus: int
    """Devices of all nodes."""
    lengths: Sequence[int]
    documents: RowLengths
    documents_file: Path | None = None
    known: Mapping[int, list[Choice]] = field(default_factory=dict)
    """The choices at lengths that have been searched already."""

    @cached_property
    def settings(self) -> Settings:
        """The flags of a run of any length."""
        path = Path(self.asked["model_name_or_path"])
        values: dict[str, Any] = {"max_length": None}
        if path.name == "config.json":
            values["model_name_or_path"] = str(path.parent)
        if not (self.asked["dataset_name"] or self.asked["datasets"]):
            values["dataset_name"] = DATA
        return self.asked.with_("command", **values)

    @cached_property
    def runs(self) -> Mapping[str, Run]:
        """By the name of their arrangement."""
        return {name_of(run.shape): run for run in spreads(*self._described, self.gpus)}

    @cached_property
    def _far(self) -> Mapping[str, list[Reach | None]]:
        """By arrangement: the longest sequences with each of FAR; None where it is refused."""
        return {name: [self._reach(run, *options) for options in FAR] for name, run in self.runs.items()}

    def _reach(self, run: Run, memory: str, options: Mapping[str, Any]) -> Reach | None:
        with suppress(ValueError):
            options = {**options, **run.asked_memory_options}
            return reach(with_options(self._shape(run), memory, options, 2**30), self.machine)
        return None

    def _shape(self, run: Run) -> RunShape:
        return replace(run.shape, flash3=self.machine.kernel == "flash-attn 3")

    @cached_property
    def length(self) -> int:
        """The length to recommend for: the one asked for, or the longest of `lengths` that fits, or a power of two."""
        if self.asked.is_set("max_length"):
            return self.asked["max_length"]
        most = max((of.length for far in self._far.values() for of in far if of), default=0)
        return max((n for n in self.lengths if n <= most), default=1 << max(most.bit_length() - 1, 10))

    @cached_property
    def choices(self) -> dict[int, list[Choice]]:
        """By length: the best memory options of every arrangement, the best of all first."""
        return {length: self.known.get(length) or self.at(length) for length in sorted({*self.lengths, self.length})}

    @cached_property
    def reaches(self) -> Mapping[str, tuple[Reach | None, Reach]]:
        """By arrangement: the longest sequences with plain memory options, where they are supported, and with any."""
        far = {name: max(filter(None, of), default=Reach(0, "device")) for name, of in self._far.items()}
        for one in (one for length in reversed(self.choices) for one in self.choices[length] if one.cost.fits):
            if far[name := name_of(one.shape)].length < one.cost.length:  # the search reaches farther
                far[name] = reach(one.shape, self.machine)
        return {name: (of[0], far[name]) for name, of in self._far.items()}

    def at(self, length: int) -> list[Choice]:
        """Return the best memory options of every arrangement for rows of `length` tokens, the best of all first."""
        first = next(iter(self.runs.values()))
        return search(
            [self._shape(run) for run in self.runs.values()],
            self.machine,
            length,
            self.documents(length),
            memory=self.settings["memory"] if self.settings.is_set("memory") else AUTO,
            fixed=first.asked_memory_options,
            counts_experts=first.counts_experts,
        )

    def best(self, length: int, besides: int | None = None) -> Choice | None:
        """Return the best choice that fits and that training does not refuse; None if there is none.

        Args:
            length: of a row, one of `choices`.
            besides: a degree of sp that does not count.
        """
        settings, facts = self._described
        fitting = (one for one in self.choices[length] if one.cost.fits and one.shape.sp != besides)
        each = ((one, settings.with_("auto", **_values_of(one))) for one in fitting)
        return next((one for one, _ in arranged(each, facts, [])), None)

    @cached_property
    def _described(self) -> tuple[Settings, Facts]:
        return described(self.settings, self.machine, self.gpus)

    def command(self, choice: Choice, length: int) -> str:
        """Return the command that trains so on rows of `length` tokens."""
        return f"{self.launcher} {self.run_flags(length)} {flags_of(choice)}"

    @property
    def launcher(self) -> str:
        """What starts the processes."""
        if self.machine.is_cpu:
            return f"longctx {self.settings.method.command} --use_cpu True --num_processes {self.gpus}"
        words = ["accelerate", "launch", *(["--multi_gpu"] if self.gpus > 1 else []), "--num_processes", str(self.gpus)]
        if self.gpus > self.machine.per_node:
            words += ["--num_machines", str(self.gpus // self.machine.per_node), "--machine_rank", "RANK"]
            words += ["--main_process_ip", "HOST", "--main_process_port", "29500"]
        return shlex.join([*words, "-m", self.settings.method.module])

    def run_flags(self, length: int) -> str:
        """Return the flags that do not depend on the arrangement: those that were given, besides what is planned."""
        scaling = self.scaling(length)
        planned = {"max_length", "sp", "sp_backend", "ring_size", "memory", "model_name_or_path"}
        planned |= {"learned", "no_learned", *(["rope_scaling"] if scaling else [])}
        planned |= {"use_cpu", "num_processes"} if self.machine.is_cpu else set()
        words, is_planned = ["--model_name_or_path", self.settings["model_name_or_path"]], False
        for word in self.settings.arguments:
            if word.startswith("--"):
                is_planned = word[2:].partition("=")[0].replace("-", "_") in planned
            words += [] if is_planned else [word]
        words += ["--dataset_name", DATA] if self.settings["dataset_name"] == DATA else []
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


def name_of(shape: RunShape) -> str:
    """Return the name of a shape's arrangement, by which a plan knows its run."""
    on = " on DeepSpeed" if shape.world_size == 1 and shape.zero_stage else ""
    return f"{shape.arrangement if shape.sp > 1 else 'sp 1'}{on}"


def flags_of(choice: Choice) -> str:
    """Return the flags of longctx train that select an arrangement and its memory options."""
    return as_flags(_values_of(choice))


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


# As text


def as_text(plan: Plan, page: Path | None = None) -> str:
    """Return the plan as text, which is Markdown too: what is assumed, the recommendation, a table, and advice.

    Args:
        page: the file of the plan's page, if there is one.
    """
    best = plan.best(plan.length)
    parts = [_assumptions(plan), *(_nothing_fits(plan) if best is None else _recommended(plan, best))]
    if best is not None:
        parts.append(f"    {plan.command(best, plan.length)}")
    parts.append(
        "Longest sequence that fits with --memory balanced and with any memory options, and tokens/s a device at each "
        "length:"
    )
    parts += [_table(plan), *_advice(plan, best), PAGE if page is None else f"The page of this plan is {page}."]
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
    free = f"leaves {FREE_PART:.0%} of the memory free" if best.cost.level == 0 else "fits; none leaves 10% of it free"
    engine = "" if shape.engine == "none" else f" on {shape.engine_name}"
    parts = ", ".join(f"{name} {_seconds(s)}" for name, s in _by_size(of.seconds) if s >= 0.01 * of.step_seconds)
    sequences = of.tokens // of.length
    lines = [
        f"Recommended for {plan.length:,} tokens: {name_of(shape)}{engine}, the simplest of those within 2% of the "
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
        f"Nothing fits {plan.length:,} tokens. The nearest, {name_of(nearest.shape)} with "
        f"{as_flags(nearest.memory_flags)}, needs {of.used:.0%} of the {of.binds}'s memory ({largest})."
    )
    name, (_, far) = max(plan.reaches.items(), key=lambda item: item[1][1].length)
    at_most = f" Without it, at most {far.length:,} tokens fit, with {name}." if far.length else ""
    yield f"{_smallest_change(plan)}{at_most}"


def _smallest_change(plan: Plan) -> str:
    """Return the smallest change with which sequences of this length fit."""
    for flags, times in SMALLER:
        new, gpus = {name: value for name, value in flags.items() if not plan.settings[name]}, times * plan.gpus
        if not new and times == 1:
            continue
        with suppress(ValueError):
            other = replace(plan, asked=plan.asked.with_("command", **new), gpus=gpus, known={})
            if any(one.cost.fits for one in other.at(plan.length)):
                many = f"--gpus {gpus} --gpus_per_node {plan.machine.per_node}"
                change = " ".join(f"--{name} {value}" for name, value in new.items()) or many
                return f"The smallest change that fits: {change}."
    return "Neither an adapter nor 32 times the devices make it fit."


def _table(plan: Plan) -> str:
    """Return a table with the reach and the speeds of every arrangement, indented as Markdown's verbatim text."""
    rows = [["arrangement", "sp", "dp", "balanced", "any options", *(f"at {n:,}" for n in plan.choices)]]
    for name, run in plan.runs.items():
        reaches = [f"{of.length:,}" if of and of.length else "–" for of in plan.reaches[name]]
        speeds = [next((_speed(one) for one in of if name_of(one.shape) == name), "–") for of in plan.choices.values()]
        rows.append([name, str(run.dims.sp), str(run.dims.dp), *reaches, *speeds])
    first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(["    " + row[0].ljust(first), *map(str.rjust, row[1:], widths)]) for row in rows)


def _speed(choice: Choice) -> str:
    """Return tokens a second and device; the memory that is full where they do not fit."""
    if choice.cost.fits:
        return f"{choice.cost.speed:,.0f}"
    return "host full" if choice.cost.binds == "host" else "–"


def _advice(plan: Plan, best: Choice | None) -> list[str]:
    """Return at most MOST_ADVICE lines."""
    if best is None:
        return []
    lines = [plan.about_context(plan.length)]
    if best.shape.world_size > plan.machine.per_node:
        lines.append(
            "Run the command on every node, with RANK 0 on the first, and HOST that node's address. Under SLURM, pass "
            "what follows -m longctx.train to examples/slurm/several_nodes.sbatch."
        )
    if (second := plan.best(plan.length, besides=best.shape.sp)) is not None:
        lines.append(f"Next best: {second.cost.speed:,.0f} tokens/s a device with {flags_of(second)}")
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
        if one.cost.level == 0 and one.cost.speed > A_TIE * best.cost.speed:
            return f"With --engine {other.engine_name}: {one.cost.speed:,.0f} tokens/s a device with {flags_of(one)}"
    return ""


def _faster_kernel(plan: Plan, best: Choice) -> str:
    """Return the attention kernel with which a step is much faster; empty if there is none."""
    machine, documents = plan.machine, plan.documents(plan.length)
    row = TABLE.row(machine.device)
    if row is None or not machine.kernel:  # measured, whatever the kernel
        return ""
    speeds = {}
    for kernel in TABLE.kernels(row).keys() - {machine.with_documents(documents).kernel}:
        other = Machine.of(machine.device, machine.per_node, kernel, host_bytes=machine.host_bytes)
        other = replace(other, device_bytes=machine.device_bytes)
        speeds[kernel] = cost(best.shape, other, plan.length, documents).speed
    kernel, speed = max(speeds.items(), key=lambda item: item[::-1], default=("", 0.0))
    if speed <= WORTH_NAMING * best.cost.speed:
        return ""
    return f"With {kernel} installed: {speed:,.0f} tokens/s a device; --kernel {shlex.quote(kernel)} plans with it."


def _seconds(value: float) -> str:
    return f"{value:,.1f}" if value >= 1 else f"{value:.2g}"


def _size(size: float) -> str:
    return f"{size / GIB:,.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.1f} MiB"
