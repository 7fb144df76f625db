"""Parse the command line: the flags of TRL and longctx, which override those of a --config file."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn

import yaml
from transformers.hf_argparser import string_to_bool
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser

from longctx.attention.backends import BACKENDS
from longctx.settings.methods import POINTER, methods_with
from longctx.untrusted.files import check_file

OLDER_NAMES = {"max_seq_length": "max_length", "torch_dtype": "dtype"}
"""Names that other versions of TRL and transformers give to today's flags."""

MACHINE_FLAGS = ("machine_rank", "main_process_ip", "main_process_port")
"""Flags that --accelerate_config passes on to `accelerate launch`."""


@dataclass
class SequenceArguments:
    """The flags that longctx adds to TRL's."""

    _argument_group_name = "longctx"

    sp: int | None = field(default=None, metadata={"help": "Devices that share one sequence. Default: 1."})
    sp_backend: str = field(
        default="auto",
        metadata={"help": "How attention is spread over them; auto says what it chose and why."},
    )
    cp: int | None = field(default=None, metadata={"help": "Short for --sp N --sp_backend ring."})
    ring_size: int | None = field(default=None, metadata={"help": "Ring ranks of --sp_backend hybrid."})
    measure_links: bool = field(
        default=False,
        metadata={"help": "Measure how fast the processes exchange data before auto chooses, instead of a table."},
    )
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
    dataset_weights: list[float] | None = field(
        default=None,
        metadata={"help": "Of each of --datasets, how often it gives the next document, against the others."},
    )
    dataset_stopping_strategy: Literal["first_exhausted", "all_exhausted", "all_exhausted_without_replacement"] = field(
        default="first_exhausted",
        metadata={"help": "When --dataset_weights draws no more: datasets.interleave_datasets' stopping_strategy."},
    )
    machine_rank: int | None = field(
        default=None, metadata={"help": "With --accelerate_config on several machines: this one's number, from 0."}
    )
    main_process_ip: str | None = field(
        default=None, metadata={"help": "With --accelerate_config on several machines: the first one's address."}
    )
    main_process_port: int | None = field(
        default=None, metadata={"help": "With --accelerate_config on several machines: a free port of the first one."}
    )
    overlong: Literal["raise", "truncate", "drop", "split"] = field(
        default="raise",
        metadata={"help": "What to do with documents longer than max_length; every token is counted."},
    )
    rope_scaling: str | None = field(
        default=None,
        metadata={"help": "Extend the model's context: yarn:4, linear:2, llama3:8, or RoPE parameters as JSON."},
    )
    balance_packs: bool = field(
        default=True,
        metadata={"help": "Give data-parallel ranks packs of similar attention cost at a time."},
    )
    memory: Literal["balanced", "longest", "fastest"] = field(
        default="balanced",
        metadata={"help": "What the levers below are where no flag sets them: see the README's table."},
    )
    tiled_mlp: bool | None = field(default=None, metadata={"help": "Run every MLP over a few tokens at a time."})
    tiled_mlp_num_shards: int | None = field(
        default=None, metadata={"help": "Tiles of --tiled_mlp. Default: they are as long as the model is wide."}
    )
    heads_k_stride: int | None = field(
        default=None, metadata={"help": "Key/value heads that a rank exchanges and attends at a time. Default: all."}
    )
    sequence_chunk_size: int | None = field(
        default=None,
        metadata={"help": "Tokens that a rank runs its layers over at a time; the others wait in host memory."},
    )
    offload_optimizer_device: Literal["none", "cpu", "nvme"] = field(
        default="none", metadata={"help": "Where DeepSpeed keeps optimizer states."}
    )
    offload_param_device: Literal["none", "cpu", "nvme"] = field(
        default="none",
        metadata={"help": "Where ZeRO-3 keeps parameters, or FSDP2 (cpu) parameters and optimizer states."},
    )
    offload_optimizer_nvme_path: str | None = field(
        default=None, metadata={"help": "Folder of --offload_optimizer_device nvme."}
    )
    offload_param_nvme_path: str | None = field(
        default=None, metadata={"help": "Folder of --offload_param_device nvme."}
    )
    communication_data_type: Literal["auto", "fp32", "bf16"] = field(
        default="auto",
        metadata={"help": "What gradients are reduced in. auto: fp32 on FSDP2, DeepSpeed's own choice on DeepSpeed."},
    )
    on_nonfinite: Literal["stop", "skip"] = field(
        default="stop",
        metadata={"help": "What to do with a step whose gradient is NaN or infinite: stop the run, or leave it out."},
    )
    early_stopping_patience: int | None = field(
        default=None,
        metadata={"help": "Evaluations in a row without a better --metric_for_best_model after which training stops."},
    )
    early_stopping_threshold: float = field(
        default=0.0, metadata={"help": "How much better the metric has to be to count."}
    )
    profile: bool = field(
        default=False, metadata={"help": "Write a profiler trace of a few steps of every rank to output_dir/profile."}
    )
    profile_steps: int = field(default=3, metadata={"help": "Steps of --profile, from the third of the run on."})
    prepare_only: bool = field(default=False, metadata={"help": "Tokenise and plan the packs, then stop."})
    dry_run: bool = field(default=False, metadata={"help": "Print the resolved run and stop."})
    explain: bool = field(default=False, metadata={"help": "Print the reasons for what was decided, too."})


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
        """Return the values of one dataclass's fields."""
        return {f.name: self.values[f.name] for f in fields(arguments_type) if f.init and f.name in self.values}


