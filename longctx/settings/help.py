"""`longctx train --help` and the answer to a mistyped flag. Neither imports TRL, which takes seconds."""

from __future__ import annotations

import argparse
import difflib
import functools
import shutil
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from longctx.settings.flag_sources import DEFAULTS, POINTER, Flag, methods_with, read_dataclass
from longctx.settings.methods import SFT, Method
from longctx.untrusted.files import check_file

_NOTE = "Without a model and a data set, a small demo runs. Defaults are in [brackets]."

SHORT_HELP: Mapping[str, Mapping[str, str]] = {
    "Model": {
        "model_name_or_path": "Hub name or local folder; tiny is built in",
        "rope_scaling": "Extend the context: yarn:4, linear:2, llama3:8",
        "use_peft": "Train a LoRA adapter instead of all weights",
        "load_in_4bit": "Load the base model in 4 bits (QLoRA)",
    },
    "Data": {
        "dataset_name": "Hub name, file, folder or glob; or stdlib",
        "max_length": "Tokens in a sequence [the model's context]",
        "packing": "Pack documents, isolated from each other",
        "overlong": "raise, truncate, drop, split long ones",
        "assistant_only_loss": "Train on the assistant's turns of chats only",
    },
    "Sequence parallelism": {
        "sp": "Devices that share each sequence, or auto [1]",
        "sp_backend": "How attention is spread over them",
        "engine": "auto, deepspeed or fsdp2",
        "accelerate_config": "Accelerate profile: name in configs/, or path",
    },
    "Training": {
        "per_device_train_batch_size": "Sequences at a time on --sp devices",
        "gradient_accumulation_steps": "Micro-batches in an optimizer step",
        "global_batch_size": "Sequences in an optimizer step, all devices",
        "learning_rate": "Peak learning rate",
        "lr_scheduler_type": "cosine, constant_with_warmup, …",
        "warmup_steps": "Warm-up steps, or their share if below 1",
        "num_train_epochs": "Passes over the data",
        "max_steps": "Optimizer steps, in place of epochs",
        "eval_strategy": "When to evaluate: no, steps or epoch",
    },
    "Memory": {
        "memory": "balanced, longest, fastest or auto",
        "gradient_checkpointing": "Recompute activations, to save memory",
        "activation_offloading": "Keep activation checkpoints in host memory",
        "sequence_chunk_size": "Run layers on this many tokens at a time",
        "offload_optimizer_device": "Optimizer states: none, cpu or nvme",
    },
    "Output": {
        "output_dir": "Folder of the run [the first free of longctx-output, longctx-output-2, ...]",
        "logging_steps": "Steps between log lines",
        "save_steps": "Steps between checkpoints",
        "resume_from_checkpoint": "A checkpoint's folder, or auto for the newest",
        "report_to": "tensorboard, trackio, wandb, …",
        "push_to_hub": "Upload the trained model",
    },
    "Before a run": {
        "dry_run": "Check the whole run, then stop",
        "explain": "Also print the reasons for what was decided",
        "prepare_only": "Tokenise and pack the data, then stop",
        "config": "Read flags from a YAML file",
        "help-all": "List every flag, with those of TRL",
    },
}
"""The flags of --help by group, each with a summary that fits on a line of 80 characters. Their defaults are added."""

NO_FIELDS = frozenset({"config", "help", "help_all"})
"""Flags that are no field of a dataclass, and cannot stand in a --config file."""

OLDER_NAMES = {"max_seq_length": "max_length", "torch_dtype": "dtype"}
"""Names that other versions of TRL and transformers give to today's flags."""


@functools.cache
def flags(method: Method = SFT) -> Mapping[str, Flag] | None:
    """Return every flag of a method by name, or None if the installed TRL's source leaves any doubt."""
    found: dict[str, Flag] = {}
    for module, name in method.arguments:
        fields = read_dataclass(module, name)
        if fields is None:
            return None
        found |= fields
    return found


