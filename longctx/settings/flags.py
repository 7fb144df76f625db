"""Parse the command line: the flags of TRL and longctx, which override those of a --config file."""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import Any, Literal, NoReturn

from transformers.hf_argparser import string_to_bool
from trl import TrlParser

from longctx.attention.backends import BACKENDS
from longctx.forecast.memory_options import ALL, AUTO
from longctx.settings.flag_sources import POINTER
from longctx.settings.help import (
    NO_FIELDS,
    advice,
    applied_default,
    check_config,
    config_path,
    installed_name,
    read_config,
    todays_name,
)
from longctx.settings.methods import SFT, Method
from longctx.untrusted.files import check_path

MACHINE_FLAGS = ("machine_rank", "main_process_ip", "main_process_port")
"""Flags that --accelerate_config passes on to `accelerate launch`."""


@dataclass
class SequenceArguments:
    """The flags that longctx adds to TRL's."""

    _argument_group_name = "longctx"

    sp: str | None = field(
        default=None,
        metadata={
            "help": "Number of devices that share each sequence; auto takes the predicted fastest, and all spreads "
            "several sequences over all devices. Default: 1."
        },
    )
    sp_backend: str = field(
        default="auto",
        metadata={"help": "How attention is spread over these devices; auto chooses, and the run prints why."},
    )
    cp: int | None = field(default=None, metadata={"help": "Short for --sp N --sp_backend ring."})
    ring_size: int | None = field(
        default=None, metadata={"help": "Number of ring ranks with --sp_backend hybrid; the other degree is Ulysses."}
    )
    measure_links: bool = field(
        default=False,
        metadata={"help": "Let auto measure how fast the processes exchange data, instead of reading a table."},
    )
    dp_replicate: int | None = field(
        default=None, metadata={"help": "Number of copies of the sharded model (HSDP). Default: 1."}
    )
    engine: Literal["auto", "deepspeed", "fsdp2"] = field(
        default="auto",
        metadata={"help": "Training engine; auto takes DeepSpeed ZeRO-3 for Ulysses and FSDP2 otherwise."},
    )
    num_processes: int | None = field(
        default=None,
        metadata={"help": "Number of processes to start if no launcher does. Default: sp × dp_replicate."},
    )
    accelerate_config: str | None = field(
        default=None, metadata={"help": "Accelerate profile: a name from configs/, or a path to a YAML file."}
    )
    dataset_weights: list[float] | None = field(
        default=None,
        metadata={"help": "Weight of each of --datasets: how often the next document comes from it."},
    )
    dataset_stopping_strategy: Literal["first_exhausted", "all_exhausted", "all_exhausted_without_replacement"] = field(
        default="first_exhausted",
        metadata={"help": "When --dataset_weights stops drawing, as in datasets.interleave_datasets."},
    )
    machine_rank: int | None = field(
        default=None,
        metadata={"help": "With --accelerate_config on several machines: the number of this machine, from 0."},
    )
    main_process_ip: str | None = field(
        default=None, metadata={"help": "With --accelerate_config on several machines: the address of machine 0."}
    )
    main_process_port: int | None = field(
        default=None, metadata={"help": "With --accelerate_config on several machines: a free port on machine 0."}
    )
    overlong: Literal["raise", "truncate", "drop", "split"] = field(
        default="raise",
        metadata={"help": "What to do with a document longer than --max_length: raise, truncate, drop or split."},
    )
    overwrite_output_dir: bool = field(
        default=False,
        metadata={"help": "Delete the earlier run in output_dir, which is refused otherwise. Other files there stay."},
    )
    rope_scaling: str | None = field(
        default=None,
        metadata={"help": "Extend the model's context: yarn:4, linear:2, llama3:8, or RoPE parameters as JSON."},
    )
    balance_packs: bool = field(
        default=True,
        metadata={"help": "Give the data-parallel ranks packs of similar attention cost in each step."},
    )
    global_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Number of sequences in an optimizer step, on all devices; sets --gradient_accumulation_steps."
        },
    )
    memory: Literal["balanced", "longest", "fastest", "auto"] = field(
        default="balanced",
        metadata={
            "help": "Preset of memory options (docs/howto/length.md): balanced, longest, fastest, or auto, which takes "
            "the predicted fastest options that fit."
        },
    )
    tiled_mlp: bool | None = field(default=None, metadata={"help": "Run each MLP on a few tokens at a time."})
    tiled_mlp_num_shards: int | None = field(
        default=None,
        metadata={"help": "Number of tiles with --tiled_mlp. Default: as many as suit the model's width."},
    )
    heads_k_stride: int | None = field(
        default=None,
        metadata={"help": "Number of key/value heads that are exchanged and attended to at a time. Default: all."},
    )
    overlap_exchange: bool | None = field(
        default=None,
        metadata={
            "help": "Exchange some heads while others are attended to (ulysses, hybrid). Default: where that is "
            "predicted to be faster."
        },
    )
    sequence_chunk_size: int | None = field(
        default=None,
        metadata={"help": "Run the layers on this many tokens at a time; the others wait in host memory."},
    )
    offload_optimizer_device: Literal["none", "cpu", "nvme"] = field(
        default="none", metadata={"help": "Where DeepSpeed keeps the optimizer states: none (on the GPU), cpu or nvme."}
    )
    offload_param_device: Literal["none", "cpu", "nvme"] = field(
        default="none",
        metadata={"help": "Where ZeRO-3 keeps parameters, or FSDP2 (cpu) parameters and optimizer states."},
    )
    offload_optimizer_nvme_path: str | None = field(
        default=None, metadata={"help": "Folder for --offload_optimizer_device nvme."}
    )
    offload_param_nvme_path: str | None = field(
        default=None, metadata={"help": "Folder for --offload_param_device nvme."}
    )
    communication_data_type: Literal["auto", "fp32", "bf16"] = field(
        default="auto",
        metadata={
            "help": "Data type in which gradients are reduced; auto is fp32 on FSDP2, and "
            "DeepSpeed's own default on DeepSpeed."
        },
    )
    on_nonfinite: Literal["stop", "skip"] = field(
        default="stop",
        metadata={"help": "When a step's gradient is NaN or infinite, stop the run or skip the step."},
    )
    early_stopping_patience: int | None = field(
        default=None,
        metadata={"help": "Stop after this many evaluations in a row without a better --metric_for_best_model."},
    )
    early_stopping_threshold: float = field(
        default=0.0, metadata={"help": "Smallest improvement of the metric that counts."}
    )
    profile: bool = field(
        default=False,
        metadata={"help": "Write a profiler trace of a few steps, one for each rank, to output_dir/profile."},
    )
    profile_steps: int = field(
        default=3, metadata={"help": "Number of steps that --profile traces, from the third step of the run on."}
    )
    prepare_only: bool = field(default=False, metadata={"help": "Tokenise the data and plan the packs, then stop."})
    dry_run: bool = field(
        default=False,
        metadata={"help": "Check data, model files and disk, print the resolved run, then stop."},
    )
    explain: bool = field(default=False, metadata={"help": "Also print the reasons for what was decided."})


