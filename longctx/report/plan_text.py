"""A plan: every way to spread a run over a machine's devices, what it costs at each length, and the recommendation."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from longctx.forecast.cost import FREE_PART, GIB, Cost, Reach, cost, reach
from longctx.forecast.documents import RowLengths
from longctx.forecast.memory_options import AUTO
from longctx.forecast.memory_presets import CHUNK_TOKENS
from longctx.forecast.search import A_TIE, Choice, search
from longctx.forecast.seconds import forward_seconds
from longctx.forecast.shape import Engine, RunShape
from longctx.launch.terminal import token_label
from longctx.machine.here import Machine
from longctx.machine.speeds import TABLE
from longctx.model.rope import context_length, scaling_for
from longctx.settings.resolve import spreads
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

SMALLER: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("--use_peft True", {"use_peft": True}),
    ("--use_peft True --load_in_4bit True", {"use_peft": True, "load_in_4bit": True, "dtype": "bfloat16"}),
)
"""Changes that make a run smaller, the smallest first, by their flags."""

MOST_ADVICE = 5
WORTH_NAMING = 1.1
"""How many times faster something has to be to be advised."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What `longctx plan` prints and draws."""

    settings: Settings
    machine: Machine
    gpus: int
    runs: Mapping[str, Run]
    """By the name of their arrangement."""
    lengths: tuple[int, ...]
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
    ) -> Plan:
        """Return the plan of a run.

        Args:
            settings: flags of the run. --max_length is the length to recommend for; None means the longest of `lengths`
                that fits.
            gpus: devices of all nodes.
            documents: lengths of the documents of a row.

        Raises:
            ValueError: for flags that no run can have.
        """
        asked = settings["max_length"] if settings.is_set("max_length") else None
        path = Path(settings["model_name_or_path"])
        name = str(path.parent) if path.is_file() else settings["model_name_or_path"]
        values = settings.with_("command", model_name_or_path=name, max_length=None)
        if not (settings["dataset_name"] or settings["datasets"]):
            values = values.with_("command", dataset_name="DATA")
        runs = {_name(run): run for run in spreads(values, machine, gpus)}
        far = {name: _farthest(run, machine) for name, run in runs.items()}
        length = asked or max((n for n in lengths if n <= max(far.values()).length), default=min(lengths))
        every = tuple(sorted({*lengths, length}))
        plan = cls(
            settings=values,
            machine=machine,
            gpus=gpus,
            runs=runs,
            lengths=every,
            length=length,
            documents=documents,
            documents_file=documents_file,
            choices={},
            reaches={},
        )
        choices = {n: plan.at(n) for n in every}
        for one in (
            one for n in reversed(every) for one in choices[n] if one.cost.fits
        ):  # whose options may reach farther
            if far[name := name_of(one)].length < one.cost.length:
                far[name] = reach(one.shape, machine)
        reaches = {name: (_plain(run, machine), far[name]) for name, run in runs.items()}
        return replace(plan, choices=choices, reaches=reaches)

    def at(self, length: int) -> list[Choice]:
        """Return the best memory options of every arrangement for rows of `length` tokens, the best of all first."""
        first = next(iter(self.runs.values()))
        memory = self.settings["memory"] if self.settings.is_set("memory") else AUTO
        return search(
            [_shape(run, self.machine) for run in self.runs.values()],
            self.machine,
            length,
            self.documents(length),
            memory=memory,
            fixed=first.asked_memory_options,
            counts_experts=first.counts_experts,
        )

    @cached_property
    def best(self) -> Choice | None:
        """The recommendation, the first that training does not refuse; None if nothing fits."""
        return next((one for one in self.choices[self.length] if one.cost.fits and self._resolves(one)), None)

    @cached_property
    def second(self) -> Choice | None:
        """The best without the sp of the recommendation; None if nothing is left."""
        best = self.best
        others = (one for one in self.choices[self.length] if best is not None and one.shape.sp != best.shape.sp)
        return next((one for one in others if one.cost.fits and self._resolves(one)), None)

    def _resolves(self, choice: Choice) -> bool:
        """Whether training takes the flags of a choice."""
        with suppress(ValueError):
            return bool(spreads(self.settings.with_("auto", **_values_of(choice)), self.machine, self.gpus))
        return False

    def command(self, choice: Choice, length: int) -> str:
        """Return the command that trains so on rows of `length` tokens."""
        return " ".join([self.launcher(choice.shape.world_size), self.run_flags(length), flags_of(choice)])

    def launcher(self, gpus: int) -> str:
        """Return what starts so many processes."""
        words = ["accelerate", "launch", *(["--multi_gpu"] if gpus > 1 else []), "--num_processes", str(gpus)]
        if gpus > self.machine.per_node:
            words += ["--num_machines", str(gpus // self.machine.per_node), "--machine_rank", "RANK"]
            words += ["--main_process_ip", "HOST", "--main_process_port", "29500"]
        return shlex.join([*words, "-m", self.settings.method.module])

    def run_flags(self, length: int) -> str:
        """Return the flags that do not depend on the arrangement."""
        scaling = self.scaling(length)
        mine = {"max_length", "sp", "sp_backend", "ring_size", "memory", "model_name_or_path"}
        words = ["--model_name_or_path", self.settings["model_name_or_path"]]
        words += _without(self.settings.arguments, mine | ({"rope_scaling"} if scaling else set()))
        if self.settings["dataset_name"] == "DATA":
            words += ["--dataset_name", "DATA"]
        words += ["--max_length", str(length), *(["--rope_scaling", scaling] if scaling else [])]
        if not self.settings.is_set("output_dir"):
            words += ["--output_dir", "OUT"]
        return shlex.join(words)

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
        text = f"The model's context is {context:,} tokens, and {length:,} are beyond it"
        try:
            return f"{text}: the command extends it with --rope_scaling {scaling_for(self.config, length)}."
        except ValueError as error:
            return f"{text}. No --rope_scaling is known for it: {error}"


def _shape(run: Run, machine: Machine) -> RunShape:
    return replace(run.shape, flash3=machine.kernel == "flash-attn 3")


def _name(run: Run) -> str:
    """Return the name of a run's arrangement."""
    on = " on DeepSpeed" if run.dims.world_size == 1 and run.engine == "deepspeed" else ""
    return f"{run.backend.arrangement}{on}" if run.dims.sp > 1 else f"sp 1{on}"


def name_of(choice: Choice) -> str:
    """Return the name of a choice's arrangement, which is that of its run."""
    on = " on DeepSpeed" if choice.shape.world_size == 1 and choice.shape.zero_stage else ""
    return f"{choice.name}{on}"


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
        return reach(_shape(run, machine).with_options("balanced", run.asked_memory_options, CHUNK_TOKENS), machine)
    return None


def _farthest(run: Run, machine: Machine) -> Reach:
    """Return the longest sequences with plain memory options, or those of FARTHEST that reach farthest."""
    found = [_plain(run, machine) or Reach(0, "device")]
    for memory, options in FARTHEST:
        with suppress(ValueError):
            far = _shape(run, machine).with_options(memory, {**options, **run.asked_memory_options}, 2**30)
            found.append(reach(far, machine))
    return max(found)


# As text


def as_text(plan: Plan, *, markdown: bool = False) -> str:
    """Return the plan as text: what is assumed, the recommendation, a table of all arrangements, and advice."""
    table = _aligned(_rows(plan), markdown=markdown)
    commands = [] if plan.best is None else [_fenced(plan.command(plan.best, plan.length), markdown)]
    lines = [_assumptions(plan), *(_recommended(plan) if plan.best is not None else _nothing_fits(plan))]
    lines += [*commands, table, *_advice(plan)]
    kept = {table, *commands}
    return "\n\n".join(text if markdown or text in kept else textwrap.fill(text, WIDTH) for text in lines if text)


def _fenced(command: str, markdown: bool) -> str:
    return f"```bash\n{command}\n```" if markdown else command


def _assumptions(plan: Plan) -> str:
    machine, method = plan.machine, plan.settings.method
    unit = "one pair" if method.reads_pairs else "one document"
    rows = f"documents of {plan.documents_file}" if plan.documents_file else f"{unit} a sequence (--document_lengths)"
    kernel = f"{machine.kernel}{' and cuDNN' * (machine.of_long_documents is not None)}, " if machine.kernel else ""
    return (
        f"{plan.settings['model_name_or_path']} on {plan.gpus} x {machine.device} of {machine.device_bytes / GIB:.0f} "
        f"GiB, {machine.per_node} a node with {machine.host_bytes / GIB:,.0f} GiB of host memory (--host_memory_gib); "
        f"{kernel}{rows}. Everything is predicted."
    )


def _recommended(plan: Plan) -> Iterator[str]:
    best = plan.best
    assert best is not None
    why = f"fastest that leave {FREE_PART:.0%} of memory free" if best.level == 0 else "fastest that fit"
    yield (
        f"Recommended for {plan.length:,} tokens: {flags_of(best)}. Of the {why}, it is the simplest within 2%. Its "
        f"engine is {best.shape.engine_name}."
    )
    yield _about(best)
    if plan.settings.method.reads_pairs:
        seconds = forward_seconds(best.shape, dict(best.cost.seconds))
        yield (
            "Before the first step, the reference model's log-probabilities take a forward pass over all sequences, "
            f"once: {_seconds(seconds)} s for those of a step, {seconds / best.cost.step_seconds:.0%} of it."
        )


def _about(choice: Choice) -> str:
    of, machine = choice.cost, choice.cost.machine
    sequences = choice.shape.dp * choice.shape.rows * choice.shape.micro_batches
    fullest = max(of.device, key=lambda name: of.device[name]) if of.device else ""
    on_device = (
        f"{of.device_bytes / GIB:.1f} of {machine.device_bytes / GIB:.1f} GiB of a device ({fullest} "
        f"{of.device[fullest] / GIB:.1f}, fullest at the {of.moment})"
        if fullest
        else "no device memory"
    )
    parts = ", ".join(
        f"{name} {_seconds(value)}" for name, value in of.seconds.items() if value >= 0.01 * of.step_seconds
    )
    return (
        f"{of.speed:,.0f} tokens/s a device; {_seconds(of.step_seconds)} s a step of {sequences} "
        f"sequence{'s' * (sequences > 1)} ({parts}). {on_device}; {of.host_bytes / GIB:,.1f} of "
        f"{machine.host_bytes / GIB:,.0f} GiB of a node's host memory ({of.host_moment}); a checkpoint takes "
        f"{of.disk['checkpoint'] / GIB:,.1f} GiB."
    )


def _nothing_fits(plan: Plan) -> Iterator[str]:
    nearest = plan.choices[plan.length][0]
    of = nearest.cost
    taken = of.device if of.binds == "device" else of.host
    largest = sorted(taken.items(), key=lambda item: -item[1])[:3]
    yield (
        f"Nothing fits sequences of {plan.length:,} tokens. Nearest is {nearest.label}, which needs {of.used:.0%} of "
        f"the {'device' if of.binds == 'device' else 'host'}'s memory: "
        f"{', '.join(f'{name} {size / GIB:,.1f}' for name, size in largest)} GiB."
    )
    longest = max(plan.reaches.items(), key=lambda item: item[1][1].length)
    far = (
        f"The longest that fits has {longest[1][1].length:,} tokens, with {longest[0]}. "
        if longest[1][1].length
        else ""
    )
    yield far + _smallest_change(plan)


def _smallest_change(plan: Plan) -> str:
    """Return the smallest change with which sequences of this length fit."""
    for flags, values in SMALLER:
        changed = {name: value for name, value in values.items() if not plan.settings.is_set(name)}
        if plan.settings["use_peft"] and "load_in_4bit" not in changed:
            continue
        with suppress(ValueError):
            if _fits(plan, plan.settings.with_("command", **changed), plan.gpus):
                return f"With {flags} it fits."
    for times in (2, 4, 8, 16, 32):
        gpus, machine = times * plan.gpus, plan.machine
        with suppress(ValueError):
            if _fits(plan, plan.settings, gpus):
                return f"On {gpus} x {machine.device} it fits."
    return "Neither an adapter nor 32 times the devices make it fit."


def _fits(plan: Plan, settings: Settings, gpus: int) -> bool:
    runs = spreads(settings, plan.machine, gpus)
    other = replace(plan, settings=settings, gpus=gpus, runs={_name(run): run for run in runs})
    return any(one.cost.fits for one in other.at(plan.length))


def _rows(plan: Plan) -> list[list[str]]:
    """Return the table: the reach and the speeds of every arrangement."""
    speeds = [f"at {token_label(n)}" for n in plan.lengths]
    rows = [["arrangement", "sp", "dp", "longest plain", "longest", *speeds]]
    for name, run in plan.runs.items():
        balanced, farthest = plan.reaches[name]
        row = [
            name,
            str(run.dims.sp),
            str(run.dims.dp),
            f"{balanced.length:,}" if balanced else "–",
            f"{farthest.length:,}",
        ]
        for length in plan.lengths:
            choice = next((one for one in plan.choices[length] if name_of(one) == name), None)
            row.append(_speed(choice))
        rows.append(row)
    return rows


def _speed(choice: Choice | None) -> str:
    """Return tokens a second and device; the memory that is full where they do not fit."""
    if choice is None:
        return "–"
    if choice.cost.fits:
        return f"{choice.cost.speed:,.0f}"
    return "host" if choice.cost.binds == "host" else "–"


def _advice(plan: Plan) -> list[str]:
    """Return at most MOST_ADVICE lines, of which the last names the page."""
    lines, best, second = [], plan.best, plan.second
    if best is not None and second is not None:
        lines.append(f"Next best: {name_of(second)}, {second.cost.speed:,.0f} tokens/s a device: {flags_of(second)}")
    if best is not None and (engine := _other_engine(plan, best)):
        lines.append(engine)
    if best is not None and (kernel := _faster_kernel(plan, best)):
        lines.append(kernel)
    if context := plan.about_context(plan.length):
        lines.append(context)
    if best is not None and best.shape.world_size > plan.machine.per_node:
        lines.append("Run the command on every node, with RANK 0 on the first, and HOST the address of that node.")
    table = "Columns: tokens/s a device; – does not fit the device, host does not fit the node's host memory."
    page = "Every arrangement and length on a page: longctx plan … --html plan.html"
    return [table, *lines[: MOST_ADVICE - 2], page]


def _other_engine(plan: Plan, best: Choice) -> str:
    """Return how much faster the recommendation is on the other engine; empty if it is not, or if a flag names one."""
    shape = best.shape
    if plan.settings.is_set("engine") or shape.world_size == 1 or shape.quantized_weight_bytes is not None:
        return ""
    engine: Engine = "fsdp2" if shape.zero_stage is not None else "zero3"
    other = "deepspeed" if engine == "zero3" else engine
    fixed, documents = next(iter(plan.runs.values())).asked_memory_options, plan.documents(plan.length)
    for one in search([replace(shape, engine=engine)], plan.machine, plan.length, documents, fixed=fixed):
        if one.level == 0 and one.speed > A_TIE * best.speed:
            return f"With --engine {other}, {one.speed:,.0f} tokens/s a device, as predicted: {flags_of(one)}"
    return ""


def _faster_kernel(plan: Plan, best: Choice) -> str:
    """Return the attention kernel with which a step is much faster; empty if there is none."""
    row = TABLE.row(plan.machine.device)
    if row is None:
        return ""
    documents, found = plan.documents(plan.length), []
    used = plan.machine.with_documents(documents).kernel
    for kernel in TABLE.kernels(row):
        other = Machine.of(plan.machine.device, plan.machine.per_node, kernel, host_bytes=plan.machine.host_bytes)
        of = cost(best.shape, replace(other, device_bytes=plan.machine.device_bytes), plan.length, documents)
        if kernel != used and of.speed > WORTH_NAMING * best.cost.speed:
            found.append((of.speed, kernel))
    if not found:
        return ""
    speed, kernel = max(found)
    return f"With {kernel} installed, {speed:,.0f} tokens/s a device: --kernel {shlex.quote(kernel)} plans with it."


def _seconds(value: float) -> str:
    return f"{value:,.1f}" if value >= 1 else f"{value:.2g}"


def _aligned(rows: Sequence[Sequence[str]], *, markdown: bool) -> str:
    if markdown:
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        return "\n".join([lines[0], "| --- " + "| ---: " * (len(rows[0]) - 1) + "|", *lines[1:]])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    )


# As JSON


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON values."""
    machine = plan.machine
    memory = {"device_bytes": machine.device_bytes, "host_bytes": machine.host_bytes}
    return {
        "predicted": True,
        "method": plan.settings.method.module.rpartition(".")[2],
        "model": plan.settings["model_name_or_path"],
        "machine": {"gpus": plan.gpus, "gpus_per_node": machine.per_node, "device": machine.device, **memory},
        "kernel": machine.kernel,
        "documents": None if plan.documents_file is None else str(plan.documents_file),
        "lengths": list(plan.lengths),
        "arrangements": {
            name: {
                "sp": run.dims.sp,
                "ring": run.dims.ring,
                "ulysses": run.dims.ulysses,
                "dp": run.dims.dp,
                "engine": run.engine,
                "longest_plain": balanced and balanced.length,
                "longest": farthest.length,
                "binds": farthest.binds,
            }
            for name, run in plan.runs.items()
            for balanced, farthest in [plan.reaches[name]]
        },
        "choices": {str(n): [choice_json(one) for one in of] for n, of in plan.choices.items()},
        "recommendation": None
        if plan.best is None
        else {**choice_json(plan.best), "length": plan.length, "command": plan.command(plan.best, plan.length)},
    }


def choice_json(choice: Choice) -> dict[str, Any]:
    """Return a choice with its cost as JSON values."""
    of: Cost = choice.cost
    return {
        "arrangement": name_of(choice),
        "flags": flags_of(choice),
        "fits": of.fits,
        "used": round(of.used, 4),
        "tokens_per_second_per_device": round(of.speed, 1) if of.fits else None,
        "seconds_per_step": of.step_seconds,
        "seconds": dict(of.seconds),
        "device_bytes": dict(of.device),
        "host_bytes": dict(of.host),
        "disk_bytes": dict(of.disk),
    }