def parse_flags(arguments: Sequence[str]) -> Flags:
    """Read the command line and its YAML file. No TRL dataclass is built: SFTConfig would start a process group.

    Raises:
        ValueError: for an unknown or malformed flag, and for a --config file that cannot be read.
        SystemExit: after --help.
    """
    parser = _Parser(
        [SequenceArguments, ScriptArguments, DatasetMixtureConfig, SFTConfig, ModelConfig],
        usage="longctx train [--sp N] [--FLAG VALUE ...] [--config FILE]",
        formatter_class=_HelpFormatter,
        description="Train on sequences spread over --sp devices: exactly, or say before the first step why not.",
    )
    parser.put_first(SequenceArguments._argument_group_name)
    parser.add_argument("--config", help="YAML file of flags, under those of the command line.")
    parser.action("sp_backend").choices = ("auto", *BACKENDS.spread)
    parser.action("trackio_static_space_id").type = _space_or_false
    parser.action("lr_scheduler_kwargs").type = _json_object
    parser.action("liger_kernel_config").type = str  # read by longctx.layers.liger
    for name, meaning in _MEANINGS.items():
        parser.action(name).help = meaning
    given = [_today(argument) for argument in arguments]
    path = _only_config(given)
    from_file = _read_config(path, parser) if path else {}
    # Scalars are parsed like the command line, which checks their types and choices; `--flag=value` cannot express
    # null, lists and mappings.
    parser.set_defaults(**{name: value for name, value in from_file.items() if not _is_scalar(value)})
    scalars = {name: value for name, value in from_file.items() if _is_scalar(value)}
    given = [f"--{name}={_text(value, parser.action(name))}" for name, value in scalars.items()] + given
    values = vars(parser.parse_args(given))
    values.pop("config")
    return Flags(values=values, explicit=frozenset(from_file) | parser.given(given), arguments=tuple(arguments))


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Help that shows every default but None."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


class _Parser(TrlParser):
    """A parser that raises one clear error instead of printing 200 flags and exiting."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: --?([\w-]+)", message)
        advice = self.suggestion(unknown[1]) if unknown else ""
        if message.startswith("argument --loss_type"):
            advice = f" {POINTER}."
        raise ValueError(f"{message.rstrip('.')}.{advice}")

    def put_first(self, title: str) -> None:
        """Put the group of this title first in --help."""
        self._action_groups.sort(key=lambda group: group.title != title)

    def names(self) -> set[str]:
        return {action.dest for action in self._actions}

    def action(self, name: str) -> argparse.Action:
        return next(action for action in self._actions if action.dest == name)

    def suggestion(self, name: str) -> str:
        if methods := methods_with(_name(name)):
            return f" It is of {', '.join(methods)}, and {POINTER}."
        close = difflib.get_close_matches(name, self.names(), n=1)
        meant = f" Did you mean --{close[0]}?" if close else ""
        return f"{meant} All flags: python -m longctx.train --help"

    def given(self, arguments: list[str]) -> frozenset[str]:
        """Return the flags that are set, by parsing without defaults. The parser cannot be used afterwards."""
        for action in self._actions:
            action.default = argparse.SUPPRESS
        self._defaults.clear()
        return frozenset(vars(self.parse_args(arguments))) - {"config"}


def _today(argument: str) -> str:
    """Return `--flag` or `--flag=value` with the flag's present name, and underscores for dashes."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument[2:].partition("=")
    return f"--{_name(name)}{equals}{value}"