@dataclass(frozen=True)
class Flags:
    """Every flag's value, and which of them the user set."""

    values: Mapping[str, Any]
    explicit: frozenset[str]
    """Names given on the command line or in the --config file."""
    arguments: tuple[str, ...]
    """The command line, to start further processes with."""
    method: Method = SFT

    def __getattr__(self, name: str) -> Any:
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(name) from None

    def of(self, arguments_type: type) -> dict[str, Any]:
        """Return the values of one dataclass's fields."""
        return {f.name: self.values[f.name] for f in fields(arguments_type) if f.init and f.name in self.values}


_PATHS = (
    "accelerate_config",
    "chat_template_path",
    "dataset_name",
    "model_name_or_path",
    "output_dir",
    "resume_from_checkpoint",
)


def parse_flags(arguments: Sequence[str], method: Method = SFT) -> Flags:
    """Read the command line and its YAML file. No TRL dataclass is built: SFTConfig would start a process group.

    Raises:
        ValueError: for an unknown or malformed flag, and for a --config file that cannot be read.
        SystemExit: after --help-all.
    """
    parser = _parser(tuple(BACKENDS.spread), method)
    given = [_today(argument, parser.names()) for argument in arguments]
    path = config_path(given)
    from_file = _read_config(path, parser) if path else {}
    # Scalars are parsed like the command line, which checks their types and choices; `--flag=value` cannot express
    # null, lists and mappings.
    given = [
        f"--{name}={_text(value, parser.action(name))}" for name, value in from_file.items() if _is_scalar(value)
    ] + given
    values = parser.defaults()
    values |= {name: value for name, value in from_file.items() if not _is_scalar(value)}
    set_here = parser.given(given)
    values |= set_here
    values.pop("config")
    for name in _PATHS:
        check_path(name, values[name])
    return Flags(
        values=values,
        explicit=frozenset(from_file) | (set_here.keys() - {"config"}),
        arguments=tuple(arguments),
        method=method,
    )


