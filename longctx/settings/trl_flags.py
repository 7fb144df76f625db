"""An allow-list of TRL's flags by their effect here, so that none is accepted and then silently ignored.

Each flag is in one table. A flag in no table, such as one of a newer TRL, is refused when it is set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations

from longctx.settings import preference
from longctx.settings.checks import check
from longctx.settings.flags import Flags, SequenceArguments

_ACTING_GROUPS = {
    "model and data": (
        "model_name_or_path model_revision trust_remote_code model_init_kwargs attn_implementation dataset_name "
        "dataset_config dataset_streaming dataset_train_split dataset_text_field dataset_num_proc chat_template_path "
        "datasets streaming test_split_size eos_token pad_token max_length shuffle_dataset packing packing_strategy "
        "padding_free pad_to_multiple_of completion_only_loss assistant_only_loss label_smoothing_factor use_peft "
        "load_in_4bit"
    ),
    "evaluation": "eval_on_start eval_strategy load_best_model_at_end",
    "batches": (
        "per_device_train_batch_size gradient_accumulation_steps dataloader_drop_last dataloader_num_workers "
        "dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context seed data_seed"
    ),
    "optimization": (
        "num_train_epochs max_steps learning_rate lr_scheduler_kwargs warmup_steps weight_decay adam_beta1 "
        "adam_beta2 adam_epsilon max_grad_norm router_aux_loss_coef full_determinism"
    ),
    "memory and precision": (
        "bf16 tf32 use_cpu gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing "
        "activation_checkpointing_kwargs activation_offloading torch_empty_cache_steps ddp_timeout use_liger_kernel "
        "torch_compile"
    ),
    "logs and checkpoints": (
        "output_dir logging_strategy logging_steps logging_first_step logging_nan_inf_filter log_on_each_node "
        "log_level log_level_replica disable_tqdm skip_memory_metrics report_to run_name project trackio_space_id "
        "trackio_bucket_id trackio_static_space_id save_steps save_total_limit save_only_model save_on_each_node "
        "resume_from_checkpoint push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push "
        "hub_revision"
    ),
}
ACTS = frozenset(name for names in _ACTING_GROUPS.values() for name in names.split())
"""TRL's flags that mean the same here as on one device, whatever their value."""

NOT_BUILT: Mapping[str, tuple[Any, ...]] = {
    "accelerator_config": (None,),
    "auto_find_batch_size": (False,),
    "average_tokens_across_devices": (True,),
    "bf16_full_eval": (False,),
    "dataloader_in_order": (True,),
    "dataset_kwargs": (None,),
    "ddp_backend": (None,),
    "debug": (None, "", []),
    "do_predict": (False,),
    "dtype": ("float32", "bfloat16", "auto"),
    "enable_jit_checkpoint": (False,),
    "fp16": (False,),
    "fp16_full_eval": (False,),
    "ignore_bias_buffers": (False,),
    "ignore_data_skip": (False,),
    "include_num_input_tokens_seen": ("no", False),
    "label_names": (None,),
    "load_in_8bit": (False,),
    "loss_type": ("nll", "chunked_nll"),
    "lr_scheduler_type": (
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "warmup_stable_decay",
    ),
    "neftune_noise_alpha": (None,),
    "optim": ("adamw_torch_fused", "adamw_torch", "sgd", "rmsprop"),
    "optim_args": (None,),
    "optim_target_modules": (None,),
    "save_strategy": ("steps", "epoch", "no"),
    "train_sampling_strategy": ("random", "sequential"),
    "truncation_mode": ("keep_start",),
    "use_cache": (False,),
}
"""Flags of which only these values are implemented exactly; any other value is refused.

Optimizers must treat each weight by itself, since a shard lacks the rest of a matrix. (Adagrad does, but its state does
not survive ZeRO-3's regrouping: DeepSpeed 0.19.8 raises an IndexError.) Schedules must depend on the step alone.
Float16 weights need a scaled loss.
"""

REASONS: Mapping[str, str] = {
    "dtype": "float16 gradients underflow without a scaled loss, which is not supported",
    "fp16": (
        "float16 needs a scaled loss and skips the steps that overflow, which is not compared with one device. "
        "Use --bf16 True, or leave both out for fp32"
    ),
    "load_in_8bit": (
        "LLM.int8 rounds activations too, all but the columns where any token of the batch is large, and a rank sees "
        "some tokens only. Use --load_in_4bit True, or leave it out"
    ),
    "neftune_noise_alpha": "ranks would draw other noise than one device. Leave it out",
    "ignore_data_skip": "a resumed run would train on data again that it has seen. Leave it out",
}
"""Reasons and remedies for those flags of NOT_BUILT that need more than a list of values."""