def _name(name: str) -> str:
    name = name.replace("-", "_")
    return OLDER_NAMES.get(name, name)


def _only_config(arguments: Sequence[str]) -> str | None:
    parser = _Parser(add_help=False)
    parser.add_argument("--config")
    return parser.parse_known_args(arguments)[0].config


_MEANINGS = {
    "use_liger_kernel": "Compute norms, activations and rotary embeddings with Liger's Triton kernels (GPUs only). The "
    "loss stays that of longctx, which is fused and exact over all ranks.",
    "liger_kernel_config": "JSON object of parts that --use_liger_kernel leaves out, such as '{\"rope\": false}'. "
    "Parts: rms_norm, rope, swiglu, geglu.",
}
"""The --help of TRL's flags that act differently here."""

_LISTS_TOO = ("fsdp", "report_to")
"""Flags with one value on the command line for which transformers also takes lists."""

_OF_SEVERAL = {
    "dataset_name": " Several data sets are --datasets.",
    "dataset_test_split": " One set is evaluated on, of several splits if they are joined: test+validation.",
    "dataset_train_split": " Splits are joined: train+validation.",
}


def _read_config(path: str, parser: _Parser) -> dict[str, Any]:
    """Return {flag: value} of a YAML file, and set the variables of its `env:` block, as TRL does."""
    try:
        content = yaml.safe_load(check_file(Path(path)).read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path} cannot be read as YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"--config {path} holds a {type(content).__name__}, expected 'flag: value' lines.")
    config = {_name(str(name)): value for name, value in content.items()}
    env = config.pop("env", {})
    if not isinstance(env, dict):
        raise ValueError(f"--config {path}: env is {env!r}, expected a block of 'VARIABLE: value' lines.")
    for name, value in config.items():
        if name not in parser.names() - {"help", "config"}:
            raise ValueError(f"--config {path} sets {name}, which is no flag.{parser.suggestion(name)}")
        if isinstance(value, list) and parser.action(name).nargs not in ("+", "*") and name not in _LISTS_TOO:
            raise ValueError(
                f"--config {path} sets {name} to {value}, and it takes one value.{_OF_SEVERAL.get(name, '')}"
            )
    if "accelerate_config" in config:
        raise ValueError(
            f"--config {path} sets accelerate_config {config['accelerate_config']}, which decides how processes start. "
            "Give it on the command line: --accelerate_config, or accelerate launch --config_file."
        )
    os.environ.update({str(name): str(value) for name, value in env.items()})
    return config


def _space_or_false(value: str) -> str | Literal[False]:
    """Return a Space's name, or False, which transformers' own parser takes for a Space's name."""
    return False if value.lower() in ("false", "no") else value


def _json_object(text: str) -> str:
    """Return the text, which the Trainer parses.

    Raises:
        argparse.ArgumentTypeError: if it is no JSON object, or holds NaN or Infinity.
    """
    try:
        is_object = isinstance(json.loads(text, parse_constant=_refuse_constant), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise argparse.ArgumentTypeError(f"{text} is no JSON object. Example: '{{\"min_lr\": 1e-6}}'")
    return text


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _is_scalar(value: Any) -> bool:
    return value is not None and not isinstance(value, list | dict)


def _text(value: Any, action: argparse.Action) -> str:
    """Return a YAML scalar as command-line text. YAML reads an unquoted `no`, which some flags take, as false."""
    if isinstance(value, bool) and action.type is not string_to_bool:
        return "yes" if value else "no"
    return str(value)
