"""The values of all flags while a run is resolved. They are immutable: each stage returns new ones.

The checks of single values are here too: the range of every number, and that flags agree with the launcher's profile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from longctx.forecast.memory_options import ALL, AUTO
from longctx.model.load import is_template_file
from longctx.settings.checks import check
from longctx.settings.flag_sources import ADAPTER_DEFAULTS, DEFAULTS, DEMO
from longctx.settings.flags import MACHINE_FLAGS, Flags
from longctx.settings.preference import for_pairs
from longctx.settings.profile import DEEPSPEED_FLAGS, LaunchProfile, default_config_file
from longctx.settings.trl_flags import check_supported
from longctx.training.callbacks import STEPS_BEFORE_PROFILE
from longctx.training.schedule import check_length

TRL_EVAL_STEPS = 10
"""Steps between evaluations where no flag says: SFTConfig's logging_steps."""

KERNEL_NAMES = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
"""Accepted names, besides hub kernels. longctx chooses and prints its own kernel, which keeps packed documents apart
as any of these would."""


@dataclass(frozen=True, kw_only=True)
class Values(Mapping[str, Any]):
    """Every flag's value at one stage, and notes for users on how values were set."""

    flags: Flags
    """The flags as given."""
    of: Mapping[str, Any]
    """Values by flag."""
    filled: frozenset[str]
    """Unset flags that the demo preset or longctx's defaults filled in."""
    is_demo: bool
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.of[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.of)

    def __len__(self) -> int:
        return len(self.of)

    def is_given(self, name: str) -> bool:
        """Return whether the user set the flag, on the command line or in --config."""
        return name in self.flags.explicit

    def set(self, **values: Any) -> Values:
        """Return a copy with these values changed."""
        return replace(self, of=MappingProxyType({**self.of, **values}))

    def given(self, **values: Any) -> Values:
        """Return a copy with these flags as if the user had set them."""
        flags = replace(
            self.flags, values={**self.flags.values, **values}, explicit=self.flags.explicit | values.keys()
        )
        return replace(self.set(**values), flags=flags)

    def note(self, *notes: str) -> Values:
        """Return a copy with these notes, printed at the start of the run."""
        return replace(self, notes=(*self.notes, *notes))


def read_values(flags: Flags) -> Values:
    """Fill in the demo preset or longctx's defaults, and check each flag by itself.

    Raises:
        ValueError: for the first flag that cannot be carried out exactly.
    """
    _check_machine_flags(flags)
    values = _filled(flags)
    check_numbers(values)
    values = values.note(*check_supported(flags, values))
    if values["early_stopping_patience"] is not None and values["metric_for_best_model"] is None:
        values = values.set(metric_for_best_model="loss")
    _check_degrees(values)
    _check_max_length(values)
    check_length(values["max_steps"], values["num_train_epochs"])
    _check_profile_steps(values)
    _check_chat_template(values)
    _check_kernel(values)
    return values.set(**for_pairs(values)) if flags.method.reads_pairs else values


@check("model_name_or_path", "dataset_name", "datasets")
def _filled(flags: Flags) -> Values:
    """Check that model and data set are both named, or neither for the demo."""
    named = {name for name in ("model_name_or_path", "dataset_name") if flags.values[name] is not None}
    named |= {"dataset_name"} if flags.datasets else set()
    if flags.method.reads_pairs and len(named) < 2:
        missing = "model_name_or_path" if "model_name_or_path" not in named else "dataset_name"
        raise ValueError(
            f"--{missing} is missing. longctx dpo needs a model (--model_name_or_path; tiny is built in) and pairs of "
            "answers (--dataset_name)."
        )
    if len(named) == 1:
        missing, example = (
            ("--dataset_name", "stdlib") if "model_name_or_path" in named else ("--model_name_or_path", "tiny")
        )
        raise ValueError(
            f"{missing} is missing. Give both a model and a data set ({missing} {example} is built in), "
            "or neither for the demo preset."
        )
    preset = (DEFAULTS if named else DEMO) | (ADAPTER_DEFAULTS if flags.use_peft else {})
    if flags.eval_strategy != "no":
        preset = preset | {"per_device_eval_batch_size": 1}
    if flags.eval_strategy == "steps" and "logging_steps" not in flags.explicit:  # from which eval_steps is taken
        preset = preset | {"eval_steps": TRL_EVAL_STEPS}
    filled = {name: value for name, value in preset.items() if name not in flags.explicit}
    of = MappingProxyType({**flags.values, **filled})
    return Values(flags=flags, of=of, filled=frozenset(filled), is_demo=not named)


