"""The refusals of longctx/: whatever refuses what users ask for, and which test meets it.

A refusal is a `raise` of an error for users, a message that is added to `errors`, which are raised together, a `Rule`
of settings, or a row of the flags' table that takes some values only.

`tests/refusals.tsv` holds one line for each: the file, the function (or `RULES` and a rule's flags, or `FLAGS`), the
message as the source has it, and the test that makes the product refuse. `tests/test_refusal_table.py` compares the
table with the source, so that a refusal that is taken away fails there. While the tests run, every refusal is recorded
(`install`), and a test that the table names and that does not meet its refusal fails the run (`tests/conftest.py`), so
that a refusal that no longer comes fails, too.

`tests/golden/data/refusals.json` holds, for each message of the source, the texts that users see in these tests, so
that a text that changes fails the run as well. Texts are recorded without what varies from run to run (`_VARYING`); a
message whose texts vary all the same has null there, entered by hand.

After a change, write both anew with

    pytest --record-refusals        # the tests that meet the new refusals, or all

A refusal that has moved to another function keeps its test and its texts, whichever tests are run. A refusal that only
a child process meets, which nothing here sees unless it is a confined one, is marked `(child)` behind its test. One
that no test can meet has a reason in the place of the test, in parentheses.
"""

from __future__ import annotations

import ast
import functools
import importlib.abc
import importlib.machinery
import json
import re
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "refusals.tsv"
TEXTS = ROOT / "tests" / "golden" / "data" / "refusals.json"

NO_REFUSALS = {"AssertionError", "AttributeError", "IndexError", "NotImplementedError", "SystemExit", "_Leave"}
"""What programs, not users, get to see."""

UNMET, CHILD = "(unmet)", " (child)"

MOST_TEXTS = 8
"""Texts of one `raise` that are kept of one run of a test: the first ones."""

_VARYING = tuple(
    (re.compile(pattern), put)
    for pattern, put in (
        (rf"{re.escape(tempfile.gettempdir())}/pytest-of-[^/]+/pytest-[^/]+(/popen-gw\d+)?/[^/\s'\",:;)]+", "TMP"),
        (rf"{re.escape(sys.prefix)}\b", "PREFIX"),
        (rf"{re.escape(str(ROOT))}\b", "ROOT"),  # before what it may lie in
        (rf"{re.escape(tempfile.gettempdir())}/[\w.-]+", "TMP"),
        (r"\b0x[0-9a-f]{6,}", "0x0"),
        (r"(?<=127\.0\.0\.1)(:|, )\d+", r"\1PORT"),
        (rf"(?<=on ){re.escape(socket.gethostname())}\b", "HOST"),
        (r", or failed \(SIG(ABRT|KILL)\)", ""),  # where memory ends inside a library
    )
)
"""What a text may have that varies from run to run, and what is recorded in its place."""


Place = tuple[str, int | str]
"""Where a refusal is met: a file, and a line or the flag of a row."""


class Refusal(NamedTuple):
    """A refusal, by what stays the same when lines move."""

    file: str
    function: str
    message: str
    """With {} for each value; where the source has none, the expression."""

    @property
    def template(self) -> str:
        """The message, which a refusal keeps when it moves."""
        return re.sub(r" #\d+$", "", self.message)


@functools.cache
def refusals() -> dict[Refusal, list[Place]]:
    """Every refusal in longctx/, with the places of which it is met in one."""
    found: dict[Refusal, list[Place]] = {}
    for path in sorted((ROOT / "longctx").rglob("*.py")):
        if not path.resolve().is_relative_to(ROOT / "longctx"):
            continue  # the links to benchmarks/ and configs/
        file = str(path.relative_to(ROOT))
        seen: Counter[Refusal] = Counter()
        for function, node in _refusing(ast.parse(path.read_text(encoding="utf-8"))):
            refusal = Refusal(file, function, _message(_said(node)))
            seen[refusal] += 1
            if seen[refusal] > 1:
                refusal = refusal._replace(message=f"{refusal.message} #{seen[refusal]}")
            found[refusal] = [(file, line) for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)]
    return found | dict(_rows())


