"""Imports follow the data, light modules stay light, and each room keeps to its budget of lines."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tokenize
import warnings
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

_REGISTRY = ast.parse((ROOT / "longctx" / "attention" / "backends.py").read_text(encoding="utf-8"))
PACKAGES_OF_BACKENDS = {
    node.module.split(".")[1]
    for node in ast.walk(_REGISTRY)
    if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("longctx.")
} - {"attention"}

# The one place where the order is stated. A module or folder of longctx/ stands under its own name.
STAGES: list[tuple[str, ...]] = [
    ("untrusted", "upstream"),  # input of unknown origin, and names that other libraries keep private
    ("ranks", "launch", "regions"),  # processes that start, meet, agree and end together
    ("machine",),  # what devices, links and hosts have and do
    ("data",),  # names and files -> tokenised documents
    ("packing",),  # lengths -> packs
    ("model",),  # files -> a model
    ("sequence",),  # where the documents of a batch lie, and one rank's part of it
    ("collate",),  # packs -> batches
    ("attention", "recurrent", *PACKAGES_OF_BACKENDS),
    ("layers",),  # the head and its loss, MLPs, chunked layers
    ("parallel", "policy", "longctx"),  # all of the above for someone's own loop; `import longctx` offers it
    ("forecast",),  # what a step takes
    ("training",),  # the trainer and its checkpoints
    ("settings",),  # flags, profiles, environment -> one resolved run
    ("report",),  # what a run says of itself
    ("run", "verify", "plan", "train", "dpo", "export", "completion", "__main__"),  # the command line
    ("benchmarks",),
]

STAGE_OF = {name: number for number, names in enumerate(STAGES) for name in names}


def _module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {_module_name(path): path for top in ("longctx", "benchmarks") for path in sorted((ROOT / top).rglob("*.py"))}

# Pure, or nearly so: these import nothing of ours but each other, and every stage may import them.
ANYWHERE = {
    "longctx.regions",
    "longctx.ring.line",
    "longctx.ring.plan",
    "longctx.ring.planner",
    "longctx.sequence.host_tensors",
    *(f"longctx.settings.{name}" for name in ("dpo", "flags", "schema", "values")),
    "longctx.untrusted.files",
    "longctx.untrusted.working_directory",
    *(name for name in FILES if name.startswith("longctx.attention.kernels")),
}


def _stage(module: str) -> int | None:
    top, _, rest = module.partition(".")
    return STAGE_OF.get(rest.partition(".")[0] if top == "longctx" and rest else top)


@functools.cache
def _imports(module: str) -> frozenset[str]:
    """Our modules that a module imports anywhere in its source, in functions and for type checking too."""
    found = set()
    for node in ast.walk(ast.parse(FILES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module)
            found.update(name if (name := f"{base}.{alias.name}") in FILES else base for alias in node.names)
    return frozenset(found & FILES.keys())


def _absolute(node: ast.ImportFrom, module: str) -> str:
    if not node.level:
        return node.module or ""
    package = module.split(".")
    strip = node.level - (FILES[module].name == "__init__.py")
    return ".".join([*package[: len(package) - strip], *(node.module or "").split(".")]).removesuffix(".")


def test_every_module_has_a_stage() -> None:
    homeless = [module for module in FILES if _stage(module) is None]
    assert not homeless, f"put {homeless} into STAGES of {__file__}, where the stages before it are all it needs"


@pytest.mark.parametrize("module", FILES)
def test_imports_follow_the_stages(module) -> None:
    own = _stage(module) or 0
    later = {name for name in _imports(module) - ANYWHERE if (_stage(name) or 0) > own}
    assert not later, f"{module} imports {sorted(later)} of a later stage: move what they share to an earlier one"


def test_modules_for_every_stage_import_nothing_of_ours() -> None:
    assert {module: sorted(_imports(module) - ANYWHERE) for module in ANYWHERE} == {module: [] for module in ANYWHERE}


def test_no_module_imports_itself_in_a_circle() -> None:
    try:
        TopologicalSorter({module: _imports(module) for module in FILES}).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' <- '.join(error.args[1])}")


def test_relative_and_nested_imports_are_seen() -> None:
    assert "longctx.packing.plan" in _imports("longctx.packing.overlong")
    assert "longctx.packing.bfd" in _imports("longctx.packing")
    assert "longctx.ring.attention" in _imports("longctx.ring")
    assert "longctx.parallel" in _imports("longctx")


LIBRARIES = {"torch", "transformers", "accelerate", "deepspeed", "trl"}


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import longctx", {"numpy", "torch", "transformers", "datasets"}),
        ("from longctx.upstream import transformers_internals, accelerate_internals, deepspeed_internals", LIBRARIES),
        ("import longctx.settings.rules, longctx.train, longctx.verify.__main__", LIBRARIES | {"numpy", "pydantic"}),
        ("import longctx.launch.spawn, longctx.settings.processes", LIBRARIES | {"numpy", "pydantic"}),
        ("import longctx.packing, longctx.ring.plan", {"torch", "transformers", "datasets"}),
        ("from longctx.data import load_records, tokenize_records", {"torch", "trl", "deepspeed"}),
        pytest.param("import longctx.model.tiny", {"trl", "deepspeed"}, marks=pytest.mark.long),  # takes 5 s
    ],
)
def test_light_modules_stay_light(statement, unwanted) -> None:
    script = f"import sys; {statement}; print(*(sys.modules.keys() & {unwanted}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == []


# Budgets


class Budget(NamedTuple):
    most: int
    """Lines that hold code: no blank line, comment or docstring."""
    reached: int = 0
    """The size of a room that is above its budget. It may only fall; such rooms are printed as a warning."""


# A room is a folder of longctx/, or several; `top level` are the modules beside the folders.
ROOMS = {
    "settings": Budget(1_450, 2_909),
    "launch": Budget(410, 647),
    "run": Budget(540, 1_090),
    "verify": Budget(455, 638),
    "report": Budget(520, 1_013),
    "untrusted": Budget(160, 269),
    "upstream": Budget(225, 308),
    "machine": Budget(300, 401),
    "forecast": Budget(1_120, 1_606),
    "data": Budget(1_250, 2_798),
    "packing": Budget(705, 1_087),
    "collate + sequence": Budget(490, 833),
    "attention": Budget(1_310, 1_667),
    "ring": Budget(1_000, 1_214),
    "ulysses": Budget(325, 387),
    "recurrent": Budget(490, 615),
    "layers": Budget(1_290, 1_718),
    "model": Budget(1_210, 2_312),
    "training": Budget(2_120, 4_303),
    "ranks": Budget(110, 428),
    "top level": Budget(930, 1_068),
    "library": Budget(17_000, 27_311),
    "tests": Budget(21_000, 33_691),
    "benchmarks": Budget(8_000, 11_090),
    "words of README and docs": Budget(17_000, 17_000),
}
LONGEST_FILE = 450


def _lines_of_code(path: Path) -> int:
    """Lines of a Python file that hold a token of code; those of a text that stands alone are no code."""
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    with path.open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type not in {*layout, tokenize.ENCODING}]
    held = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            held.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(held)


def _python_files(top: str) -> list[Path]:
    """Those of a folder, without what its links lead to."""
    return [path for path in sorted((ROOT / top).rglob("*.py")) if path.resolve().is_relative_to(ROOT / top)]


def _sizes() -> Counter[str]:
    """The size of each room."""
    room_of = {folder: room for room in ROOMS for folder in room.split(" + ")}
    sizes = Counter(dict.fromkeys(ROOMS, 0))
    for path in _python_files("longctx"):
        folder = path.relative_to(ROOT / "longctx").parts[0]
        room = "top level" if folder.endswith(".py") else room_of.get(folder, folder)
        sizes.update({room: (lines := _lines_of_code(path)), "library": lines})
    for top in ("tests", "benchmarks"):
        sizes[top] = sum(map(_lines_of_code, _python_files(top)))
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    sizes["words of README and docs"] = sum(_words_by_hand(page.read_text(encoding="utf-8")) for page in pages)
    return sizes


def _words_by_hand(text: str) -> int:
    """The words of a page, without what a command has written between its two marks."""
    return len(re.sub(r"<!-- tables of .*?<!-- end of the tables -->", "", text, flags=re.DOTALL).split())


def test_rooms_keep_to_their_budgets() -> None:
    sizes = _sizes()
    assert sizes.keys() == ROOMS.keys(), (
        "give each new folder of longctx/ a budget in ROOMS, taken from the spare lines"
    )
    above = {
        room: f"{room}: {sizes[room]:,} of {budget.most:,}"
        for room, budget in ROOMS.items()
        if sizes[room] > budget.most
    }
    if above:
        warnings.warn("\n".join(["rooms above their budgets", *above.values()]), stacklevel=1)
    grown = [text for room, text in above.items() if sizes[room] > ROOMS[room].reached]
    assert not grown, "delete, or take lines from another room"


def test_no_file_is_longer_than_one_can_read() -> None:
    lengths = {
        path: len(path.read_text(encoding="utf-8").splitlines())
        for top in ("longctx", "tests", "benchmarks", "docs")
        for path in _python_files(top)
    }
    assert not {str(path.relative_to(ROOT)): lines for path, lines in lengths.items() if lines > LONGEST_FILE}


def test_only_lines_that_hold_code_are_counted(tmp_path) -> None:
    path = tmp_path / "module.py"
    path.write_text('"""Text.\n\nMore."""\n\n# A comment.\nNAMES = [\n    1,\n\n    2,  # two\n]\nTEXT = """a\nb"""\n')
    assert _lines_of_code(path) == 6


def test_words_that_a_command_writes_are_not_counted() -> None:
    part = "<!-- tables of benchmarks.x -->\n\n| a | b |\n\n<!-- end of the tables -->"
    assert _words_by_hand(f"One two.\n\n{part}\n\nThree.\n\n{part}\n") == 3
