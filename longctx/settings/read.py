"""Read the command line and its --config file. Nothing here imports torch: a mistake is told at once."""

from __future__ import annotations

import argparse
import difflib
import functools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from longctx.launch.accelerate import find_config
from longctx.settings.flags import SFT
from longctx.settings.schema import BOOL, NAMES, Method, check
from longctx.settings.values import Origin, Settings
from longctx.untrusted.files import check_file

MOST_ERRORS = 5
"""Errors that are told at a time."""
MOST_BYTES, MOST_VALUES = 1_000_000, 100_000
"""Of a YAML file, with the values that its aliases repeat."""

OTHER_METHODS = ("grpo", "kto", "orpo", "ppo", "reward", "rloo")
"""Methods without a command that users may name as one, as in `trl grpo`."""

POINTER = (
    "longctx train does supervised fine-tuning (SFT), and longctx dpo direct preference optimization; in a loop of "
    "your own, sequence.policy_loss is the step of GRPO at any sp (docs/howto/policy.md), and log-probabilities "
    "serve other methods (docs/howto/preference.md). Or use TRL's trainers where one device holds a sequence"
)

_OF_SEVERAL = {
    "dataset_name": " Several data sets are --datasets.",
    "dataset_test_split": " One set is evaluated on, of several splits if they are joined: test+validation.",
    "dataset_train_split": " Splits are joined: train+validation.",
}


def parse_flags(arguments: Sequence[str], method: Method = SFT) -> Settings:
    """Return every flag's value, as the command line, else its YAML file, else the table has it.

    Variables of the file's `env:` block are set, as TRL does.

    Raises:
        ValueError: for up to five mistakes, one a line: unknown flags, and values that a flag does not take.
    """
    errors: list[str] = []
    given = _command_line(arguments, method, errors)
    path = given.pop("config", None)
    from_file = {} if path is None else _file(path, method, errors)
    values = {flag.name: list(v) if isinstance(v := flag.unset, tuple) else v for flag in method.flags.values()}
    origins: dict[str, Origin] = {}
    sources: tuple[tuple[Origin, Mapping[str, Any]], ...] = (("file", from_file), ("flag", given))
    for origin, found in sources:
        for name, value in found.items():
            try:
                subject = f"{name} {value} in {path}" if origin == "file" else ""
                values[name] = check(method.flags[name], value, subject)
            except ValueError as error:
                errors.append(str(error))
            origins[name] = origin
    refuse(errors)
    return Settings(method=method, of=values, origins=origins, arguments=tuple(arguments))


class Refused(ValueError):
    """Up to five mistakes, one a line."""

    is_listed = True


def refuse(errors: Sequence[str]) -> None:
    """Raise Refused for what is wrong, if anything is."""
    if errors:
        lines = dict.fromkeys(" ".join(error.splitlines()) for error in errors)
        raise Refused("\n".join(list(lines)[:MOST_ERRORS]))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (--\w+)\S*: expected .*", r"\1 needs a value", message)
        raise ValueError(f"{message}. All flags: {self.prog} --help-all")


@functools.cache
def parser(method: Method) -> argparse.ArgumentParser:
    """Return the parser of a method's flags, which leaves every value as text. Parsing leaves it as it is."""
    found = _Parser(
        prog=f"longctx {method.command}", argument_default=argparse.SUPPRESS, allow_abbrev=False, add_help=False
    )
    found.add_argument("--config")
    for flag in method.flags.values():
        alone = "true" if flag.kind.nargs == "?" else None
        found.add_argument(f"--{flag.name}", dest=flag.name, nargs=flag.kind.nargs, const=alone)
        if flag.kind is BOOL:
            found.add_argument(f"--no_{flag.name}", dest=flag.name, action="store_const", const="false")
    return found


def _command_line(arguments: Sequence[str], method: Method, errors: list[str]) -> dict[str, Any]:
    """Return the words given for each flag, by today's name."""
    spelled: dict[str, set[str]] = {}
    todays = [_todays(argument, method, spelled) for argument in arguments]
    for name, names in spelled.items():
        if len(names) > 1:
            errors.append(f"--{' and --'.join(sorted(names))} are names of one flag. Keep --{name}.")
    if (times := sum(word.partition("=")[0] == "--config" for word in todays)) > 1:
        # Of other flags the last one counts, as in other programs.
        errors.append(f"--config is given {times} times, and only the last would count. Give it once.")
    values, left = parser(method).parse_known_args(todays)
    for number, word in enumerate(left):
        if word.startswith("-") and not word.lstrip("-")[:1].isdigit():
            name = word.partition("=")[0]
            errors.append(f"{name} is not a flag.{advice(name.lstrip('-'), method)}")
        elif number == 0 or not left[number - 1].startswith("-"):
            errors.append(f"{word!r} belongs to no flag. All flags: longctx {method.command} --help-all")
    return vars(values)


def _todays(argument: str, method: Method, spelled: dict[str, set[str]]) -> str:
    """Return `--flag` or `--flag=value` with today's name of the flag, and underscores for dashes.

    Args:
        spelled: the names that were given for each flag, to which this one is added.
    """
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument[2:].partition("=")
    negation = "no_" if re.match("no[-_]", name) and not method.find(name) else ""
    if flag := method.find(name[len(negation) :]):
        spelled.setdefault(flag.name, set()).add(name[len(negation) :].replace("-", "_"))
        return f"--{negation}{flag.name}{equals}{value}"
    return argument