FLAGS, FLAGS_OF_DPO = "longctx/settings/flags.py", "longctx/settings/dpo.py"


def _rows() -> Iterator[tuple[Refusal, list[Place]]]:
    """Yield the flags that refuse values of their kind."""
    from longctx.settings.dpo import DPO
    from longctx.settings.flags import SFT

    changed = {name: flag for name, flag in DPO.flags.items() if flag is not SFT.flags.get(name)}
    for file, flags in ((FLAGS, SFT.flags), (FLAGS_OF_DPO, changed)):
        for name, flag in flags.items():
            if fact := next((fact for fact in ("values", "limits", "instead") if getattr(flag, fact)), None):
                yield Refusal(file, "FLAGS", f"--{name}: {fact}"), [(file, name)]


def _refusing(tree: ast.AST, function: str = "") -> list[tuple[str, ast.Raise | ast.Call]]:
    """What refuses, in the order of the source, with the function each stands in."""
    found: list[tuple[str, ast.Raise | ast.Call]] = []
    for node in ast.iter_child_nodes(tree):
        inner = function
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{function}.{node.name}".lstrip(".")
        if isinstance(node, ast.Raise | ast.Call) and _said(node) is not None:
            of_rule = isinstance(node, ast.Call) and _name(node) == "Rule"
            found.append((f"RULES {_text(node.args[0])}" if of_rule else function, node))
        found += _refusing(node, inner)
    return found


def _name(call: ast.Call) -> str:
    return ast.unparse(call.func)


def _said(node: ast.Raise | ast.Call) -> ast.expr | None:
    """The error or the message of what refuses; None for anything else."""
    if isinstance(node, ast.Raise):
        return node.exc if isinstance(node.exc, ast.Call) and _name(node.exc) not in NO_REFUSALS else None
    if _name(node) == "Rule":
        return node.args[2]
    # An error that was raised has been noted there.
    adds = _name(node) == "errors.append" and not isinstance(node.args[0], ast.Call)
    return node.args[0] if adds else None


def _message(said: ast.expr | None) -> str:
    assert said is not None
    told = said.args[0] if isinstance(said, ast.Call) and said.args else said
    text = _text(told.body if isinstance(told, ast.Lambda) else told)
    return " ".join((text if text.strip("{} ") else ast.unparse(said)).split())


def _text(said: ast.expr) -> str:
    """What an expression says, with {} for each value."""
    if isinstance(said, ast.BinOp):
        return _text(said.left) + _text(said.right)
    if isinstance(said, ast.JoinedStr):
        return "".join(map(_text, said.values))
    return said.value if isinstance(said, ast.Constant) and isinstance(said.value, str) else "{}"


# The table


def read_table() -> dict[Refusal, str]:
    """What `tests/refusals.tsv` says: the test of each refusal, or why there is none."""
    rows = (line.split("\t") for line in TABLE.read_text(encoding="utf-8").splitlines() if line)
    return {Refusal(*key): test for *key, test in rows}


def write_table(table: dict[Refusal, str]) -> None:
    """Write `tests/refusals.tsv`, in the order of the source."""
    TABLE.write_text("".join("\t".join([*row, table[row]]) + "\n" for row in refusals() if row in table))


def read_texts() -> dict[str, list[str] | None]:
    """What `refusals.json` has: the texts of each message; None where they vary."""
    return json.loads(TEXTS.read_text(encoding="utf-8")) if TEXTS.exists() else {}


def moved(table: dict[Refusal, str]) -> dict[Refusal, Refusal]:
    """Refusals of the source that the table has in another place, each with the row that it had."""
    gone: dict[str, list[Refusal]] = {}
    for row in table.keys() - refusals().keys():
        gone.setdefault(row.template, []).append(row)
    found = {}
    for row in refusals().keys() - table.keys():
        if candidates := gone.get(row.template):
            found[row] = max(candidates, key=lambda old: (old.function == row.function, old.file == row.file, old))
            candidates.remove(found[row])
    return found


