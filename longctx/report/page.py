"""`run_report.html`: what a run was, did and took, as one page without scripts that fetches nothing."""

from __future__ import annotations

import logging
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from longctx.launch.failures import reason
from longctx.launch.terminal import number
from longctx.regions import PARTS
from longctx.report.svg import Series, area_chart, bar_chart, finite, line_chart
from longctx.settings.run import Run
from longctx.training.checkpoint.files import checkpoints
from longctx.training.trainer import SequenceTrainer

logger = logging.getLogger(__name__)

REPORT_FILE = "run_report.html"
"""In output_dir."""

SECRET_FLAGS = ("hub_token", "push_to_hub_token")
_SECRET_VARIABLE = re.compile(r"(TOKEN|KEY|SECRET|PASSWORD)$")
_LOOKS_SECRET = re.compile(r"\bhf_\w{8,}|(?<=://)[^/@\s]+(?=@)")
HIDDEN = "REDACTED"

PACKAGES = ("longctx", "torch", "transformers", "trl", "accelerate", "deepspeed", "peft", "datasets", "flash-attn")
"""Whose versions are told, as far as they are installed."""

PART_NAMES = {
    "data": "waiting for data",
    "attention": "attention",
    "communication": "waiting for other ranks",
    "saving": "saving checkpoints",
    "rest": "rest",
}
PART_LOOKS = dict(zip(PARTS, ("c3", "c0", "c1", "c4", "c5"), strict=True))
MOST_ROWS = 40
"""Of the table of numbers."""
MOST_RANKS = 64
"""With a line or bar of their own."""


@contextmanager
def reported(run: Run, trainer: SequenceTrainer) -> Iterator[None]:
    """Write the page at the end of what runs in here, also when it fails; rank 0 does."""
    try:
        yield
    except BaseException as error:
        if trainer.sequence.rank == 0:
            _write(run, trainer, f"Failed in step {trainer.state.global_step + 1}: {reason(error)}", is_complete=False)
        raise
    if trainer.sequence.rank == 0:
        _write(run, trainer, *_end(trainer))


def _end(trainer: SequenceTrainer) -> tuple[str, bool]:
    """How a run came to its end in order, and whether with all its steps."""
    state = trainer.state
    steps = f"step {state.global_step:,} of {state.max_steps:,}"
    if stopped_by := trainer.stop_on_signal.stopped_by:
        return f"Stopped by {stopped_by.name} after {steps}: --resume_from_checkpoint auto goes on from it", False
    if trainer.has_stopped_early:
        return f"Stopped early, after {steps}: evaluation was no longer getting better", True
    return f"Finished after {state.global_step:,} {'step' if state.global_step == 1 else 'steps'}", True


def _write(run: Run, trainer: SequenceTrainer, ended: str, is_complete: bool) -> None:
    folder = Path(trainer.args.output_dir)
    report = RunReport(
        name=trainer.args.run_name or folder.resolve().name,
        ended=f"{ended}.",
        is_complete=is_complete,
        history=trainer.state.log_history,
        description=run.describe(),
        command=launch_command(),
        given={name: run.settings[name] for name in run.flags.explicit | run.filled},
        settings=run.settings,
        versions=_versions(trainer.sequence.device, run.dims.world_size),
        checkpoints=[str(path) for path in reversed(checkpoints(folder))],
        written=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    )
    try:
        path = report.write(folder)
    except Exception:  # the run has ended, and is not to fail for its page
        logger.warning("%s is not written", folder / REPORT_FILE, exc_info=True)
    else:
        print(f"longctx: report    {path}", flush=True)


def launch_command() -> list[str]:
    """What started this process: the launcher's command line where that names longctx, else its own."""
    own = psutil.Process()
    try:
        parent = own.parent()
        started = [] if parent is None else parent.cmdline()
    except psutil.Error:
        started = []
    return started if any("longctx" in word for word in started) else own.cmdline() or sys.argv


