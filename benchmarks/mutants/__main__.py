"""Which of the bugs planted on purpose do the default tests notice?

    python -m benchmarks.mutants --list                        # what there is
    python -m benchmarks.mutants --only "large scores"         # one class
    python -m benchmarks.mutants --output benchmarks/results/mutants_2026-11-29.md

Each mutant of the list (`benchmarks/mutants/*.toml`) is planted in a copy of the repository, and the tests that could
notice it are run there until one fails. The same tests must pass without it. A mutant is *killed* when a test fails or
takes many times as long as without it (a *time-out*: most of these hang), and *survives* when all tests pass. Results
are kept in a file, so that a run that is interrupted goes on where it was; what has changed since is run again.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .. import page
from .catalogue import ROOT, Mutant, load
from .run import Outcome, Results, run

HEADER = ("class", "mutants", "killed", "of these by time-out", "survived, explained", "survived")


def table(mutants: Sequence[Mutant], outcomes: dict[str, Outcome]) -> list[str]:
    """Lines of Markdown: counts by class, then every mutant that was not killed by a failing test."""
    found = [(mutant, outcomes[key]) for mutant in mutants if (key := mutant.key()) in outcomes]
    lines = [page.head(HEADER)]
    for kind in [*dict.fromkeys(mutant.kind for mutant, _ in found), "all"]:
        of_kind = [pair for pair in found if kind in (pair[0].kind, "all")]
        lines.append(page.row([kind, *_counts(of_kind)]))
    total, killed, *_ = _counts(found)
    lines += ["", f"{killed} of {total} are killed: {killed / max(total, 1):.1%}."]
    if len(found) < len(mutants):
        lines.append(f"{len(mutants) - len(found)} of the list have no result yet.")
    for title, status in (("Survivors", "survived"), ("Time-outs", "time-out")):
        rows = [_described(mutant) for mutant, outcome in found if outcome.status == status]
        lines += ["", f"## {title}", "", *(rows or ["None."])]
    return lines


def _counts(found: Sequence[tuple[Mutant, Outcome]]) -> tuple[int, int, int, int, int]:
    survived = [mutant for mutant, outcome in found if outcome.status == "survived"]
    explained = sum(bool(mutant.survives) for mutant in survived)
    timed_out = sum(outcome.status == "time-out" for _, outcome in found)
    return len(found), len(found) - len(survived), timed_out, explained, len(survived) - explained


def _described(mutant: Mutant) -> str:
    why = f" {mutant.survives}" if mutant.survives else ""
    return f"- `{mutant.file}` ({mutant.kind}): {mutant.wrong}{why}"


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1 if a mutant survives that should not, or tests fail without one."""
    parser = page.parser("mutants", __doc__)
    parser.add_argument("--list", action="store_true", help="Print the mutants by class, and stop.")
    parser.add_argument("--only", nargs="+", metavar="CLASS", help="Or parts of mutants' descriptions or files.")
    parser.add_argument("--processes", type=int, choices=(1, 2), default=1, help="At a time. Default: 1.")
    parser.add_argument(
        "--results", type=Path, default=Path("mutants.jsonl"), help="Kept here. Default: mutants.jsonl."
    )
    parser.add_argument("--output", type=Path, help="Also write the table here.")
    options = parser.parse_args(arguments)
    if not (ROOT / "tests").is_dir():
        parser.error(f"{ROOT} has no tests: run it from a checkout of the repository, which has the list, too")
    mutants = _chosen(load(), options.only)
    if options.list:
        for kind in dict.fromkeys(mutant.kind for mutant in mutants):
            print(f"{kind}:", *(f"  {m.file}: {m.wrong}" for m in mutants if m.kind == kind), "", sep="\n")
        return 0
    results, failed = Results(options.results), 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for number, (job, outcome) in enumerate(run(mutants, results, Path(folder), options.processes), 1):
            failed += outcome.status == "failed"
            what = job.mutant.wrong if job.mutant else f"{outcome.test} without a mutant"
            by = f" by {outcome.test}" if job.mutant and outcome.test else ""
            why = f"\n{outcome.reason}" if outcome.status == "failed" else ""
            print(f"{number:4} {outcome.seconds:6.1f} s  {outcome.status}: {what}{by}{why}", flush=True)
    lines = table(mutants, results.outcomes)
    print("", *lines, sep="\n")
    if options.output:
        facts = page.device(), page.versions(("torch", "transformers", "trl", "deepspeed"))
        head = page.heading("Mutants", page.command("mutants", arguments), *facts)
        options.output.write_text("\n".join([*head, page.explained(__doc__), "", *lines]) + "\n")
    known = [(mutant, results.outcomes.get(mutant.key())) for mutant in mutants]
    survived = any(found is not None and found.status == "survived" and not m.survives for m, found in known)
    return int(bool(failed) or survived)


def _chosen(mutants: Sequence[Mutant], only: Sequence[str] | None) -> list[Mutant]:
    """Those of the classes named; what names no class is a part of a description or of a file's path."""
    kinds = {mutant.kind for mutant in mutants}
    return [
        mutant
        for mutant in mutants
        if not only
        or any(mutant.kind == name if name in kinds else name in f"{mutant.file} {mutant.wrong}" for name in only)
    ]


if __name__ == "__main__":
    sys.exit(main())
