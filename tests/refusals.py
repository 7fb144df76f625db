"""The refusals of longctx/: every `raise` of an error for users, and which test meets it.

`tests/refusals.tsv` holds one line for each: the file, the function, the beginning of the message, and the test that
makes the product raise it. `tests/test_refusal_table.py` compares the table with the source, so that a refusal that is
taken away fails there. While the tests run, every `raise` in longctx/ is recorded (`install`), and a test that the
table names and that does not meet its refusal fails the run (`tests/conftest.py`), so that a refusal that no longer
comes fails, too. After a change, write the table anew with

    pytest --record-refusals        # the tests that meet the new refusals, or all

A refusal that only a child process meets, which nothing here sees, is marked `(child)` behind its test. One that no
test can meet has a reason in the place of the test, in parentheses.
"""

from __future__ import annotations

import ast
import functools
import importlib.abc
import importlib.machinery
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "refusals.tsv"

NO_REFUSALS = {"AssertionError", "AttributeError", "IndexError", "NotImplementedError", "SystemExit", "_Leave"}
"""What programs, not users, get to see."""

UNMET = "(unmet)"
"""In the place of the test of a refusal that has none yet."""
CHILD = " (child)"

_SHOWN = 70
"""Characters of a message that are enough to find it."""


class Refusal(NamedTuple):
    """A `raise`, by what stays the same when lines move."""

    file: str
    function: str
    message: str
    """Its beginning, with {} for each value; without one, the expression."""


@functools.cache
def refusals() -> dict[Refusal, tuple[str, int, int]]:
    """Every refusal in longctx/, with its file and its first and last line."""
    found: dict[Refusal, tuple[str, int, int]] = {}
    for path in sorted((ROOT / "longctx").rglob("*.py")):
        if not path.resolve().is_relative_to(ROOT / "longctx"):
            continue  # the links to benchmarks/ and configs/
        file = str(path.relative_to(ROOT))
        seen: Counter[Refusal] = Counter()
        for function, node in _raises(ast.parse(path.read_text(encoding="utf-8"))):
            refusal = Refusal(file, function, _message(node))
            seen[refusal] += 1
            if seen[refusal] > 1:
                refusal = refusal._replace(message=f"{refusal.message} #{seen[refusal]}")
            found[refusal] = file, node.lineno, node.end_lineno or node.lineno
    return found


def _raises(tree: ast.AST, function: str = "") -> list[tuple[str, ast.Raise]]:
    """Those that make an error, in the order of the source, with the function each stands in."""
    found = []
    for node in ast.iter_child_nodes(tree):
        inner = function
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{function}.{node.name}".lstrip(".")
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and _name(node.exc) not in NO_REFUSALS:
            found.append((function, node))
        found += _raises(node, inner)
    return found


def _name(call: ast.Call) -> str:
    return ast.unparse(call.func)


def _message(node: ast.Raise) -> str:
    assert isinstance(node.exc, ast.Call)
    said = node.exc.args[0] if node.exc.args else None
    if isinstance(said, ast.BinOp):
        said = said.left
    text = ""
    if isinstance(said, ast.JoinedStr):
        text = "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in said.values)
    elif isinstance(said, ast.Constant) and isinstance(said.value, str):
        text = said.value
    return " ".join((text if text.strip("{} ") else ast.unparse(node.exc)).split())[:_SHOWN].strip()


# The table


def read_table() -> dict[Refusal, str]:
    """What `tests/refusals.tsv` says: the test of each refusal, or why there is none."""
    rows = (line.split("\t") for line in TABLE.read_text(encoding="utf-8").splitlines() if line)
    return {Refusal(*key): test for *key, test in rows}


def write_table(table: dict[Refusal, str]) -> None:
    """Write `tests/refusals.tsv`, in the order of the source."""
    TABLE.write_text("".join("\t".join([*row, table[row]]) + "\n" for row in refusals() if row in table))


def is_test(test: str) -> bool:
    """Whether there is a test function `tests/training/test_x.py::test_y`."""
    file, _, function = test.removesuffix(CHILD).partition("::")
    return (ROOT / file).is_file() and function in _functions(file)


