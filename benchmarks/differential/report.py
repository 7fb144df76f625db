"""The table of a session of fuzzing, in Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from .. import page
from .judge import EXACT, FINDINGS, REFUSED, UNDETERMINED, Outcome, general
from .shrink import explains

PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "trl", "peft")
MOST_MESSAGES = 60


def text_of(
    outcomes: Sequence[Outcome], shrunk: Sequence[Outcome], *, command: str, seconds: float, note: str = ""
) -> str:
    """The whole report.

    Args:
        outcomes: of all cases.
        shrunk: one for each distinct finding, after shrinking.
        command: what made it.
        seconds: that it took.
        note: what else there is to say of the cases.
    """
    where = f"{page.device()}, no GPU, {seconds / 60:.0f} minutes"
    lines = [
        *page.heading("Differential fuzzing", command, where, page.versions(PACKAGES)),
        "Each case is a training run by `longctx.train` or `longctx.dpo`, compared with a reference on one process "
        "that imports nothing of longctx: loss, gradient norm, learning rate and tokens of every step, evaluation "
        "losses, and the saved weights.",
        "",
        *([note, ""] if note else []),
        *_counts(outcomes),
        *_errors(outcomes),
        *_findings(outcomes, shrunk),
        *_refusals(outcomes),
    ]
    return "\n".join(lines) + "\n"


def write(text: str, folder: Path) -> Path:
    """Write the page of today; returns its path."""
    path = folder / f"differential_{page.today()}.md"
    path.write_text(text)
    return path


def _counts(outcomes: Sequence[Outcome]) -> list[str]:
    counts = Counter(outcome.status for outcome in outcomes)
    named = [EXACT, REFUSED, UNDETERMINED, *FINDINGS]
    rest = sorted(counts.keys() - set(named))
    rows = [*((name, counts[name]) for name in [*named, *rest]), ("all", len(outcomes))]
    return [*page.table(["outcome", "cases"], rows), ""]


def _errors(outcomes: Sequence[Outcome]) -> list[str]:
    exact = [outcome.errors for outcome in outcomes if outcome.status == EXACT]
    names = sorted({name for errors in exact for name in errors})
    lines = ["## Relative errors of the exact cases", "", page.head(["quantity", "median", "99%", "largest"])]
    for name in names:
        values = sorted(errors[name] for errors in exact if name in errors)
        picked = (values[len(values) // 2], values[min(len(values) - 1, int(len(values) * 0.99))], values[-1])
        lines.append(page.row([name, *(f"{value:.0e}" for value in picked)]))
    return [*lines, ""]


def _findings(outcomes: Sequence[Outcome], shrunk: Sequence[Outcome]) -> list[str]:
    if not shrunk:
        return []
    lines = ["## Findings", ""]
    for number, found in enumerate(shrunk, 1):
        count = sum(outcome.is_finding and explains(found, outcome) for outcome in outcomes)
        lines += [f"{number}. **{found.status}** ({count} cases): {found.detail.strip()[:600]}", ""]
        lines += [f"   In FOLDER, after `--keep FOLDER --replay '{found.case.to_json()}'`:", ""]
        lines += [f"       {command}" for command in found.commands] + [""]
    return lines


def _refusals(outcomes: Sequence[Outcome]) -> list[str]:
    refused = [outcome.detail for outcome in outcomes if outcome.status == REFUSED]
    counts = Counter(map(general, refused))
    examples = {general(message): " ".join(message.split()) for message in refused}
    lines = ["## Refusals, by message", ""]
    lines += [f"- {count} × {examples[kind][:300]}" for kind, count in counts.most_common(MOST_MESSAGES)]
    return [*lines, ""] if refused else []
