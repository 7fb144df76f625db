"""`run_report.html`: what a run was, did and took, as one page without scripts that fetches nothing."""

from __future__ import annotations

import logging
import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import longctx
from longctx.forecast.cost import Cost
from longctx.launch.console import Line, show
from longctx.launch.failures import reason
from longctx.launch.terminal import number
from longctx.packing import PackingReport
from longctx.report.charts import all_charts, answers_table, key_numbers, numbers_table
from longctx.report.svg import document, escaped, table, words
from longctx.settings.flags import SFT
from longctx.settings.run import Run
from longctx.training.checkpoint.files import step_of
from longctx.training.checkpoint.folder import checkpoints
from longctx.training.completions import read_completions
from longctx.training.exactness import EXACTNESS_FILE, Exactness
from longctx.training.trainer import SequenceTrainer
from longctx.untrusted.files import written_whole

logger = logging.getLogger(__name__)

REPORT_FILE = "run_report.html"
"""The name of the page, in output_dir."""

SECRET_FLAGS = tuple(name for flag in SFT.flags.values() if flag.secret for name in (flag.name, *flag.aliases))
_SECRET_VARIABLE = re.compile(r"(TOKEN|KEY|SECRET|PASSWORD)$")
_LOOKS_SECRET = re.compile(r"\bhf_\w{8,}|(?<=://)[^/@\s]+(?=@)")
HIDDEN = "REDACTED"

PACKAGES = ("torch", "transformers", "trl", "accelerate", "deepspeed", "peft", "datasets", "flash-attn")
"""Packages whose versions the page names, where they are installed."""

BODY = """<header><h1>{name}</h1>
<p class="{state}">{ended}</p><p class="when">Written {written} by longctx.</p></header>
<main>
<dl class="tiles">{tiles}</dl>
<section aria-label="Results">{results}</section>
<section class="charts" aria-label="Charts">
{charts}</section>
{answers}<div class="columns">
{sections}</div>
</main>"""
SECTION = '<section><h2>{}</h2><div class="wide" tabindex="0">{}</div></section>\n'
FOLDED = '<details><summary>{}</summary><div class="wide" tabindex="0">{}</div></details>\n'


@contextmanager
def reported(run: Run, trainer: SequenceTrainer) -> Iterator[list[tuple[str, str]]]:
    """A context at whose end rank 0 writes the page, also after a failure.

    It gives a list, to which the body appends what the run has shown: (name, text).
    """
    results: list[tuple[str, str]] = []
    failed = ""
    try:
        yield results
    except BaseException as error:
        failed = f"Failed in step {trainer.state.global_step + 1}: {reason(error)}"
        raise
    finally:
        if trainer.sequence.rank == 0:
            ended, is_complete = (failed, False) if failed else _end(trainer)
            _write(run, trainer, ended, is_complete, results=results)


def _end(trainer: SequenceTrainer) -> tuple[str, bool]:
    """Return how a run ended, and whether it took all of its steps."""
    state = trainer.state
    steps = f"step {state.global_step:,} of {state.max_steps:,}"
    if stopped_by := trainer.stop_on_signal.stopped_by:
        return f"Stopped by {stopped_by.name} after {steps}: --resume_from_checkpoint auto goes on from it", False
    if trainer.has_stopped_early:
        return f"Stopped early, after {steps}: evaluation was no longer getting better", True
    return f"Finished after {state.global_step:,} {'step' if state.global_step == 1 else 'steps'}", True


def _write(
    run: Run, trainer: SequenceTrainer, ended: str, is_complete: bool, *, results: Sequence[tuple[str, str]]
) -> None:
    folder = Path(trainer.args.output_dir)
    if (exactness := Exactness.read(folder)) is not None:
        results = [("Exactness", f"{exactness} ({EXACTNESS_FILE})"), *results]
    report = RunReport(
        name=trainer.args.run_name or folder.resolve().name,
        ended=f"{ended}.",
        is_complete=is_complete,
        history=trainer.state.log_history,
        results=results,
        forecast=run.forecast,
        description=run.describe(),
        command=["longctx", run.flags.method.command, *run.flags.arguments],
        given={name: run.settings[name] for name in run.flags.explicit},
        settings=run.settings,
        versions=_versions(trainer.sequence.device, run.dims.world_size),
        checkpoints=checkpoints(folder)[::-1],
        completions=read_completions(folder),
        written=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    )
    try:
        path = report.write(folder)
    except OSError as error:
        logger.warning("%s is not written: %s", folder / REPORT_FILE, error)
    except Exception:  # the run has ended, and is not to fail for its page
        logger.warning("%s is not written", folder / REPORT_FILE, exc_info=True)
    else:
        show([Line("report", str(path))])


