"""The interface that other people's code and scripts rely on: names, signatures, flags and commands.

A name ends with `: IDENTIFIER`. Where one goes or its value changes, `--record` asks for a line that has the identifier
in backticks under "Removed" or "Changed" in the section Unreleased of CHANGELOG.md. The group `texts` has exit
codes, and `training` has the names in logs and the files that runs write.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("longctx", "longctx.collate", "longctx.packing", "longctx.ring", "longctx.ulysses", "longctx.policy")
"""Modules whose public names count, besides those that docs/reference/python.md describes."""
MADE_BY_OTHERS = ("longctx.parallel.SequenceParallel", "longctx.ring.RingPlan")
"""Classes that users do not construct."""


def golden(quick: bool) -> Iterator[tuple[str, Any]]:
    yield from names_and_signatures()
    yield from flags()
    yield from entry_points()


# Python


def names_and_signatures() -> Iterator[tuple[str, str]]:
    """Yield what each public name is, with signatures of functions, classes and their methods."""
    names = []
    for package in PACKAGES:
        module = importlib.import_module(package)
        names += [f"{package}.{name}" for name in getattr(module, "__all__", None) or _defined_in(module)]
    names += re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "reference" / "python.md").read_text(), re.MULTILINE)
    first: dict[Any, str] = {}
    for name in dict.fromkeys(names):
        thing = _named(name)
        if callable(thing) and first.setdefault(thing, name) != name:
            yield f"Python: {name}", f"the same as {first[thing]}"
            continue
        yield f"Python: {name}", "class" if name in MADE_BY_OTHERS else _described(thing)
        for member, value in _members(thing).items():
            yield f"Python: {name}.{member}", value


def _named(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def _defined_in(module: Any) -> list[str]:
    own = {name for name, thing in vars(module).items() if getattr(thing, "__module__", None) == module.__name__}
    return sorted(name for name in own if not name.startswith("_"))


def _described(thing: Any) -> str:
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return f"exception, {' '.join(base.__name__ for base in thing.__bases__)}"
    if inspect.isclass(thing) or inspect.isroutine(thing):
        return f"{'class' if inspect.isclass(thing) else 'function'} {_signature(thing)}"
    return " ".join(map(str, thing)) if isinstance(thing, tuple | list | Mapping) else repr(thing)


class _Default:
    """Stands for a default that is an object of longctx."""

    def __init__(self, value: Any):
        self.name = type(value).__name__

    def __repr__(self) -> str:
        return f"{self.name}(…)"


def _signature(function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    ours = {name: p for name, p in signature.parameters.items() if type(p.default).__module__.startswith("longctx")}
    shown = {name: p.replace(default=_Default(p.default)) for name, p in ours.items()}
    return str(signature.replace(parameters=[*(dict(signature.parameters) | shown).values()]))


_OPERATORS = ("__call__", "__getitem__", "__iter__", "__len__")


def _members(thing: Any) -> dict[str, str]:
    """Return the public methods and properties of a class, and those of its base classes in longctx."""
    found: dict[str, str] = {}
    bases = thing.__mro__ if inspect.isclass(thing) else ()
    for base in reversed([base for base in bases if base.__module__.startswith("longctx")]):
        for name, member in vars(base).items():
            if name.startswith("_") and name not in _OPERATORS:
                continue
            if isinstance(member, property | classmethod | staticmethod):
                function = member.fget if isinstance(member, property) else member.__func__
                found[name] = f"{type(member).__name__} {_signature(function)}"
            elif inspect.isfunction(member):
                found[name] = f"method {_signature(member)}"
    return found


# The command line


def commands() -> dict[str, str]:
    """The module of each command of `longctx`."""
    from longctx.__main__ import COMMANDS

    return {name: command.module for name, command in COMMANDS.items()}


def flags() -> Iterator[tuple[str, str]]:
    """Yield kind, default, choices and short form of each flag, with the commands that have it."""
    of_flags: dict[str, dict[str, list[str]]] = {}
    for command, module in commands().items():
        for name, facts in _flags_of(module):
            of_flags.setdefault(name, {}).setdefault(facts, []).append(command)
    for name, facts in sorted(of_flags.items()):
        yield f"flag: {name}", "; ".join(f"{', '.join(which)}: {what}" for what, which in facts.items())


def _flags_of(module: str) -> Iterator[tuple[str, str]]:
    """Yield name and facts of each flag of a command. `longctx verify` takes those of `longctx train`, too."""
    from longctx.settings.dpo import DPO
    from longctx.settings.flags import SFT
    from longctx.settings.read import parser
    from longctx.verify.__main__ import VERIFY

    methods = {method.module: method for method in (SFT, DPO, VERIFY)}
    if (method := methods.get(module.removesuffix(".__main__"))) is None:
        yield from ((name := _name_of(action), _facts(action, name)) for action in _parser_of(module)._actions)
        return
    rows = {name: flag for name, flag in method.flags.items() if method is not VERIFY or name not in SFT.flags}
    for action in parser(method)._actions:
        if flag := rows.get(action.dest):
            name = _name_of(action)
            yield name, _facts_of_row(flag) if name == f"--{flag.name}" else "switch, default False"
    for flag in rows.values():
        yield from ((f"--{alias}", f"another name of --{flag.name}") for alias in flag.aliases)
    if method is not VERIFY:
        yield from {"--config": "str, default None", "--help": "switch, also -h", "--help_all": "switch"}.items()


def _parser_of(module: str) -> argparse.ArgumentParser:
    return importlib.import_module(module)._parser()


def _name_of(action: argparse.Action) -> str:
    """The name with underscores, as the documentation writes it."""
    names = [option for option in action.option_strings if "-" not in option.lstrip("-")]
    return max(names or [str(action.metavar or action.dest)], key=len)


def _facts(action: argparse.Action, name: str) -> str:
    kind = getattr(action.type, "__name__", None) or ("switch" if action.nargs == 0 else "str")
    kind = {"<lambda>": "str"}.get(kind, kind.lstrip("_"))
    others = [o for o in action.option_strings if o != name and o.replace("-", "_") != name.replace("-", "_")]
    facts = [kind if action.nargs in (None, 0) else f"{kind} × {action.nargs}"]
    if action.choices is not None:
        facts.append("one of " + " ".join(str(getattr(choice, "value", choice)) for choice in action.choices))
    if action.required:
        facts.append("required")
    elif action.default != argparse.SUPPRESS:
        facts.append(f"default {action.default!r}")
    return ", ".join([*facts, *([f"also {' '.join(others)}"] if others else [])])


def _facts_of_row(flag: Any) -> str:
    words = {"a whole number": "int", "a number": "float", "a list of numbers": "float", "true or false": "bool"}
    kind, nargs = words.get(flag.kind.name, "str"), flag.kind.nargs
    facts = [kind if nargs is None else f"{kind} × {nargs}"]
    facts += [f"one of {' '.join(flag.choices)}"] if flag.choices else []
    default = list(flag.unset) if isinstance(flag.unset, tuple) else flag.unset
    return ", ".join([*facts, f"default {default!r}"])


def entry_points() -> Iterator[tuple[str, str]]:
    """Yield installed commands, and modules that `python -m` runs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    yield from ((f"installed command: {name}", function) for name, function in project["scripts"].items())
    yield from ((f"extra: {name}", "") for name in project["optional-dependencies"])
    for top in ("longctx", "benchmarks"):
        for path in sorted((ROOT / top).rglob("*.py")):
            if path.name == "__main__.py" or '__name__ == "__main__"' in path.read_text():
                name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
                yield f"module of python -m: {name}", ""


# The changelog


def before_record(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Check that CHANGELOG.md names all that has gone or changed.

    Raises:
        SystemExit: with what is missing there.
    """
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    unreleased = re.split(r"^## ", text, flags=re.MULTILINE)[1]
    sections = re.split(r"^### ", unreleased, flags=re.MULTILINE)
    told = {part.split("\n")[0]: part for part in sections if part.startswith(("Changed", "Removed"))}
    missing: dict[str, str] = {}
    for name in sorted(before):
        identifier = name.rpartition(": ")[2]
        named = re.compile(rf"`{re.escape(identifier)}(?![\w-])[^`]*`")
        if name not in now and not named.search(told.get("Removed", "")):
            missing.setdefault(f"under Removed: `{identifier}`", name)
        elif name in now and before[name] != now[name] and not named.search("".join(told.values())):
            missing.setdefault(f"under Changed: `{identifier}`", f"{name}: {before[name]} -> {now[name]}")
    if missing:
        lines = (f"{line} ({what})" for line, what in missing.items())
        raise SystemExit("\n".join(["CHANGELOG.md, section Unreleased, does not name", *lines]))