GIVEN_ELSEWHERE = {
    "deepspeed": "choose the engine with --engine deepspeed or a DeepSpeed profile (--config_file configs/zero3.yaml)",
    "fsdp": "choose the engine with --engine fsdp2 or an FSDP profile (--config_file configs/fsdp2.yaml)",
    "fsdp_config": "set FSDP's options in an FSDP profile (--config_file configs/fsdp2.yaml)",
    "parallelism_config": "set the degrees with --sp and --dp_replicate",
}
"""TRL's flags that would also switch on stock sharding, and what to use instead."""

_EVALUATES = ("steps", "epoch")
ACTS_WITH: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "dataset_test_split": ("eval_strategy", _EVALUATES),
    "eval_delay": ("eval_strategy", _EVALUATES),
    "eval_packing": ("eval_strategy", _EVALUATES),
    "eval_steps": ("eval_strategy", ("steps",)),
    "greater_is_better": ("eval_strategy", _EVALUATES),
    "metric_for_best_model": ("eval_strategy", _EVALUATES),
    "per_device_eval_batch_size": ("eval_strategy", _EVALUATES),
    "liger_kernel_config": ("use_liger_kernel", (True,)),
    "torch_compile_backend": ("torch_compile", (True,)),
    "torch_compile_mode": ("torch_compile", (True,)),
    "lora_alpha": ("use_peft", (True,)),
    "lora_dropout": ("use_peft", (True,)),
    "lora_modules_to_save": ("use_peft", (True,)),
    "lora_r": ("use_peft", (True,)),
    "lora_target_modules": ("use_peft", (True,)),
    "lora_target_parameters": ("use_peft", (True,)),
    "lora_task_type": ("use_peft", (True,)),
    "bnb_4bit_quant_storage": ("load_in_4bit", (True,)),
    "bnb_4bit_quant_type": ("load_in_4bit", (True,)),
    "use_bnb_nested_quant": ("load_in_4bit", (True,)),
    "use_dora": ("use_peft", (True,)),
    "use_rslora": ("use_peft", (True,)),
}
"""Flags that have an effect only with these values of another flag."""

METRICS = ("loss", "mean_token_accuracy", "entropy")
"""Metrics of an evaluation that can choose the best model."""

_IDLE_GROUPS = {
    "since evaluation keeps sums over tokens, and no flag names a compute_metrics": (
        "batch_eval_metrics eval_accumulation_steps eval_do_concat_batches eval_use_gather_object "
        "include_for_metrics prediction_loss_only"
    ),
    "since --eval_strategy says when to evaluate": "do_eval",
    "without --train_sampling_strategy group_by_length": "length_column_name",
    "without DDP: FSDP2 or ZeRO average the gradients": (
        "ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph"
    ),
    "since batches are cut on the CPU and only a part of each goes to the device": "dataloader_pin_memory",
    "since a resumed run always goes on with its callbacks as they were": "restore_callback_states_from_checkpoint",
    "since rows hold tokens and labels only": "remove_unused_columns",
    "since this command trains": "do_train",
    "since the launcher sets the rank": "local_rank",
}
IDLE = {name: why for why, names in _IDLE_GROUPS.items() for name in names.split()}
"""Flags without effect, and why: most belong to a switch that is off, as in TRL. Setting one adds a note."""


@check(*NOT_BUILT, *GIVEN_ELSEWHERE)
def check_supported(flags: Flags, settings: Mapping[str, Any]) -> list[str]:
    """Check that every TRL flag has an exact meaning here; return a note for each without effect.

    Raises:
        ValueError: with the flag, its value, and the values that are built.
    """
    for name, remedy in GIVEN_ELSEWHERE.items():
        if settings.get(name):
            raise ValueError(f"--{name} {settings[name]} would shard a second time: {remedy}.")
    of_pairs = flags.method.reads_pairs
    not_built = {**NOT_BUILT, **preference.NOT_BUILT, "loss_type": ()} if of_pairs else NOT_BUILT
    for name, allowed in not_built.items():
        value = settings.get(name, allowed[0] if allowed else None)
        if allowed and getattr(value, "value", value) not in allowed:
            raise ValueError(f"--{name} {value} is refused: {_reason(name, allowed, of_pairs)}.")
    _check_evaluation(settings, METRICS + preference.METRICS if of_pairs else METRICS)
    _check_report_to(settings["report_to"])
    ours = {field.name for field in fields(SequenceArguments)} | (preference.OWN if of_pairs else set())
    known = {*NOT_BUILT, *GIVEN_ELSEWHERE, *IDLE, *ACTS_WITH}
    for name in sorted(flags.explicit - ours - ACTS - known):
        raise ValueError(
            f"--{name} {settings[name]} is refused: it is newer than the releases of TRL and transformers that longctx "
            "was compared with. Leave it out."
        )
    idle = IDLE | {
        name: f"without --{switch}" if values == (True,) else f"without --{switch} {' or '.join(values)}"
        for name, (switch, values) in ACTS_WITH.items()
        if settings[switch] not in values
    }
    notes = [f"--{name} has no effect {idle[name]}" for name in sorted(flags.explicit & idle.keys())]
    if of_pairs:
        notes += preference.check_losses(settings)
    return notes + _early_stopping_notes(flags, settings)


