"""The promises that the pages and the help make, and the tests that hold them.

`tests/promises/PAGE.tsv` has one row for each promise of a page: a statement of what longctx does, a tab, and the tests
that fail if it becomes false, separated by spaces. Each test is `tests/FOLDER/test_FILE.py::test_NAME` without
parameters. `(long)` or `(gpu)` follows a test that a plain pytest leaves out, entirely or in the cases that matter.

A row is never deleted. If a promise is withdrawn, `removed: WORDS` takes the place of its tests, where WORDS are those
of an entry under "Removed" or "Changed" in CHANGELOG.md. A new promise is a new row, with one more in `ROWS`.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TABLES = ROOT / "tests" / "promises"

ROWS = {
    "README": 55,
    "checkpoints": 102,
    "data": 97,
    "help": 68,
    "launch": 53,
    "limits": 56,
    "loop": 17,
    "lora": 19,
    "policy": 25,
    "preference": 53,
    "security": 95,
    "train": 68,
    "troubleshooting": 50,
    "verify": 33,
    "watch": 63,
}
"""How many promises each table has. This number only grows."""

PAGES = {"README": "README.md", "help": "longctx/__main__.py"} | {
    name: f"docs/{name}.md" for name in ("limits", "security", "troubleshooting")
}
"""What the tables of these names are about; any other is about the page of its name in docs/howto."""

TEST = re.compile(r"(tests/[\w/]+\.py)::(test_\w+)(?: \((long|gpu)\))?")
REMOVED = "removed: "


def rows(table: str) -> list[tuple[str, str]]:
    """(statement, its tests or how it was removed) of each promise of a table."""
    lines = (TABLES / f"{table}.tsv").read_text(encoding="utf-8").splitlines()
    parts = [line.split("\t") for line in lines]
    for number, row in enumerate(parts, 1):
        if len(row) != 2 or not all(part and part == part.strip() for part in row):
            pytest.fail(f"{table}.tsv:{number}: expected a statement, one tab, and its tests")
    return [(statement, held) for statement, held in parts]


@functools.cache
def marks_of_tests(file: str) -> dict[str, str]:
    """By the name of each test of a file: the source of its decorators, with the marks of the whole file."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8")) if (ROOT / file).is_file() else ast.Module([], [])
    whole = [node.value for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)]
    return {
        node.name: "\n".join(map(ast.unparse, [*node.decorator_list, *whole]))
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    }


def changelog(*headings: str) -> str:
    """The entries under headings such as "### Removed", of all releases, on one line."""
    parts = re.split(r"^(##+ .*)\n", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    entries = [text for head, text in zip(parts[1::2], parts[2::2], strict=True) if head in headings]
    return " ".join(" ".join(entries).split())


def test_the_tables_are_those_of_pages_that_exist():
    assert {path.stem for path in TABLES.iterdir()} == set(ROWS), "give each table its number of rows in ROWS"
    missing = [page for name in ROWS if not (ROOT / (page := PAGES.get(name, f"docs/howto/{name}.md"))).is_file()]
    assert not missing, f"{missing} are gone. Name in PAGES the pages that make their promises now."


@pytest.mark.parametrize("table", ROWS)
def test_no_promise_vanishes(table):
    found = rows(table)
    assert len(found) >= ROWS[table], f"a row was deleted: put it back, with `{REMOVED}WORDS` if it was withdrawn"
    assert len(found) == ROWS[table], f"enter {len(found)} for {table} in ROWS"
    twice = [statement for statement, count in Counter(statement for statement, _ in found).items() if count > 1]
    assert not twice, f"{table}.tsv says twice: {twice}"


@pytest.mark.parametrize("table", ROWS)
def test_every_promise_is_held_by_a_test_or_removed_in_the_changelog(table):
    wrong = []
    for statement, held in rows(table):
        if held.startswith(REMOVED):
            words = held.removeprefix(REMOVED)
            if words not in changelog("### Removed", "### Changed"):
                wrong.append(f"{statement}\n  enter under Removed or Changed in CHANGELOG.md: {words}")
            continue
        if TEST.sub("", held).strip() or not TEST.search(held):
            wrong.append(f"{statement}\n  expected tests/….py::test_…, not {held}")
        for file, name, marked in TEST.findall(held):
            marks = marks_of_tests(file).get(name)
            if marks is None:
                wrong.append(f"{statement}\n  {file}::{name} is gone: name the test that holds this promise now")
            elif marked and f"mark.{marked}" not in (ROOT / file).read_text(encoding="utf-8"):
                wrong.append(f"{statement}\n  {file} has no test that is {marked}: take ({marked}) away")
            elif not marked and (by_mark := re.search(r"^\[?pytest\.mark\.(long|gpu|skip|xfail)\b(?!if)", marks, re.M)):
                wrong.append(f"{statement}\n  {file}::{name} is marked as {by_mark[1]}: add ({by_mark[1]}) to its row")
    assert not wrong, f"{table}.tsv:\n" + "\n".join(wrong)
