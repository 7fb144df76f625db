"""What other people's code and scripts rely on: names, signatures, flags, keys, dtypes and exit codes.

A name ends with `: IDENTIFIER`. Where one goes or its value changes, `--record` asks for a line that has the identifier
in backticks under "Removed" or "Changed" in the section Unreleased of CHANGELOG.md. The group `folders` records the
files that runs write.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import json
import os
import re
import signal
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from tests.golden.launches import profile_keys, silent

ROOT = Path(__file__).parents[2]
PACKAGES = ("longctx", "longctx.collate", "longctx.packing", "longctx.ring", "longctx.ulysses", "longctx.policy")
"""Modules whose public names count, besides those that docs/reference/python.md describes."""
MADE_BY_OTHERS = ("longctx.parallel.SequenceParallel", "longctx.ring.RingPlan")
"""Classes that users do not construct."""
ON_INSTANCES = ("dims", "device", "groups", "rank", "routers")
"""Attributes of the object that `parallelize` returns."""


def golden(quick: bool) -> Iterator[tuple[str, Any]]:
    """Yield texts; all that needs no training run with `quick`."""
    yield from names_and_signatures()
    yield from collated_batches()
    yield from flags()
    yield from entry_points()
    yield from profile_keys()
    yield from exit_codes_of_commands()
    yield from memory_keys()
    if not quick:
        yield from of_runs()


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


ROW = {"input_ids": [11, 12, 13, 14, 15]}
PACKED = ROW | {"seq_lengths": [3, 2]}
BATCHES: dict[str, tuple[dict[str, Any], list[dict[str, Any]] | None]] = {
    "single documents": ({}, [ROW, {"input_ids": [21, 22, 23]}]),
    "packed rows": ({"pad_to_multiple_of": 4}, [PACKED, {"input_ids": [21, 22, 23]}]),
    "padding_free": ({"padding_free": True, "pad_to_multiple_of": 4}, [ROW, {"input_ids": [21, 22, 23]}]),
    "one full row": ({}, [ROW]),
    "labels": ({}, [ROW | {"labels": [-100, 12, 13, 14, 15]}]),
    "completion_mask": ({}, [ROW | {"completion_mask": [0, 0, 1, 1, 1]}]),
    "assistant_masks": ({}, [PACKED | {"assistant_masks": [0, 0, 1, 1, 1]}]),
    "position_ids": ({}, [ROW | {"position_ids": [0, 1, 2, 0, 1]}]),
    "branch_starts": ({"pad_to_multiple_of": 8}, [ROW | {"branch_starts": [2, 4]}]),
    "other columns": ({}, [PACKED | {"attention_mask": [1] * 5, "text": "…"}]),
    "empty()": ({"pad_to_multiple_of": 4}, None),
}
"""Options and rows of batches; None for the batch without rows."""


def collated_batches() -> Iterator[tuple[str, str]]:
    """Yield dtype and shape of each key that SequenceCollator returns, and of what `shard` makes of a batch."""
    import longctx
    from longctx.collate import SequenceCollator
    from longctx.model.tiny import tiny_config, tiny_model

    for kind, (options, rows) in BATCHES.items():
        collator = SequenceCollator(pad_token_id=0, **options)
        for key, value in (collator.empty() if rows is None else collator(rows)).items():
            yield f"batch of {kind}: {key}", _kind(value)
    config = tiny_config()
    config.update({"num_hidden_layers": 1, "layer_types": ["full_attention"], "hidden_size": 32})
    _, sequence = longctx.parallelize(tiny_model(config=config), 1)
    shard = sequence.shard(SequenceCollator(0)([PACKED]))
    for key, value in shard.inputs.items():
        yield f"inputs of a sharded batch: {key}", _kind(value)
    yield "sharded batch: shift_labels", _kind(shard.shift_labels)
    yield from ((f"object that parallelize returns: {name}", _kind(getattr(sequence, name))) for name in ON_INSTANCES)


def _kind(value: Any) -> str:
    if hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return repr(value) if isinstance(value, bool | int | None) else "object"


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


# Exit codes


COMMAND_LINES = (
    "",
    "--help",
    "--version",
    "no_such_command",
    "grpo",
    "train --help",
    "train --sq 2",
    "train --sp 0",
    "train --config no.yaml",
    "train --sp 2 --num_processes 3",
    "train --resume_from_checkpoint no_such_folder",
    "dpo --help",
    "dpo",
    "plan --help",
    "plan --no_such_flag",
    "plan --gpus 0",
    "verify --help",
    "verify --no_such_flag",
    "verify --sp 0",
    "export --help",
    "export",
    "export no_such_folder --output_dir other",
    "completion bash",
    "completion",
    "completion no_such_shell",
    "bench --help",
    "bench --no_such_flag",
)


def exit_codes_of_commands() -> Iterator[tuple[str, str]]:
    """Yield the exit codes of commands that end before a run."""
    for line in COMMAND_LINES:
        yield f"exit code: longctx {line}".rstrip(), exit_code(line.split())


def exit_code(arguments: list[str]) -> str:
    """What `longctx` with these arguments ends with, in this process."""
    from longctx.__main__ import main

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), silent(), mock.patch.dict(os.environ):
        try:
            return str(main(arguments))
        except SystemExit as ended:
            return str(ended.code or 0)
        except BaseException as error:  # Python ends with 1, and with SIGINT after KeyboardInterrupt
            return type(error).__name__


# What runs leave


def memory_keys() -> Iterator[tuple[str, str]]:
    """Yield the keys of a log's `memory` on GPUs, which no run on the CPU has."""
    from longctx.training.peak_memory import PeakMemory

    kinds = ("allocated", "reserved", "host", "retries", "device_total", "host_total")
    for key, kind in _keys([{"memory": PeakMemory(**dict.fromkeys(kinds, (1,))).to_dict()}]).items():
        yield f"log on GPUs: {key}", kind