def _versions(device: torch.device, world_size: int) -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if device.type == "cuda":
        found |= {"CUDA": str(torch.version.cuda), "device": torch.cuda.get_device_name(device)}
    else:
        found["device"] = f"CPU, {platform.machine()}"
    return found | {"processes": str(world_size), "system": platform.platform()}


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """What the page says."""

    name: str
    ended: str
    """How the run came to its end, a sentence."""
    is_complete: bool
    """Whether it took all the steps that it was to take."""
    history: Sequence[Mapping[str, Any]]
    """trainer_state.json's log_history."""
    description: Sequence[str]
    """The resolved run as it is printed, `name   what`."""
    command: Sequence[str]
    given: Mapping[str, Any]
    """Flags that somebody set, or that the preset did."""
    settings: Mapping[str, Any]
    """All flags."""
    versions: Mapping[str, str]
    checkpoints: Sequence[str] = field(default=())
    written: str
    """When."""

    def write(self, folder: Path) -> Path:
        """The page, whole or as it was before."""
        path = folder / REPORT_FILE
        partial = path.with_name(f".{REPORT_FILE}.{os.getpid()}")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_text(self.html(), encoding="utf-8", errors="replace")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        return path

    def html(self) -> str:
        """The page, without any secret."""
        steps = [entry for entry in self.history if "loss" in entry]
        packings = [entry["packing"] for entry in self.history if "packing" in entry]
        page = _PAGE.format(
            style=resources.files("longctx.report").joinpath("page.css").read_text(encoding="utf-8"),
            name=_text(self.name),
            state="done" if self.is_complete else "stopped",
            ended=_text(self.ended),
            written=_text(self.written),
            tiles="".join(_tile(*tile) for tile in _tiles(self.history, steps)),
            charts="".join(_charts(self.history, steps)),
            numbers=_numbers(self.history),
            command=_words(without_secrets(self.command)),
            description=_table(line.partition(" ")[::2] for line in self.description),
            packing=_table((name.replace("_", " "), _value(value)) for p in packings[-1:] for name, value in p.items()),
            checkpoints=_list(self.checkpoints),
            given=_table(_flags(self.given)),
            settings=_table(_flags(self.settings)),
            versions=_table(self.versions.items()),
        )
        return _hide(page, _secrets(self.settings))


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """A command line, what stands for a token left out."""
    shown, hides = [], False
    for argument in arguments:
        name, equals, _ = argument.removeprefix("--").replace("-", "_").partition("=")
        is_secret = argument.startswith("--") and name in SECRET_FLAGS
        if hides:
            argument = HIDDEN
        elif is_secret and equals:
            argument = f"--{name}={HIDDEN}"
        hides = is_secret and not equals
        shown.append(argument)
    return shown


def _secrets(settings: Mapping[str, Any]) -> list[str]:
    """Values that are to stand nowhere, the longest first."""
    values = [settings.get(name) for name in SECRET_FLAGS]
    values += [value for name, value in os.environ.items() if _SECRET_VARIABLE.search(name)]
    return sorted({value for value in values if isinstance(value, str) and len(value) >= 8}, key=len, reverse=True)


