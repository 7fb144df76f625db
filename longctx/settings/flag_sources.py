"""What flags exist, without importing TRL: fields in the source of dataclasses, our defaults, and the methods of TRL.

Importing TRL takes seconds, and a mistyped flag, `--help` and shell completion should not. The files read are those
that Python would import, so that the result is never that of another release. What this module does not understand
makes the result None, and then the real parser decides.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple


class Flag(NamedTuple):
    """A field of a dataclass, as its source has it."""

    name: str
    annotation: str
    default: Any
    """The default if it is a literal, else None."""
    help: str
    aliases: tuple[str, ...]
    """Further option strings, such as `--evaluation_strategy`."""

    @property
    def is_switch(self) -> bool:
        return self.annotation.replace(" ", "") in ("bool", "bool|None", "Optional[bool]")

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a Literal."""
        return tuple(re.findall(r"'([^']*)'", self.annotation)) if self.annotation.startswith("Literal[") else ()


def read_dataclass(module: str, name: str) -> Mapping[str, Flag] | None:
    """Return the fields of a dataclass and its bases that its constructor takes, or None if that is uncertain.

    Args:
        module: a module that defines or re-exports the class.
    """
    found = _find_class(module, name)
    if found is None:
        return None
    defined_in, node = found
    fields: dict[str, Flag] = {}
    for base in reversed(node.bases):  # the order in which the dataclass decorator collects them
        inherited = read_dataclass(defined_in, base.id) if isinstance(base, ast.Name) else None
        if inherited is None:
            return None
        fields |= inherited
    decorators = {ast.unparse(decorator).partition("(")[0].split(".")[-1] for decorator in node.decorator_list}
    if not decorators:
        return fields
    if decorators != {"dataclass"} or node.keywords:
        return None
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            if "InitVar" in ast.dump(statement.annotation) or "KW_ONLY" in ast.dump(statement.annotation):
                return None
            if flag := _flag(statement.target.id, statement):
                fields[flag.name] = flag
        elif not isinstance(statement, ast.FunctionDef | ast.ClassDef) and _annotates(statement):
            return None  # a field under a condition
    return fields


def _annotates(statement: ast.stmt) -> bool:
    return any(isinstance(inner, ast.AnnAssign) for inner in ast.walk(statement))


def _flag(name: str, statement: ast.AnnAssign) -> Flag | None:
    """Return the field of an annotated assignment, or None if the constructor does not take it."""
    annotation = ast.unparse(statement.annotation)
    if "ClassVar" in annotation:
        return None
    value, metadata = statement.value, dict[Any, ast.expr]()
    if isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] == "field":
        arguments = {keyword.arg: keyword.value for keyword in value.keywords}
        if _literal(arguments.get("init")) is False:
            return None
        value = arguments.get("default")
        if isinstance(described := arguments.get("metadata"), ast.Dict):
            metadata = {_literal(key): item for key, item in zip(described.keys, described.values, strict=True)}
    aliases = _literal(metadata.get("aliases")) or ()
    return Flag(
        name,
        annotation,
        _literal(value),
        str(_literal(metadata.get("help")) or ""),
        (aliases,) if isinstance(aliases, str) else tuple(aliases),
    )


def _literal(node: ast.expr | None) -> Any:
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


def _find_class(module: str, name: str) -> tuple[str, ast.ClassDef] | None:
    """Return the class's definition and the module that has it, following imports, or None if it is not unique."""
    parsed = _parse(module)
    if parsed is None:
        return None
    tree, package = parsed
    found: list[tuple[str, ast.ClassDef] | None] = []
    for node in _statements(tree.body):
        if isinstance(node, ast.ClassDef) and node.name == name:
            found.append((module, node))
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    found.append(_find_class(_absolute(node, package), alias.name))
    return found[0] if len(found) == 1 else None


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, and those within `if TYPE_CHECKING` and the like."""
    for node in body:
        yield node
        for part in ("body", "orelse", "handlers", "finalbody") if isinstance(node, ast.If | ast.Try) else ():
            yield from _statements(getattr(node, part, ()))


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parents = package.split(".")
    return ".".join([*parents[: len(parents) - node.level + 1], *([node.module] if node.module else [])])


@functools.cache
def _parse(module: str) -> tuple[ast.Module, str] | None:
    """Return a module's syntax tree and the package that its relative imports start from."""
    top, *rest = module.split(".")
    try:
        spec = find_spec(top)  # imports nothing, as it would for a submodule
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith("__init__.py"):
        return None
    path = Path(spec.origin).parent.joinpath(*rest)
    for file, package in ((path / "__init__.py", module), (path.with_suffix(".py"), module.rpartition(".")[0])):
        if file.is_file():
            return ast.parse(file.read_bytes()), package
    return None


METHODS = ("grpo", "kto", "orpo", "ppo", "reward", "rloo")
"""Methods without a command that users may name as one, as in `trl grpo`."""

POINTER = (
    "longctx train does supervised fine-tuning (SFT), and longctx dpo direct preference optimization; in a loop of "
    "your own, sequence.policy_loss is the step of GRPO at any sp (docs/howto/policy.md), and log-probabilities "
    "serve other methods (docs/howto/preference.md). Or use TRL's trainers where one device holds a sequence"
)


def methods_with(flag: str) -> list[str]:
    """Return TRL's methods that have a flag of this name, spelled as in TRL."""
    configs = {method: read_dataclass("trl", f"{method}Config") for method in ("DPO", "GRPO", "KTO", "Reward", "RLOO")}
    return [method for method, config in configs.items() if config and flag in config]


DEMO = {
    "model_name_or_path": "tiny",
    "dataset_name": "stdlib",
    "packing": True,
    "max_length": 8192,
    "overlong": "split",
    "max_steps": 20,
    "per_device_train_batch_size": 1,
    "learning_rate": 4e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "logging_steps": 1,
    "gradient_checkpointing": False,
    "save_strategy": "no",
}
"""The preset of a run without model and data set."""

DEFAULTS = {
    "packing": True,
    "max_length": None,
    "per_device_train_batch_size": 1,
    "logging_steps": 1,
}
"""Defaults of other runs that differ from SFTConfig's. The max_length None stands for the model's context length. One
packed sequence fills a device, and a step of such sequences can take minutes."""

ADAPTER_DEFAULTS = {"lora_dropout": 0.0}
"""Defaults with --use_peft that differ from ModelConfig's: dropout is refused."""