def short_help(method: Method = SFT) -> str | None:
    """Return what `--help` prints, or None where only the real parser can tell."""
    known = flags(method)
    if known is None:
        return None
    groups = {
        title: {name: text for name, text in group.items() if name not in method.hidden}
        for title, group in {**({"Preferences": method.help} if method.help else {}), **SHORT_HELP}.items()
    }
    width = min(shutil.get_terminal_size().columns, 120)
    column = max(len(name) for group in groups.values() for name in group) + len("  --  ")
    note = _NOTE if method is SFT else "Defaults are in [brackets]."
    lines = [f"usage: {method.usage}", "", *textwrap.wrap(f"{method.description} {note}", width), ""]
    for title, group in groups.items():
        lines.append(f"{title}:")
        for name, summary in group.items():
            default = applied_default(name, known[name].default) if name in known else None
            has_own = summary.endswith("]") or default is None or default is False
            text = summary if has_own else f"{summary} [{default}]"
            lines += textwrap.wrap(
                text, width, initial_indent=f"  --{name}".ljust(column), subsequent_indent=" " * column
            )
    return "\n".join(lines)


def applied_default(name: str, default: Any) -> Any:
    """Return a flag's default here, where TRL's is `default`."""
    return DEFAULTS.get(name, default)


def check_names(arguments: Sequence[str], also: Iterable[str] = (), method: Method = SFT) -> None:
    """Check that every flag on the command line and in its --config file exists.

    Only what is certain is refused: what Python would take for a value passes, and so does everything where flags()
    is None.

    Args:
        also: further flags of the command.

    Raises:
        ValueError: for the first flag that does not exist, with the one that may have been meant, and for a --config
            file that cannot be read.
    """
    known = flags(method)
    if known is None:
        return
    names = {
        *NO_FIELDS,
        *also,
        *known,
        *(f"no_{flag.name}" for flag in known.values() if flag.is_switch and flag.default is True),
    }
    aliases = {alias for flag in known.values() for alias in flag.aliases}
    for argument in _flags_among(arguments):
        name = installed_name(todays_name(argument.removeprefix("--")), names)
        if name not in names and argument not in aliases:
            raise ValueError(f"{argument} is not a flag.{advice(name, {*known, *also}, method)}")
    if path := config_path(arguments):
        check_config(path, read_config(path), known, method)


def _flags_among(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the `--flag` of each argument that argparse takes for one."""
    for argument in arguments:
        if argument == "--":
            return
        if argument.startswith("--") and " " not in argument:
            yield argument.partition("=")[0]


def advice(name: str, known: Iterable[str], method: Method = SFT) -> str:
    """Return what to do about a flag that does not exist."""
    if methods := methods_with(name):
        return f" It belongs to {' and '.join(methods)}: {POINTER}."
    if name.startswith("no_") and (positive := todays_name(name[3:])) in known:
        return f" Use --{positive} False."
    close = difflib.get_close_matches(name, sorted(known), n=1)
    meant = f" Did you mean --{close[0]}?" if close else ""
    return f"{meant} All flags: longctx {method.command} --help-all"


def todays_name(name: str) -> str:
    """Return the present name of a flag, with underscores for dashes."""
    name = name.replace("-", "_")
    return OLDER_NAMES.get(name, name)


def installed_name(name: str, known: Collection[str]) -> str:
    """Return the name of a flag among those that are known: before transformers 5.23, these are older ones."""
    older = name.replace("activation_checkpointing", "gradient_checkpointing")
    return older if name not in known and older in known else name


def config_path(arguments: Sequence[str]) -> str | None:
    """Return the file that --config names."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config")
    try:
        return parser.parse_known_args(list(arguments))[0].config
    except argparse.ArgumentError as error:
        raise ValueError(f"{error}. Give the path of a YAML file.") from error


def read_config(path: str) -> dict[str, Any]:
    """Return {flag: value} of a YAML file, and its block of environment variables under `env`.

    Raises:
        ValueError: if it cannot be read, or is no mapping.
    """
    import yaml

    try:
        content = yaml.safe_load(check_file(Path(path)).read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path} cannot be read as YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"--config {path} holds a {type(content).__name__}, expected 'flag: value' lines.")
    return {todays_name(str(name)): value for name, value in content.items()}


def check_config(path: str, config: Mapping[str, Any], known: Collection[str], method: Method = SFT) -> None:
    """Check that every name of a --config file is a flag.

    Raises:
        ValueError: for the first that is not.
    """
    for name in config:
        if installed_name(name, known) not in known and name != "env":
            raise ValueError(f"--config {path} sets {name}, which is not a flag.{advice(name, known, method)}")