def is_test(test: str) -> bool:
    file, _, function = test.removesuffix(CHILD).partition("::")
    return (ROOT / file).is_file() and function in _functions(file)


@functools.cache
def _functions(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


# Recording

met: dict[Place, dict[str, None]] = {}
"""The texts of every refusal of longctx/ since somebody cleared it, by its place, in the order of their coming."""


def _note(file: str, place: int | str, error: Any) -> Any:
    texts = met.setdefault((file, place), {})
    if len(texts) < MOST_TEXTS:
        texts[_plain(str(error))] = None
    return error


def _note_why(file: str, line: int, why: str | Callable[[Any], str]) -> Callable[[Any], str]:
    """What is wrong with settings that break a rule, noted where it is asked for."""
    return lambda settings: _note(file, line, why if isinstance(why, str) else why(settings))


def _note_rows(fault: Callable[[Any, Any], str]) -> Callable[[Any, Any], str]:
    """What is wrong with a value of a flag, noted with the flag's row."""

    def noting(flag: Any, value: Any) -> str:
        from longctx.settings.flags import SFT

        if found := fault(flag, value):
            _note(
                FLAGS if SFT.flags.get(flag.name) is flag else FLAGS_OF_DPO,
                flag.name,
                f"--{flag.name} {value} {found}.",
            )
        return found

    return noting


def _noted_with(outcome: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """The outcome of a call in a confined process, whose error brings along what was met there."""

    def noting(*args: Any) -> tuple[Any, Any]:
        met.clear()
        result, error = outcome(*args)
        if error is not None:
            error.refusals_met = dict(met)
        return result, error

    return noting


def _note_brought(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call of a confined process, after which what was met there counts as met here."""

    def calling(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            for place, texts in getattr(error, "refusals_met", {}).items():
                met.setdefault(place, {}).update(texts)
            raise

    return calling


def _plain(text: str) -> str:
    """A text without what varies, in characters that every file takes."""
    for pattern, put in _VARYING:
        text = pattern.sub(put, text)
    return text.encode("utf-8", "backslashreplace").decode()


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
    """Compiles a module with a note of every error that it raises; lines stay where they are, nothing is cached."""

    def get_code(self, fullname):
        path = Path(self.path).resolve()
        tree = ast.parse(self.get_data(self.path), self.path)
        if path.is_relative_to(ROOT / "longctx"):
            tree = ast.fix_missing_locations(_Noting(str(path.relative_to(ROOT))).visit(tree))
        return compile(tree, self.path, "exec", dont_inherit=True)

    def exec_module(self, module):
        module.__dict__.update(__met__=_note, __why__=_note_why)
        super().exec_module(module)
        if module.__name__ == "longctx.settings.schema":
            module._fault = _note_rows(module._fault)
        if module.__name__ == "longctx.untrusted.confined":
            module._outcome, module.Confined.call = _noted_with(module._outcome), _note_brought(module.Confined.call)


class _Noting(ast.NodeTransformer):
    def __init__(self, file: str):
        self.file = file

    def _noted(self, said: ast.expr, line: int, by: str = "__met__") -> ast.expr:
        where = [ast.Constant(self.file), ast.Constant(line)]
        return ast.copy_location(ast.Call(ast.Name(by, ast.Load()), [*where, said], []), said)

    def visit_Raise(self, node: ast.Raise) -> ast.Raise:
        if isinstance(node.exc, ast.Call):
            node.exc = self._noted(node.exc, node.lineno)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if _name(node) == "Rule":
            node.args[2] = self._noted(node.args[2], node.lineno, "__why__")
        elif _said(node) is not None:
            node.args[0] = self._noted(node.args[0], node.lineno)
        return node


class RefusalsMet:
    """A pytest plugin: which test meets which refusal, held against the table at the end."""

    def __init__(self):
        self.met: dict[str, dict[Place, dict[str, None]]] = {}
        self.collected: Counter[str] = Counter()
        self.passed: Counter[str] = Counter()
        self.partial: set[str] = set()

    @staticmethod
    def function(nodeid):
        return nodeid.partition("[")[0]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        met.clear()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        report = yield
        # Travels with the report from the process that ran the test.
        report.refusals_met = [(*place, list(texts)) for place, texts in met.items()]
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
        found = self.met.setdefault(self.function(report.nodeid), {})
        for file, place, texts in getattr(report, "refusals_met", ()):
            found.setdefault((file, place), {}).update(dict.fromkeys(texts))
        self.passed[self.function(report.nodeid)] += report.when == "call" and report.passed

    def whole(self):  # with all of their parameters, and passed
        return {test for test, count in self.collected.items() if self.passed[test] == count} - self.partial

    def missed(self):
        """Refusals that the test they have in the table ran through without meeting them."""
        whole = self.whole()
        return [(row, test) for row, test in read_table().items() if test in whole and not self._texts(row, test)]

    def _texts(self, refusal, test):
        """The texts of a refusal that a test met; empty if it did not meet it."""
        texts = (self.met.get(test, {}).get(place, ()) for place in refusals().get(refusal, ()))
        return [text for found in texts for text in found]

    def texts(self):
        """The texts of each message whose tests ran whole, among the tests of the table."""
        found: dict[str, set[str]] = {}
        left_out, whole = set(), self.whole()
        for row, test in read_table().items():
            if test in whole:
                found.setdefault(row.template, set()).update(self._texts(row, test))
            elif is_test(test) and not test.endswith(CHILD):
                left_out.add(row.template)
        return {template: sorted(texts) for template, texts in found.items() if template not in left_out}

    def changed(self):
        """Lines about messages whose texts in `refusals.json` no longer come; a test may add texts without a record."""
        recorded = read_texts()
        for template, now in self.texts().items():
            if not set(before := recorded.get(template) or []) <= set(now):
                yield f"{template}:"
                yield from (f"    no longer: {text}" for text in before if text not in now)
                yield from (f"    new: {text}" for text in now if text not in before)

    def pytest_sessionfinish(self, session):
        if hasattr(session.config, "workeroutput") or session.config.getoption("--record-refusals"):
            return
        if session.exitstatus == pytest.ExitCode.OK and any(self.changed()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(trylast=True)  # after all tables: it makes a run fail whose tests all passed
    def pytest_terminal_summary(self, terminalreporter, config):
        missed = [f"{test}: {row.file} {row.function}: {row.message}" for row, test in self.missed()]
        changed = [] if config.getoption("--record-refusals") else list(self.changed())
        for title, lines in ((f"not met as in {TABLE}", missed), (f"with other texts than {TEXTS}", changed)):
            if lines:
                terminalreporter.section(f"refusals {title}", red=True)
                terminalreporter.write_line("\n".join(lines))

    def _by_how_special(self):
        """Tests that met something, those first that met the least else; what random data meets counts for nothing."""
        return sorted((test for test in self.met if "fuzz" not in test), key=lambda test: (len(self.met[test]), test))

    def record(self):
        """Enter what this run has shown where the table has no test that holds."""
        table = read_table() if TABLE.exists() else {}
        table |= {row: table[old] for row, old in moved(table).items()}
        gone = {test for test in table.values() if "::" in test and not is_test(test)}
        missed = {row for row, _ in self.missed()} if table else set()
        for row in refusals():
            if table.get(row) in {None, UNMET, *gone} or row in missed:
                table[row] = next((test for test in self._by_how_special() if self._texts(row, test)), UNMET)
        write_table(table)
        known = {row.template for row in refusals()}
        texts = {template: texts for template, texts in read_texts().items() if template in known}
        texts |= {template: now for template, now in self.texts().items() if texts.get(template, ()) is not None}
        lines = (f"{json.dumps(key)}: {json.dumps(texts[key], ensure_ascii=False)}" for key in sorted(texts))
        TEXTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