def advice(name: str, method: Method) -> str:
    """Return what to do about a flag that does not exist."""
    name = name.replace("-", "_")
    words = {flag.name: flag.name for flag in method.flags.values()} | {
        alias: flag.name for flag in method.flags.values() for alias in flag.aliases
    }
    if name in _OF_OTHER_METHODS:
        return f" It is one of another method: {POINTER}."
    if name in _ABBREVIATIONS:
        return f" Did you mean --{_ABBREVIATIONS[name]}?"
    close = difflib.get_close_matches(name, sorted(words), n=1)
    meant = f" Did you mean --{words[close[0]]}?" if close else ""
    return f"{meant} All flags: longctx {method.command} --help-all"


_OF_OTHER_METHODS = (
    *("num_generations", "max_completion_length", "max_prompt_length", "reward_funcs", "reward_weights", "epsilon"),
    *("use_vllm", "vllm_mode", "temperature", "num_iterations", "scale_rewards", "desirable_weight", "kl_coef"),
)

_ABBREVIATIONS = {
    "batch_size": "per_device_train_batch_size",
    "data": "dataset_name",
    "dataset": "dataset_name",
    "epochs": "num_train_epochs",
    "lr": "learning_rate",
    "lr_scheduler": "lr_scheduler_type",
    "model": "model_name_or_path",
    "output": "output_dir",
    "resume": "resume_from_checkpoint",
    "steps": "max_steps",
}
"""Short names of other programs, which are too unlike the names of flags to be recognised by their spelling."""


def _file(path: str, method: Method, errors: list[str]) -> dict[str, Any]:
    """Return {flag: value} of a --config file, without those that are null, and set the variables of its `env`."""
    config = read_yaml(find_config("config", path, "recipes"))
    env = {} if (block := config.pop("env", None)) is None else block
    if not isinstance(env, Mapping):
        raise ValueError(f"--config {path}: env is {env!r}, expected a block of 'VARIABLE: value' lines.")
    try:
        os.environ.update({str(name): str(value) for name, value in env.items()})
    except (OSError, ValueError) as error:
        raise ValueError(f"--config {path}: env has a variable that cannot be set: {error}. Correct it.") from error
    found: dict[str, Any] = {}
    for name, value in config.items():
        flag = method.find(str(name))
        if flag is None:
            errors.append(f"--config {path} sets {name}, which is not a flag.{advice(str(name), method)}")
        elif flag.name in found:
            errors.append(f"--config {path} sets {name} and another name of it. Keep {flag.name}.")
        elif flag.name == "accelerate_config":
            errors.append(
                f"--config {path} sets accelerate_config {value}, which decides how processes start. Give it on the "
                "command line: --accelerate_config, or accelerate launch --config_file."
            )
        elif isinstance(value, list) and flag.kind is not NAMES and flag.kind.nargs not in ("+", "*"):
            errors.append(
                f"--config {path} sets {name} to {value}, and it takes one value.{_OF_SEVERAL.get(flag.name, '')}"
            )
        elif value is not None:
            found[flag.name] = value
    return found


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the mapping that a YAML file holds.

    Raises:
        ValueError: if it cannot be read, is too large, is no mapping, or has a key twice.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses a key that stands twice, of which YAML would take the last, and aliases that repeat without end."""

        def get_single_node(self) -> Any:
            node = super().get_single_node()
            if _num_values(node, {}) > MOST_VALUES:
                raise ValueError(f"with what its aliases repeat it has more than {MOST_VALUES:,} values")
            return node

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            names = [name.value for name, _ in node.value] if isinstance(node, yaml.MappingNode) else []
            if twice := next((name for name in names if names.count(name) > 1 and name != "<<"), None):
                raise ValueError(f"{twice} stands there twice")
            return super().construct_mapping(node, deep)

    try:
        file = check_file(Path(path))
        if (size := file.stat().st_size) > MOST_BYTES:
            raise ValueError(f"it has {size:,} bytes, and settings at most {MOST_BYTES:,}")
        content = yaml.load(file.read_text(encoding="utf-8"), Loader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path} cannot be read as YAML: {str(error).removesuffix('.')}.") from error
    except (AttributeError, LookupError, TypeError) as error:  # PyYAML's, of `!!int ""`
        raise ValueError(f"--config {path} cannot be read as YAML: a value does not fit its !!tag.") from error
    if not isinstance(content, dict):
        raise ValueError(f"--config {path} holds a {type(content).__name__}, expected 'flag: value' lines.")
    return {str(name): value for name, value in content.items()}


def _num_values(node: Any, known: dict[int, int]) -> int:
    """Return how many values a node stands for, with those that aliases repeat; too many for one that is in itself."""
    if node is None or isinstance(node.value, str):
        return 1
    if id(node) not in known:
        known[id(node)] = MOST_VALUES
        children = (child for item in node.value for child in (item if isinstance(item, tuple) else [item]))
        known[id(node)] = 1 + sum(_num_values(child, known) for child in children)
    return known[id(node)]