@functools.cache
def _parser(backends: tuple[str, ...], method: Method) -> _Parser:
    """Return the parser of all flags of a method. Parsing leaves it as it is."""
    parser = _Parser(
        [getattr(import_module(module), name) for module, name in method.arguments],
        usage=method.usage,
        formatter_class=_HelpFormatter,
        description=f"{method.description} Dashes may stand for underscores, and --no_FLAG for --FLAG False where "
        "TRL's default is True.",
        add_help=False,
    )
    parser.method = method
    parser.add_argument("-h", "--help", action="help", help="List the flags that most runs use.")
    parser.add_argument("--help_all", action="help", help="List every flag.")
    parser.add_argument("--config", metavar="FILE", help="YAML file of flags; the command line overrides it.")
    parser.put_first(SequenceArguments._argument_group_name)
    parser.action("sp_backend").choices = ("auto", *backends)
    parser.action("sp").type = _degree
    parser.action("trackio_static_space_id").type = _space_or_false
    parser.action("lr_scheduler_kwargs").type = _json_object
    parser.action("liger_kernel_config").type = str  # read by longctx.layers.liger
    for name, meaning in MEANINGS.items():
        parser.action(name).help = meaning
    parser.hide_negations()
    return parser


class _HelpFormatter(argparse.HelpFormatter):
    """Help that lists every flag once, with the default that applies here unless that is None."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = copy.copy(action)
        shown.option_strings = [option for option in action.option_strings if "-" not in option.lstrip("-")]
        return super()._format_action_invocation(shown)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        default = applied_default(action.dest, action.default)
        if default in (None, argparse.SUPPRESS, "") or default == []:
            return text
        return f"{text.rstrip('.')}. Default: {getattr(default, 'value', default)}.".replace("%%", "%").replace(
            "%", "%%"
        )


class _Parser(TrlParser):
    """A parser that raises one clear error instead of printing 200 flags and exiting."""

    method = SFT

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: --?([\w-]+)", message)
        advised = advice(unknown[1], self.names(), self.method) if unknown else ""
        if message.startswith("argument --loss_type"):
            advised = f" {POINTER}."
        raise ValueError(f"{message.rstrip('.')}.{advised}")

    def put_first(self, title: str) -> None:
        """Put the group of this title first in --help_all, and one of TRL's flags last."""
        self._optionals.title = "TRL and transformers"
        self._action_groups.sort(key=lambda group: group.title != title)

    def hide_negations(self) -> None:
        """Leave the --no_FLAG forms out of --help_all."""
        for action in self._actions:
            if action.const is False:
                action.help = argparse.SUPPRESS

    def names(self) -> set[str]:
        return {action.dest for action in self._actions}

    def action(self, name: str) -> argparse.Action:
        return next(action for action in self._actions if action.dest == name)

    def defaults(self) -> dict[str, Any]:
        """Return the value of every flag that is not set."""
        return copy.deepcopy(vars(self.parse_args([])))

    def given(self, arguments: list[str]) -> dict[str, Any]:
        """Return the flags that are set, with their values."""
        unset = object()
        values = vars(self.parse_args(arguments, argparse.Namespace(**dict.fromkeys(self.names(), unset))))
        return {name: value for name, value in values.items() if value is not unset}