@check(*MACHINE_FLAGS, "accelerate_config")
def _check_machine_flags(flags: Flags) -> None:
    """Check that flags for several machines come with --accelerate_config, which consumes them."""
    for name in MACHINE_FLAGS:
        if flags.values[name] is not None:
            raise ValueError(
                f"--{name} {flags.values[name]} only takes effect with --accelerate_config. Without that, pass it to "
                f"the launcher, before -m longctx.train; srun does not need it."
            )


@check("sp", "cp")
def _check_degrees(values: Values) -> None:
    """Check that at least one device shares a sequence."""
    for name in ("sp", "cp"):
        if values[name] not in (None, AUTO, ALL) and values[name] < 1:
            raise ValueError(f"--{name} {values[name]}: at least 1 device has to share a sequence. Use 1 or more.")


@check("max_length")
def _check_max_length(values: Values) -> None:
    """Check that a row has a token to predict."""
    if values["max_length"] is not None and values["max_length"] < 2:
        raise ValueError(
            f"--max_length {values['max_length']} is below 2: a token needs one to predict. Use at least 2."
        )


@check("profile", "profile_steps", "max_steps")
def _check_profile_steps(values: Values) -> None:
    """Check that the run has the steps to be traced."""
    if values["profile_steps"] < 1:
        raise ValueError(
            f"--profile_steps {values['profile_steps']} is below 1: there would be nothing to trace. Use at least 1."
        )
    if values["profile"] and 0 < values["max_steps"] <= STEPS_BEFORE_PROFILE:
        raise ValueError(
            f"--profile True starts to trace after the first {STEPS_BEFORE_PROFILE}, and --max_steps "
            f"{values['max_steps']} ends before. "
            f"Use --max_steps {STEPS_BEFORE_PROFILE + values['profile_steps']} or more."
        )


@check("chat_template_path")
def _check_chat_template(values: Values) -> None:
    """Check that the file of a chat template exists."""
    path = values["chat_template_path"]
    if path and is_template_file(path) and not Path(path).is_file():
        raise ValueError(
            f"--chat_template_path {path} is not a file. Name a .jinja file, or a tokenizer's folder or name on the "
            f"hub."
        )


@check("attn_implementation")
def _check_kernel(values: Values) -> None:
    """Check that transformers knows the name of the attention kernel."""
    kernel = values["attn_implementation"]
    if kernel is not None and kernel not in KERNEL_NAMES and "/" not in kernel:
        raise ValueError(f"--attn_implementation {kernel} is unknown. Use one of {', '.join(KERNEL_NAMES)}.")


@check("logging_strategy", "logging_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "ddp_timeout")
def check_counts(values: Values) -> None:
    """Check that counts, including those of a profile, are at least 1."""
    if values["logging_strategy"] == "steps" and values["logging_steps"] == 0:
        raise ValueError("--logging_steps 0 logs nothing. Use at least 1, or --logging_strategy no.")
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "ddp_timeout"):
        if values[name] < 1:
            raise ValueError(f"--{name} {values[name]} is below 1. Use at least 1.")


def profile_name() -> str:
    """Return the profile's name for messages, with the default config file if there is one."""
    left_behind = default_config_file()
    if left_behind is not None:
        return f"accelerate's config (--config_file, or {left_behind} where none was given)"
    return "accelerate's config"


@check("distributed_type", "parallelism_config_tp_size", "mixed_precision")
def check_profile(profile: LaunchProfile) -> None:
    """Check that longctx supports what the profile asks for."""
    if profile.unsupported:
        raise ValueError(
            f"distributed_type {profile.unsupported} in {profile_name()} is not supported. "
            "Use a profile of configs/, such as --config_file configs/fsdp2.yaml."
        )
    if profile.tp > 1:
        raise ValueError(
            f"parallelism_config_tp_size {profile.tp} in {profile_name()}: longctx does not support tensor "
            "parallelism. Set it to 1: --sp spreads the sequence and FSDP2 or ZeRO-3 the weights (torchtitan or "
            "Megatron-LM have tensor parallelism)."
        )
    if profile.mixed_precision in ("fp16", "fp8"):
        raise ValueError(
            f"mixed_precision {profile.mixed_precision} in {profile_name()} is not verified against the reference yet. "
            "Use bf16, or leave the key out and set --bf16."
        )