def _hide(page: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        page = page.replace(escape(secret), HIDDEN)
    return _LOOKS_SECRET.sub(HIDDEN, page)


def _flags(settings: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for name, value in sorted(settings.items()):
        is_hidden = name in SECRET_FLAGS and value is not None
        yield f"--{name}", HIDDEN if is_hidden else _value(value)


def _value(value: Any) -> str:
    value = getattr(value, "value", value)
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


# Numbers


def _tiles(history: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The numbers that are asked for first."""
    evaluated = [("last evaluation", f"{entry['eval_loss']:.4g}") for entry in history if "eval_loss" in entry][-1:]
    if not steps:
        return [("steps logged", "0"), *evaluated]
    last = steps[-1]
    settled = steps[1:] or steps  # the first has what is set up once
    seconds = [sum(map(sum, entry["seconds"].values())) / len(entry["seconds"]["rest"]) for entry in _timed(steps)]
    tiles = [
        ("steps", f"{last['step']:,}"),
        ("last loss", f"{last['loss']:.4g}"),
        *evaluated,
        ("tokens", number(last.get("num_tokens", 0))),
        ("time in steps", _duration(sum(seconds))),
    ]
    for name, key in (("tokens/s", "tokens_per_second"), ("tokens/s/device", "tokens_per_second_per_device")):
        if values := _values(settled, key):
            tiles.append((name, number(_median(values))))
    if values := _values(settled, "mfu"):
        tiles.append(("MFU", f"{_median(values):.0%}"))
    for name, key in (("peak GPU memory", "peak_memory_gib_max"), ("peak host memory", "peak_host_memory_gib_max")):
        if values := _values(steps, key):
            tiles.append((name, f"{max(values):.3g} GiB"))
    return tiles


def _charts(history: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]) -> list[str]:
    evaluated = [(entry["step"], entry["eval_loss"]) for entry in history if "eval_loss" in entry]
    loss = [Series("training", _points(steps, "loss"), "c0"), Series("evaluation", evaluated, "c1 dashed")]
    total = [Series("all devices", _points(steps, "tokens_per_second"), "c0")]
    charts = [
        _figure("Loss", line_chart("Loss over steps", loss), [s for s in loss if s.points]),
        _figure("Tokens per second", line_chart("Tokens per second over steps", total, low=0)),
        _memory(steps),
        *_times(steps),
    ]
    for name, key, options in (
        ("Padding", "padding_fraction", {"low": 0.0, "high": 0.05, "tick": _percent}),
        ("Attention imbalance", "attention_imbalance", {"low": 1.0, "high": 1.1}),
        ("Gradient norm", "grad_norm", {"low": 0.0}),
        ("Learning rate", "learning_rate", {"low": 0.0, "tick": number}),
    ):
        chart = line_chart(f"{name} over steps", [Series(name.lower(), _points(steps, key), "c0")], **options)  # type: ignore[arg-type]
        charts.append(_figure(name, chart, note=_NOTES.get(name, "")))
    return charts


_NOTES = {
    "Padding": "Part of the tokens computed that are padding.",
    "Attention imbalance": "Attention work of the busiest rank over the mean; 1 is even.",
}


def _memory(steps: Sequence[Mapping[str, Any]]) -> str:
    """A line for each rank; of many, the fullest stands out."""
    known = [entry for entry in steps if "memory" in entry]
    kind = "allocated" if any("allocated" in entry["memory"] for entry in known) else "host"
    known = [entry for entry in known if kind in entry["memory"]]
    name = f"Peak {'GPU' if kind == 'allocated' else 'host'} memory by rank, GiB"
    if not known:
        return _figure(name, line_chart(name, []))
    last = known[-1]["memory"][kind]["gib_by_rank"]
    fullest = last.index(max(last))
    ranks = [rank for rank in range(min(len(last), MOST_RANKS)) if rank != fullest]
    lines = [Series(f"rank {rank}", _of_rank(known, kind, rank), f"c{rank % 5} thin") for rank in ranks]
    if len(last) > 5:
        lines = [line._replace(look="c5 thin") for line in lines]
    lines.append(Series(f"rank {fullest}", _of_rank(known, kind, fullest), "c1" if len(last) > 5 else f"c{fullest}"))
    chart = line_chart(f"{name} over steps", lines, low=0)
    shown = sorted(lines, key=lambda line: int(line.name.split()[1])) if len(last) <= 5 else lines[-2:]
    if len(last) > 5:
        shown = [shown[1]._replace(name=f"rank {fullest}, the fullest"), shown[0]._replace(name="the other ranks")]
    return _figure(name, chart, shown)


def _of_rank(entries: Sequence[Mapping[str, Any]], kind: str, rank: int) -> list[tuple[float, float]]:
    ranks = ((entry["step"], entry["memory"][kind]["gib_by_rank"]) for entry in entries)
    return [(step, peaks[rank]) for step, peaks in ranks if rank < len(peaks)]


def _times(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where the time went, over the steps and by rank."""
    timed = _timed(steps)
    totals = [sum(map(sum, entry["seconds"].values())) for entry in timed]
    shares = {
        part: [(e["step"], sum(e["seconds"][part]) / total) for e, total in zip(timed, totals, strict=True)]
        for part in PARTS
    }
    parts = [
        Series(PART_NAMES[part], shares[part], PART_LOOKS[part]) for part in PARTS if any(y for _, y in shares[part])
    ]
    over_steps = area_chart("Where the time went, over steps", [entry["step"] for entry in timed], parts)
    num_ranks = len(timed[-1]["seconds"]["rest"]) if timed else 0
    alike = [entry for entry in timed if len(entry["seconds"]["rest"]) == num_ranks]
    unit, name = next((u for u in _UNITS if sum(totals) > 2 * u[0] * max(num_ranks, 1)), (1, "s"))
    rows = [
        (f"rank {rank}", [(PART_LOOKS[p], sum(e["seconds"][p][rank] for e in alike) / unit) for p in PARTS])
        for rank in range(min(num_ranks, MOST_RANKS))
    ]
    notes = []
    if num_ranks > MOST_RANKS:
        notes.append(f"The first {MOST_RANKS} of {num_ranks} ranks.")
    if len(alike) < len(timed):
        notes.append(f"The {len(alike)} logged steps with {num_ranks} ranks.")
    by_rank = bar_chart("Where the time went, by rank", rows, name)
    return [
        _figure("Where the time went", over_steps, parts, note=_TIMES_NOTE),
        _figure("Where the time went, by rank", by_rank, parts, note=" ".join(notes)),
    ]


_TIMES_NOTE = (
    "Mean over ranks. Waiting for other ranks is what attention's messages did not hide; what FSDP or ZeRO gathers and "
    "reduces is part of the rest."
)


def _numbers(history: Sequence[Mapping[str, Any]]) -> str:
    """The table, a row for each logged step; of a long run every so many of them."""
    steps: dict[int, dict[str, Any]] = {}
    for entry in history:
        if "loss" in entry or "eval_loss" in entry:
            steps.setdefault(entry["step"], {}).update(entry)
    entries = list(steps.values())
    every = max(1, -(-len(entries) // MOST_ROWS))
    shown = [entry for i, entry in enumerate(entries) if i % every == 0 or i == len(entries) - 1]
    columns = {name: write for name, write in _COLUMNS.items() if any(_is_number(entry.get(name)) for entry in shown)}
    head = "".join(f'<th scope="col">{_text(name.replace("_", " "))}</th>' for name in columns)
    rows = (
        "".join(f"<td>{write(e[name]) if _is_number(e.get(name)) else ''}</td>" for name, write in columns.items())
        for e in shown
    )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    table = f"<table class=numbers><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    if every == 1:
        return table
    return f"<p>Every {every}th of {len(entries):,} logged steps; all are in trainer_state.json.</p>{table}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


_COLUMNS = {
    "step": "{:,}".format,
    "loss": "{:.4f}".format,
    "eval_loss": "{:.4f}".format,
    "grad_norm": "{:.3g}".format,
    "learning_rate": "{:.3g}".format,
    "tokens_per_second": number,
    "mfu": _percent,
    "peak_memory_gib_max": "{:.2f}".format,
    "peak_host_memory_gib_max": "{:.2f}".format,
    "padding_fraction": _percent,
    "attention_imbalance": "{:.3f}".format,
    "data_fraction": _percent,
    "attention_fraction": _percent,
    "communication_fraction": _percent,
}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _points(entries: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    return [(entry["step"], float(entry[key])) for entry in entries if _is_number(entry.get(key))]


def _values(entries: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [y for _, y in finite(_points(entries, key))]


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _timed(steps: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [entry for entry in steps if any(map(sum, entry.get("seconds", {}).values()))]


_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


def _duration(seconds: float) -> str:
    """75 -> 1.25 min"""
    for unit, name in _UNITS:
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"


# HTML


def _text(text: str) -> str:
    return escape(str(text).replace("\x00", "\ufffd"))


def _tile(name: str, value: str) -> str:
    return f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>"


def _figure(name: str, chart: str, legend: Sequence[Series] = (), note: str = "") -> str:
    keys = "".join(f'<li><i class="{series.look}"></i>{_text(series.name)}</li>' for series in legend)
    below = (f"<ul class=legend>{keys}</ul>" if keys else "") + (f"<p>{_text(note)}</p>" if note else "")
    return f"<figure><figcaption>{_text(name)}</figcaption>{chart}{below}</figure>\n"


def _words(command: Sequence[str]) -> str:
    """As a shell takes them; a line is broken between two of them, not in `--flag`."""
    return " ".join(f"<span>{_text(shlex.quote(word))}</span>" for word in command)


def _table(rows: Iterable[tuple[str, Any]]) -> str:
    body = "".join(f'<tr><th scope="row">{_text(n)}</th><td>{_text(str(v).strip())}</td></tr>' for n, v in rows)
    return f"<table><tbody>{body}</tbody></table>" if body else "<p>none</p>"


def _list(items: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{_text(item)}</li>' for item in items)}</ul>" if items else "<p>none</p>"


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{name} – longctx run</title>
<style>
{style}</style>
</head>
<body>
<header><h1>{name}</h1><p class="{state}">{ended}</p><p class="when">Written {written} by longctx.</p></header>
<main>
<dl class="tiles">{tiles}</dl>
<section class="charts" aria-label="Charts">
{charts}</section>
<details><summary>Numbers</summary><div class="wide" tabindex="0">{numbers}</div></details>
<section><h2>Run</h2><div class="wide" tabindex="0">{description}</div></section>
<section><h2>Command</h2><pre tabindex="0">{command}</pre></section>
<section class="columns">
<div><h2>Packing</h2><div class="wide" tabindex="0">{packing}</div></div>
<div><h2>Versions</h2><div class="wide" tabindex="0">{versions}</div></div>
<div><h2>Checkpoints</h2>{checkpoints}</div>
</section>
<section><h2>Flags that were set</h2><div class="wide" tabindex="0">{given}</div></section>
<details><summary>All flags</summary><div class="wide" tabindex="0">{settings}</div></details>
</main>
</body>
</html>
"""