RUN = "--max_steps 3 --max_length 160 --overlong truncate --report_to none --use_cpu True --save_strategy no"
EVALUATED = "--eval_strategy steps --eval_steps 2"
LOGS = {
    "training and evaluation": f"train {EVALUATED} small documents",
    "a stream": "train --dataset_streaming True small documents",
    "experts": f"train --router_aux_loss_coef 0.1 {EVALUATED} experts documents",
    "an adapter": "train --use_peft True small documents",
    "pairs": f"dpo {EVALUATED} --dataset_test_split train small pairs",
}
"""Runs by what their logs show: command and flags, model and data."""
ENDINGS = {
    "trained to the end": ("", ""),
    "stopped by SIGTERM": ("--max_steps 100000", "SIGTERM"),
    "stopped by SIGUSR1": ("--max_steps 100000", "SIGUSR1"),
    "ended by Ctrl-C": ("--max_steps 100000", "SIGINT"),
    "a gradient that is not finite": ("--learning_rate 1e30 --max_grad_norm 1e30", ""),
    "no token with a label": ("--dataset_streaming True --max_length 1", ""),
}
"""Runs by how they end: flags, and a signal that the process gets while it trains."""


def of_runs() -> Iterator[tuple[str, str]]:
    """Yield the names and kinds of what logs hold, and the exit codes of runs."""
    from tests.golden.runs import inputs
    from tests.workers import run_ranks

    root = inputs()
    logs, codes = run_ranks(1, f"{__name__}:train_all", str(root), backend=None, timeout=900)[0]
    of_keys: dict[str, dict[str, list[str]]] = {}
    for run, kinds in logs.items():
        for key, kind in kinds.items():
            of_keys.setdefault(key, {}).setdefault(kind, []).append(run)
    for key, kinds in of_keys.items():
        told = {kind: "every run" if runs == [*LOGS] else ", ".join(runs) for kind, runs in kinds.items()}
        yield f"log: {key}", "; ".join(f"{kind} in {runs}" for kind, runs in told.items())
    yield from ((f"exit code of a run: {ending}", code) for ending, code in codes.items())


def train_all(root: str) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Train LOGS and ENDINGS in this process, and return keys of trainer_state.json by run, and exit codes."""
    from tests.workers import one_by_one

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name)
    logs, codes = {}, {}
    for kind, line in one_by_one(LOGS):
        command, *flags, model, data = line.split()
        assert exit_code([command, *_given(root, model, data, kind), *flags]) == "0", kind
        state = json.loads(Path(root, "surface", kind, "trainer_state.json").read_text())
        logs[kind] = _keys(state["log_history"])
    for ending, (flags, sent) in one_by_one(ENDINGS):
        if sent:
            threading.Thread(
                target=_send, args=(signal.Signals[sent], signal.getsignal(signal.SIGTERM)), daemon=True
            ).start()
        codes[ending] = exit_code(["train", *_given(root, "small", "documents", ending), *flags.split()])
    return logs, codes


def _given(root: str, model: str, data: str, name: str) -> list[str]:
    given = ["--model_name_or_path", f"{root}/{model}", "--dataset_name", f"{root}/{data}"]
    return [*given, "--output_dir", f"{root}/surface/{name}", *RUN.split()]


def _send(number: signal.Signals, handler: Any) -> None:
    """Send this process a signal once it trains, when the run's own handler is in place."""
    while signal.getsignal(signal.SIGTERM) == handler:
        time.sleep(0.05)
    time.sleep(0.5)
    os.kill(os.getpid(), number)


def _keys(log: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the kinds of each value in the log's entries, with names in dictionaries joined by dots."""
    kinds: dict[str, set[str]] = {}
    for entry in log:
        _note(entry, "", kinds)
    return {key: " or ".join(sorted(found)) for key, found in kinds.items()}


_KINDS = {bool: "true or false", int: "number", float: "number", str: "text", type(None): "null"}


def _note(value: Any, key: str, kinds: dict[str, set[str]]) -> None:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            _note(inner, f"{key}.{name}".lstrip("."), kinds)
    elif isinstance(value, list) and value:
        for inner in value:
            _note(inner, f"{key}[]", kinds)
    else:
        kinds.setdefault(key, set()).add(_KINDS.get(type(value), f"empty {type(value).__name__}"))


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