@functools.cache
def _functions(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


# Recording

met: set[tuple[str, int]] = set()
"""File and line of every `raise` in longctx/ since somebody cleared it."""


def install() -> None:
    """Record in `met` whatever modules of longctx that are imported from now on raise."""
    assert not any(name.partition(".")[0] == "longctx" for name in sys.modules), "longctx is imported already"
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname.partition(".")[0] != "longctx":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles a module with a note before every `raise`; lines stay where they are, and nothing is cached."""

    def get_code(self, fullname):
        path = Path(self.path).resolve()
        tree = ast.parse(self.get_data(self.path), self.path)
        if path.is_relative_to(ROOT / "longctx"):
            tree = ast.fix_missing_locations(_Noting(str(path.relative_to(ROOT))).visit(tree))
        return compile(tree, self.path, "exec", dont_inherit=True)

    def exec_module(self, module):
        module.__dict__["__met__"] = met.add
        super().exec_module(module)


class _Noting(ast.NodeTransformer):
    def __init__(self, file: str):
        self.file = file

    def visit_Raise(self, node: ast.Raise) -> list[ast.stmt]:
        note = ast.parse(f"__met__(({self.file!r}, {node.lineno}))").body[0]
        for part in ast.walk(note):
            ast.copy_location(part, node)
        return [note, node]


class RefusalsMet:
    """A pytest plugin: which test meets which refusal, held against the table at the end."""

    def __init__(self):
        self.met: dict[str, set[tuple[str, int]]] = {}
        self.collected: Counter[str] = Counter()
        self.passed: Counter[str] = Counter()
        self.partial: set[str] = set()

    @staticmethod
    def function(nodeid):
        """`tests/training/test_x.py::test_y` of any of its parameters."""
        return nodeid.partition("[")[0]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        met.clear()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        report = yield
        report.refusals_met = sorted(met)  # travels with the report from the process that ran the test
        return report

    def pytest_deselected(self, items):
        self.partial |= {self.function(item.nodeid) for item in items if not item.get_closest_marker("long")}

    def pytest_collection_finish(self, session):
        self.collected = Counter(self.function(item.nodeid) for item in session.items)
        if any("[" in argument for argument in session.config.args):
            self.partial |= set(self.collected)

    @property
    def selection(self):
        """What a process that collected the tests tells the one that judges the run, in types that JSON has."""
        return {"collected": dict(self.collected), "partial": sorted(self.partial)}

    @selection.setter
    def selection(self, told):
        self.collected, self.partial = Counter(told["collected"]), set(told["partial"])

    def pytest_runtest_logreport(self, report):
        self.met.setdefault(self.function(report.nodeid), set()).update(map(tuple, getattr(report, "refusals_met", ())))
        self.passed[self.function(report.nodeid)] += report.when == "call" and report.passed

    def missed(self):
        """Refusals that the test they have in the table ran through without meeting them."""
        whole = {test for test, count in self.collected.items() if self.passed[test] == count} - self.partial
        return [(row, test) for row, test in read_table().items() if test in whole and not self._has(row, test)]

    def _has(self, refusal, test):
        file, first, last = refusals().get(refusal, ("", 0, 0))
        return any((file, line) in self.met.get(test, ()) for line in range(first, last + 1))

    def _by_how_special(self):
        """Tests that met something, those first that met the least else; what random data meets counts for nothing."""
        return sorted((test for test in self.met if "fuzz" not in test), key=lambda test: (len(self.met[test]), test))

    def record(self):
        """Enter what this run has shown where the table has no test that holds."""
        table = read_table() if TABLE.exists() else {}
        gone = {test for test in table.values() if "::" in test and not is_test(test)}
        missed = {row for row, _ in self.missed()} if table else set()
        for row in refusals():
            if table.get(row) in {None, UNMET, *gone} or row in missed:
                table[row] = next((test for test in self._by_how_special() if self._has(row, test)), UNMET)
        write_table(table)