def _today(argument: str, names: Set[str]) -> str:
    """Return `--flag` or `--flag=value` with the flag's name among `names`, and underscores for dashes."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument[2:].partition("=")
    return f"--{installed_name(todays_name(name), names)}{equals}{value}"


MEANINGS = {
    "dataset_name": "Hub name, local file, folder or glob of the data set. stdlib, the sources of Python's standard "
    "library, is built in.",
    "liger_kernel_config": "JSON object of parts that --use_liger_kernel leaves out, such as '{\"rope\": false}'. "
    "Parts: rms_norm, rope, swiglu, geglu.",
    "max_length": "Number of tokens in a sequence, counted over all devices that share it; with packing, the length of "
    "a pack. Default: the model's context length.",
    "model_name_or_path": "Hub name or local folder of the model. tiny, a small one with random weights, is built in.",
    "output_dir": "Folder for checkpoints and the trained model. Default: the first free name of longctx-output, "
    "longctx-output-2 and so on.",
    "packing": "Pack documents into full sequences, in which they stay isolated from each other.",
    "per_device_train_batch_size": "Number of sequences that each group of --sp devices trains on at a time.",
    "resume_from_checkpoint": "Folder of the checkpoint to resume from, or auto: the newest in output_dir, and the "
    "beginning if there is none.",
    "use_liger_kernel": "Compute norms, activations and rotary embeddings with Liger's Triton kernels (GPUs only). The "
    "loss stays that of longctx, which is fused and exact over all ranks.",
}
"""What those of TRL's flags do that act differently here."""

_LISTS_TOO = ("fsdp", "report_to")
"""Flags with one value on the command line for which transformers also takes lists."""

_OF_SEVERAL = {
    "dataset_name": " Several data sets are --datasets.",
    "dataset_test_split": " One set is evaluated on, of several splits if they are joined: test+validation.",
    "dataset_train_split": " Splits are joined: train+validation.",
}


def _read_config(path: str, parser: _Parser) -> dict[str, Any]:
    """Return {flag: value} of a YAML file, and set the variables of its `env:` block, as TRL does."""
    config = {installed_name(name, parser.names()): value for name, value in read_config(path).items()}
    env = config.pop("env", {})
    if not isinstance(env, dict):
        raise ValueError(f"--config {path}: env is {env!r}, expected a block of 'VARIABLE: value' lines.")
    check_config(path, config, parser.names() - NO_FIELDS, parser.method)
    for name, value in config.items():
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


def _degree(text: str) -> int | str:
    """Return --sp as a number, auto or all."""
    try:
        return text if text in (AUTO, ALL) else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a number, {AUTO} or {ALL}") from None


def _space_or_false(value: str) -> str | Literal[False]:
    """Return a Space's name, or False, which transformers' own parser takes for a Space's name."""
    return False if value.lower() in ("false", "no") else value


def _json_object(text: str) -> str:
    """Return the text, which the Trainer parses.

    Raises:
        argparse.ArgumentTypeError: if it is not a JSON object, or holds NaN or Infinity.
    """
    try:
        is_object = isinstance(json.loads(text, parse_constant=_refuse_constant), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise argparse.ArgumentTypeError(f"{text} is not a JSON object. Example: '{{\"min_lr\": 1e-6}}'")
    return text


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _is_scalar(value: Any) -> bool:
    return value is not None and not isinstance(value, list | dict)


def _text(value: Any, action: argparse.Action) -> str:
    """Return a YAML scalar as command-line text. YAML reads an unquoted `no`, which some flags take, as false."""
    if isinstance(value, bool) and action.type is not string_to_bool:
        return "yes" if value else "no"
    return str(value)