def _early_stopping_notes(flags: Flags, settings: Mapping[str, Any]) -> list[str]:
    if settings["early_stopping_patience"] is not None and not settings["load_best_model_at_end"]:
        return ["early stopping: the model of the last step is saved; --load_best_model_at_end True saves the best"]
    if settings["early_stopping_patience"] is None and "early_stopping_threshold" in flags.explicit:
        return ["--early_stopping_threshold has no effect without --early_stopping_patience"]
    return []


def _reason(name: str, allowed: tuple[Any, ...], of_pairs: bool) -> str:
    """Return why the flag's other values are refused, and the remedy."""
    reasons = {**REASONS, **preference.REASONS} if of_pairs else REASONS
    reason = reasons.get(name, "it has not been compared with one device under sequence parallelism")
    if choices := " or ".join(str(choice) for choice in allowed if choice not in (None, "", [], False)):
        return f"{reason}. Use {choices}"
    return reason if name in reasons else f"{reason}. Leave it out"


@check("report_to")
def _check_report_to(names: str | list[str] | None) -> None:
    """Check that transformers has these integrations, and that their packages are installed.

    Raises:
        ValueError: for the first that is not.
    """
    for name in [names] if isinstance(names, str) else names or []:
        if name in ("none", "all"):
            continue
        if name not in INTEGRATION_TO_CALLBACK:
            raise ValueError(
                f"--report_to {name} is not an integration of transformers. Use none, all, or any of "
                f"{', '.join(sorted(INTEGRATION_TO_CALLBACK))}."
            )
        if name not in get_available_reporting_integrations() and name != "flyte":  # not listed: it is a service
            raise ValueError(
                f"--report_to {name} needs a package that is not installed. Install it, or use --report_to none."
            )


@check("eval_strategy", "eval_on_start", "load_best_model_at_end", "per_device_eval_batch_size", "eval_steps")
def _check_evaluation(settings: Mapping[str, Any], metrics: tuple[str, ...]) -> None:
    """Check evaluation flags that the Trainer would misread or fail on after loading the weights."""
    if settings["eval_strategy"] == "no":
        for name in ("eval_on_start", "load_best_model_at_end", "early_stopping_patience"):
            if settings[name] is not None and settings[name] is not False:  # a patience of 0 counts as given
                raise ValueError(
                    f"--{name} {settings[name]} needs evaluation data. Add --eval_strategy steps or epoch, or leave it "
                    "out."
                )
        return
    _check_best_model(settings, metrics)
    _check_early_stopping(settings)
    if settings["per_device_eval_batch_size"] < 1:
        raise ValueError(
            f"--per_device_eval_batch_size {settings['per_device_eval_batch_size']} is below 1. Use at least 1."
        )
    steps = settings["eval_steps"]
    if steps is not None and (steps < 0 or (steps > 1 and steps != int(steps))):
        raise ValueError(
            f"--eval_steps {steps} is neither a whole number of steps nor a part of the run between 0 and 1. "
            "Leave it out to evaluate every --logging_steps."
        )


@check("metric_for_best_model", "load_best_model_at_end", "save_only_model")
def _check_best_model(settings: Mapping[str, Any], metrics: tuple[str, ...]) -> None:
    """Check that evaluations measure the best model's metric, and that this model can be loaded."""
    metric = settings["metric_for_best_model"]
    if metric is not None and metric.removeprefix("eval_") not in metrics:
        raise ValueError(
            f"--metric_for_best_model {metric} is not measured in an evaluation. Use {' or '.join(metrics)}."
        )
    if settings["load_best_model_at_end"] and settings["save_only_model"]:
        raise ValueError(
            "--save_only_model True leaves out of a checkpoint what --load_best_model_at_end True needs to load it on "
            "FSDP2 and DeepSpeed. Leave out one of the two."
        )


@check("early_stopping_patience")
def _check_early_stopping(settings: Mapping[str, Any]) -> None:
    """Check that training waits for at least one evaluation before it stops early."""
    patience = settings["early_stopping_patience"]
    if patience is not None and patience < 1:
        raise ValueError(
            f"--early_stopping_patience {patience} is below 1: it is a number of evaluations. Leave it out to train to "
            "the end."
        )