@check(
    "dp_replicate",
    "gradient_accumulation_steps",
    "max_grad_norm",
    "per_device_train_batch_size",
    *DEEPSPEED_FLAGS,
    "offload_optimizer_device",
    "offload_param_device",
    "communication_data_type",
)
def agree(flags: Flags, name: str, from_profile: Any, key: str) -> Any:
    """Check that a flag and the profile's key do not contradict each other.

    Returns:
        The value that is set, or None.
    """
    given = flags.values[name] if name in flags.explicit else None
    if given is not None and from_profile is not None and given != from_profile:
        raise ValueError(
            f"--{name} {given} contradicts {profile_name()}, which sets {key} {from_profile}. "
            "Change one of them, or set the key to auto."
        )
    return given if given is not None else from_profile


def take_profile(values: Values, profile: LaunchProfile) -> Values:
    """Take the values that a profile may set instead of a flag; with `auto`, the flag decides."""
    sources = (
        ("gradient_accumulation_steps", profile.gradient_accumulation_steps, "gradient_accumulation_steps"),
        ("max_grad_norm", profile.gradient_clipping, "gradient_clipping"),
        ("per_device_train_batch_size", profile.micro_batch_size, "train_micro_batch_size_per_gpu"),
        *((name, profile.deepspeed_values.get(name), key) for name, key in DEEPSPEED_FLAGS.items()),
    )
    for name, value, key in sources:
        agreed = agree(values.flags, name, value, key)
        if agreed is not None and agreed != values[name]:
            values = values.set(**{name: agreed}).note(f"{name} {agreed} is the profile's {key}")
    return values


@dataclass(frozen=True, kw_only=True)
class _Range:
    """Numbers of at least 0, up to a limit."""

    most: float = math.inf
    below: float = math.inf
    remedy: str = ""

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | float) and 0 <= value <= self.most and value < self.below

    def __str__(self) -> str:
        if self.most < math.inf:
            return f"from 0 to {self.most:,}"
        return "of at least 0" + (f" and below {self.below:g}" if self.below < math.inf else "")


_FP32 = _Range(below=3.4e38)
"""The range of fp32: torch converts these numbers to the dtype of the weights."""
_SEED = _Range(most=2**32 - 1)
"""Seeds that NumPy's generators take."""

_RANGES: Mapping[str, _Range] = {
    "adam_beta1": _Range(below=1),
    "adam_beta2": _Range(below=1),
    "adam_epsilon": _FP32,
    "early_stopping_threshold": _Range(remedy="It is an improvement in the metric's unit"),
    "data_seed": _SEED,
    "dataloader_num_workers": _Range(),
    "eval_delay": _Range(),
    "label_smoothing_factor": _Range(most=1),
    "learning_rate": _FP32,
    "logging_steps": _Range(),
    "max_grad_norm": _Range(remedy="Use 0 for no clipping"),
    "num_train_epochs": _Range(),
    "router_aux_loss_coef": _FP32,
    "save_steps": _Range(),
    "seed": _SEED,
    "warmup_steps": _Range(),
    "weight_decay": _FP32,
}
"""Limits by flag. Flags that no entry names may have any finite value."""


@check(*_RANGES)
def check_numbers(settings: Mapping[str, Any]) -> None:
    """Check that every number is finite, and in its range.

    Raises:
        ValueError: with the flag, its value, and the range.
    """
    for name, value in settings.items():
        for number in _floats(value):
            if not math.isfinite(number):
                raise _out_of_range(name, value, _RANGES.get(name, ""))
        if name in _RANGES and value is not None and value not in _RANGES[name]:
            raise _out_of_range(name, value, _RANGES[name])


def _floats(value: Any) -> Iterator[float]:
    """Yield the floating-point numbers of a setting, also those in lists and mappings."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _floats(item)
    elif isinstance(value, Mapping):
        yield from _floats(list(value.values()))


def _out_of_range(name: str, value: Any, expected: _Range | str) -> ValueError:
    remedy = f" {expected.remedy}." if isinstance(expected, _Range) and expected.remedy else ""
    return ValueError(f"--{name} {value} is out of range: expected a finite number {expected}".rstrip() + f".{remedy}")
