"""The list of mutants stays true: each can be planted, and the tests that are to notice it are there."""

from __future__ import annotations

import ast
import functools
import tomllib
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.mutants.__main__ import main, table
from benchmarks.mutants.catalogue import ROOT, Mutant, load
from benchmarks.mutants.run import Outcome, Results

MUTANTS = load()


@functools.cache
def default_tests(file: str) -> frozenset[str]:
    """Names of a file's tests that a plain pytest runs, parametrized ones with any of their cases."""
    found = set()
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            is_long = any(ast.unparse(decorator) == "pytest.mark.long" for decorator in node.decorator_list)
            found |= set() if is_long else {node.name}
    return frozenset(found)


def test_there_are_enough_and_each_is_described_once():
    assert len(MUTANTS) >= 200
    assert [text for text, count in Counter(mutant.wrong for mutant in MUTANTS).items() if count > 1] == []
    assert all(mutant.wrong.endswith(".") and mutant.tests for mutant in MUTANTS)


def test_each_can_be_planted():
    """After a change to the code: give the mutant's text as it stands now, or another mutant of the same class."""
    for mutant in MUTANTS:
        text = (ROOT / mutant.file).read_text(encoding="utf-8")
        planted = mutant.planted_in(text)  # raises with the mutant's name
        assert planted != text, mutant.wrong
        if mutant.file.endswith(".py"):
            compile(planted, mutant.file, "exec")
        else:
            tomllib.loads(planted)


def test_the_tests_that_are_to_notice_them_are_there():
    for mutant in MUTANTS:
        for test in mutant.tests:
            file, _, name = test.partition("::")
            assert (ROOT / file).is_file(), f"{mutant.wrong}: there is no {file}"
            assert default_tests(file), f"{mutant.wrong}: {file} has no default tests"
            name = name.partition("[")[0]
            assert not name or name in default_tests(file), f"{mutant.wrong}: {file} has no default test {name}"


def test_a_text_that_is_not_there_once_is_refused():
    mutant = replace(MUTANTS[0], old="x")
    for text in ("", "xx"):
        with pytest.raises(ValueError, match=f"{len(text)} times, expected 1"):
            mutant.planted_in(text)


def test_results_are_kept_and_counted(tmp_path):
    """One mutant of each fate: killed, by time-out, survived with a reason and without one, and not yet run."""
    reasons = ("", "", "Equivalent.", "", "")
    chosen: list[Mutant] = [replace(m, survives=why, kind="ring") for m, why in zip(MUTANTS[:5], reasons, strict=True)]
    results = Results(tmp_path / "results.jsonl")
    for mutant, status in zip(chosen, ("killed", "time-out", "survived", "survived"), strict=False):
        results.add(Outcome(mutant.key(), status, 1.0))
    lines = table(chosen, Results(tmp_path / "results.jsonl").outcomes)
    assert "| ring | 4 | 2 | 1 | 1 | 1 |" in lines
    assert "2 of 4 are killed: 50.0%." in lines
    assert "1 of the list have no result yet." in lines
    text = "\n".join(lines)
    assert f"{chosen[2].wrong} Equivalent." in text.partition("## Time-outs")[0]
    assert chosen[1].wrong in text.partition("## Time-outs")[2]
    changed = replace(chosen[0], new=chosen[0].new + " ")
    assert changed.key() not in results.outcomes


def test_the_list_is_printed_by_class(capsys):
    assert main(["--list", "--only", "large scores"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("large scores:\n")
    assert printed.count("\n  longctx/") == sum(mutant.kind == "large scores" for mutant in MUTANTS)