def _versions(device: torch.device, world_size: int) -> dict[str, str]:
    found = {"Python": platform.python_version(), "longctx": longctx.__version__}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    if device.type == "cuda":
        found["CUDA"] = str(torch.version.cuda)
    found["device"] = torch.cuda.get_device_name(device) if "CUDA" in found else f"CPU, {platform.machine()}"
    return found | {"processes": str(world_size), "system": platform.platform()}


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """The contents of the page."""

    name: str
    ended: str
    """A sentence on how the run ended."""
    is_complete: bool
    """Whether the run took all of its steps."""
    history: Sequence[Mapping[str, Any]]
    """trainer_state.json's log_history."""
    results: Sequence[tuple[str, str]] = field(default=())
    """What the run has shown, by name: its exactness, and the length that its settings reach."""
    forecast: Cost | None = None
    """What a step was predicted to take."""
    description: Sequence[str]
    """The resolved run as it is printed, `name   what`."""
    command: Sequence[str]
    """The run's own command line: a launcher's, or a shell's, may show what is nobody's business."""
    given: Mapping[str, Any]
    """Flags that the user set."""
    settings: Mapping[str, Any]
    """All flags."""
    versions: Mapping[str, str]
    checkpoints: Sequence[Path] = field(default=())
    completions: Sequence[Mapping[str, Any]] = field(default=())
    """The lines of completions.jsonl."""
    written: str
    """The time of writing."""

    def write(self, folder: Path) -> Path:
        """Write the page; a reader sees the whole page or the earlier one."""
        path = folder / REPORT_FILE
        with written_whole(path) as unfinished:
            unfinished.write_text(self.html(), encoding="utf-8", errors="replace")
        return path

    def html(self) -> str:
        """Return the page, without any secret."""
        packing: Mapping[str, Any] = next((e["packing"] for e in reversed(self.history) if "packing" in e), {})
        sections = (
            (SECTION, "Run", table(line.partition(" ")[::2] for line in self.description)),
            (SECTION, "Command", f'<pre tabindex="0">{words(without_secrets(self.command))}</pre>'),
            (FOLDED, "Numbers", numbers_table(self.history)),
            (FOLDED, "All flags", table(_flags(self.settings))),
            (SECTION, "Flags that were set", table(_flags(self.given))),
            (SECTION, "Packing", "".join(f"<p>{escaped(part)}</p>" for part in _packing(packing)) or "<p>none</p>"),
            (SECTION, "Versions", table(self.versions.items())),
            (SECTION, "Checkpoints", table((path.name, _checkpoint(path, self.history)) for path in self.checkpoints)),
        )
        tiles = key_numbers(self.history, self.forecast)
        body = BODY.format(
            name=escaped(self.name),
            state="done" if self.is_complete else "stopped",
            ended=escaped(self.ended),
            written=escaped(self.written),
            tiles="".join(f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>" for name, value in tiles),
            results="".join(f"<p><b>{escaped(name)}</b> {escaped(text)}</p>" for name, text in self.results),
            charts=all_charts(self.history),
            answers=SECTION.format("Answers", answers) if (answers := answers_table(self.completions)) else "",
            sections="".join(template.format(name, inner) for template, name, inner in sections),
        )
        return _hide(document(f"{escaped(self.name)} – longctx run", body, ["page.css"]), self.settings)


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """Return a command line without the values of tokens."""
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


def _hide(page: str, settings: Mapping[str, Any]) -> str:
    """Return a page without the values of secret flags and variables, and without what looks like a token."""
    values = [settings.get(name) for name in SECRET_FLAGS]
    values += [value for name, value in os.environ.items() if _SECRET_VARIABLE.search(name)]
    for secret in sorted({v for v in values if isinstance(v, str) and len(v) >= 8}, key=len, reverse=True):
        page = page.replace(escape(secret), HIDDEN)
    return _LOOKS_SECRET.sub(HIDDEN, page)


def _packing(values: Mapping[str, Any]) -> list[str]:
    """Return what became of documents and tokens, in words; nothing for an entry of another release."""
    try:
        report = PackingReport(**{name: values[name] for name in PackingReport.__dataclass_fields__ if name in values})
        said = str(report).split("; ")
    except (TypeError, ValueError):
        return []
    return [*said, *([f"the data set was begun {passes} times"] if (passes := values.get("passes")) else [])]


def _checkpoint(path: Path, history: Sequence[Mapping[str, Any]]) -> str:
    """Return the last losses up to a checkpoint, its size and its path."""
    said, size = [], 0
    for name, key in (("loss", "loss"), ("evaluation", "eval_loss")):
        entries = [entry for entry in history if key in entry and entry["step"] <= step_of(path)]
        if entries:
            step = entries[-1]["step"]
            said.append(f"{name} {entries[-1][key]:.4g}" + (f" at step {step:,}" if step != step_of(path) else ""))
    with suppress(OSError):  # a later run may be deleting it
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return ", ".join([*said, f"{number(size)}B", str(path)])


def _flags(settings: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for name, value in sorted(settings.items()):
        is_hidden = name in SECRET_FLAGS and value is not None
        yield f"--{name}", HIDDEN if is_hidden else _value(value)


def _value(value: Any) -> str:
    written = {int: "{:,}", float: "{:.6g}"}.get(type(value), "{}")
    return written.format(getattr(value, "value", value))
