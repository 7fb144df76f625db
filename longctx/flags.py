"""The command line: TRL's own flags, ours besides, `--config run.yaml` under both."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import yaml
from trl import ModelConfig, ScriptArguments, SFTConfig, TrlParser

OLDER_NAMES = {"max_seq_length": "max_length", "torch_dtype": "dtype"}
"""Names that other versions of TRL and transformers give to today's flags."""


@dataclass
class SequenceArguments:
    """The flags that longctx adds to TRL's."""

    sp: int | None = field(default=None, metadata={"help": "Devices that share one sequence. Default: 1."})
    sp_backend: Literal["auto", "ulysses", "ring", "gather", "hybrid"] = field(
        default="auto",
        metadata={"help": "How attention is spread over them; auto says what it chose and why."},
    )
    cp: int | None = field(default=None, metadata={"help": "Short for --sp N --sp_backend ring."})
    ring_size: int | None = field(default=None, metadata={"help": "Ring ranks of --sp_backend hybrid."})
    dp_replicate: int | None = field(default=None, metadata={"help": "Copies of the sharded model (HSDP). Default: 1."})
    engine: Literal["auto", "deepspeed", "fsdp2"] = field(
        default="auto", metadata={"help": "Training engine. auto: DeepSpeed ZeRO-3 for Ulysses, else FSDP2."}
    )
    num_processes: int | None = field(
        default=None,
        metadata={"help": "Processes to start where no launcher did. Default: sp × dp_replicate."},
    )
    accelerate_config: str | None = field(
        default=None, metadata={"help": "Accelerate profile: a name from configs/ or a path to a YAML file."}
    )
    overlong: Literal["raise", "truncate", "drop", "split"] = field(
        default="raise",
        metadata={"help": "What to do with documents longer than max_length; every token is counted."},
    )
    prepare_only: bool = field(default=False, metadata={"help": "Tokenise and plan the packs, then stop."})
    dry_run: bool = field(default=False, metadata={"help": "Print the resolved run and stop."})


@dataclass(frozen=True)
class Flags:
    """Every flag's value, and which of them the user set."""

    values: Mapping[str, Any]
    explicit: frozenset[str]
    """Names given on the command line or in the --config file."""
    arguments: tuple[str, ...]
    """The command line, to start further processes with."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(name) from None

    def of(self, arguments_type: type) -> dict[str, Any]:
        """The values of one dataclass's fields."""
        return {f.name: self.values[f.name] for f in fields(arguments_type) if f.init and f.name in self.values}


def parse_flags(arguments: Sequence[str]) -> Flags:
    """Read the command line and the YAML file it may name. No dataclass of TRL's is built: SFTConfig starts processes.

    Raises:
        ValueError: for a --config file that cannot be read or sets an unknown flag.
        SystemExit: for an unknown or malformed flag, as argparse does.
    """
    renamed = [_today(argument) for argument in arguments]
    config_path, rest = _take_config(renamed)
    config = _read_config(config_path) if config_path else {}
    parser = TrlParser([SequenceArguments, ScriptArguments, SFTConfig, ModelConfig], prog="longctx.train")
    parser.allow_abbrev = False
    unknown = parser.set_defaults_with_config(**config)
    if unknown:
        raise ValueError(
            f"{config_path} sets {unknown[0].lstrip('-')}, which is no flag. See python -m longctx.train --help."
        )
    values = vars(parser.parse_args(rest))
    explicit = frozenset(config) | _given(parser, rest)
    return Flags(values=values, explicit=explicit, arguments=tuple(arguments))


def _today(argument: str) -> str:
    """The flag under its present name, `--flag` or `--flag=value`, dashes allowed for underscores."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument[2:].partition("=")
    name = name.replace("-", "_")
    return f"--{OLDER_NAMES.get(name, name)}{equals}{value}"


def _take_config(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    known, rest = parser.parse_known_args(arguments)
    return known.config, rest


def _read_config(path: str) -> dict[str, Any]:
    try:
        config = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path} cannot be read as YAML: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"--config {path} holds a {type(config).__name__}, expected 'flag: value' lines.")
    return {str(OLDER_NAMES.get(name, name)): value for name, value in config.items()}


def _given(parser: argparse.ArgumentParser, arguments: list[str]) -> frozenset[str]:
    """Which flags the command line sets: parse again with all defaults left out."""
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return frozenset(vars(parser.parse_args(arguments)))
