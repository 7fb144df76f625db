"""Imports follow the data: a stage imports itself and what comes before it, and light modules stay light."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

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
    ("data",),  # names and files -> tokenised documents
    ("packing",),  # lengths -> packs
    ("collate",),  # packs -> batches
    ("model",),  # files -> a model
    ("sequence",),  # batches -> one rank's part
    ("attention", "recurrent", *PACKAGES_OF_BACKENDS),
    ("layers",),  # the head and its loss, MLPs, chunked layers
    ("parallel", "policy", "longctx"),  # all of the above for someone's own loop; `import longctx` offers it
    ("forecast",),  # what a step takes
    ("training",),  # the trainer and its checkpoints
    ("settings",),  # flags, profiles, environment -> one resolved run
    ("report",),  # what a run says of itself
    ("run", "verify", "plan", "train", "dpo", "whole", "completion", "__main__"),  # the command line
    ("benchmarks",),
]

STAGE_OF = {name: number for number, names in enumerate(STAGES) for name in names}


def _module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {_module_name(path): path for top in ("longctx", "benchmarks") for path in sorted((ROOT / top).rglob("*.py"))}

# Pure, or nearly so: these import nothing of ours but each other, and every stage may import them.
ANYWHERE = {
    "longctx.ring.line",
    "longctx.ring.plan",
    "longctx.ring.planner",
    "longctx.sequence.host_tensors",
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
        ("import longctx.packing, longctx.ring.plan", {"torch", "transformers", "datasets"}),
        ("from longctx.data import load_records, tokenize_records", {"torch", "trl", "deepspeed"}),
        pytest.param("import longctx.model.tiny", {"trl", "deepspeed"}, marks=pytest.mark.long),  # takes 5 s
    ],
)
def test_light_modules_stay_light(statement, unwanted) -> None:
    script = f"import sys; {statement}; print(*(sys.modules.keys() & {unwanted}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == []
