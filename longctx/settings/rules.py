"""What relates several flags: combinations that are refused or noted, and values that follow from others."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from longctx.launch.accelerate import MACHINE_FLAGS, shipped_configs
from longctx.settings.data import MIXTURE_RULES, STREAM_RULES, mixture, streams
from longctx.settings.dpo import DPO_RULES, uses_reference
from longctx.settings.flags import STEPS_BEFORE_PROFILE
from longctx.settings.launcher import BACKEND_OF, FLAG_FIRST, PROFILE_FIRST, Launcher, profile_name
from longctx.settings.read import read_yaml, refuse
from longctx.settings.schema import Rule, check
from longctx.settings.values import Settings
from longctx.untrusted.files import is_template_file

TRL_EVAL_STEPS = 10
"""Steps between evaluations where no flag says: SFTConfig's logging_steps."""
KERNEL_NAMES = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4")
"""Names of attention kernels, as transformers has them."""
INTEGRATIONS = {
    **{"azure_ml": "azureml", "clearml": "clearml", "codecarbon": "codecarbon", "comet_ml": "comet_ml"},
    **{"dagshub": "dagshub", "dvclive": "dvclive", "flyte": "flytekit", "kubeflow": "", "mlflow": "mlflow"},
    **{name: name for name in ("neptune", "swanlab", "tensorboard", "trackio", "wandb")},
}
"""Services of --report_to, with the module that each needs."""


def fill(settings: Settings, launcher: Launcher) -> Settings:
    """Add the values of the profile or the demo and those that follow from others, and check every combination.

    Raises:
        ValueError: for up to five combinations that cannot be carried out exactly, one a line.
    """
    errors: list[str] = []
    settings = _with_cp(settings, errors)
    settings = _with_profile(settings, launcher, errors)
    settings = _with_demo(settings, errors)
    refuse(errors)
    settings = mixture(settings)
    if settings["eval_strategy"] == "steps" and settings["eval_steps"] is None and not settings.is_set("logging_steps"):
        settings = settings.with_("longctx", eval_steps=TRL_EVAL_STEPS)
    if settings["early_stopping_patience"] is not None and settings["metric_for_best_model"] is None:
        settings = settings.decided(metric_for_best_model="loss")
    rules = (*RULES, *(DPO_RULES if settings.method.reads_pairs else ()))
    refuse([fault for rule in rules if (fault := rule.fault(settings))])
    settings = streams(settings)
    return settings.note(*_notes(settings), *launcher.notes)


def _with_cp(settings: Settings, errors: list[str]) -> Settings:
    """--cp N is short for --sp N --sp_backend ring."""
    cp, sp, backend = (settings[name] for name in ("cp", "sp", "sp_backend"))
    if cp is None:
        return settings
    if sp not in (None, cp) or (settings.is_set("sp_backend") and backend != BACKEND_OF["cp"]):
        given = " ".join(settings.subject(name) for name in ("sp", "sp_backend") if settings.is_set(name))
        errors.append(f"--cp {cp} means --sp {cp} --sp_backend ring, but {given} is given too. Keep one of the two.")
        return settings
    return settings.with_(settings.origins["cp"], sp=cp, sp_backend=BACKEND_OF["cp"])


def _with_profile(settings: Settings, launcher: Launcher, errors: list[str]) -> Settings:
    """Take the profile's values where no flag is given; `auto` leaves them to the flags."""
    for name, (value, key) in launcher.values.items():
        flag = settings.flag(name)
        key, _, place = key.partition(" in ")
        place, shown = place or profile_name(), key if " " in key else f"{key} {value}"
        try:
            value = check(flag, value, f"{shown} in {place}")
        except ValueError as error:
            errors.append(str(error))
            continue
        given = settings[flag.name] if settings.is_set(flag.name) else None
        if name in PROFILE_FIRST:
            if given is not True:
                settings = settings.note(f"{name} is on: the profile says {key}: true")
        elif given not in (None, "auto"):
            if given != value and name not in FLAG_FIRST:
                errors.append(
                    f"--{flag.name} {given} contradicts {place}, which sets {shown}. Change one of them, or leave "
                    "the key out."
                )
            continue
        elif value != settings[flag.name] and flag.group == "Training" and name not in FLAG_FIRST:
            settings = settings.note(f"{flag.name} {value} is the profile's {key}")
        settings = replace(
            settings.with_("profile", **{flag.name: value}),
            profile_keys={**settings.profile_keys, flag.name: f"{shown} in {place}"},
        )
    return settings


def demo() -> dict[str, Any]:
    """Return the flags of the demo, which configs/run/demo.yaml holds."""
    return read_yaml(shipped_configs() / "run" / "demo.yaml")


def _with_demo(settings: Settings, errors: list[str]) -> Settings:
    """Check that model and data set are both named; where neither is, return the demo's."""
    has_model = settings["model_name_or_path"] is not None
    has_data = settings["dataset_name"] is not None or bool(settings["datasets"])
    missing = "dataset_name" if has_model else "model_name_or_path"
    if settings.method.reads_pairs and not (has_model and has_data):
        errors.append(
            f"--{missing} is missing. longctx dpo needs a model (--model_name_or_path; tiny is built in) and pairs of "
            "answers (--dataset_name)."
        )
    elif has_model != has_data:
        example = "stdlib" if has_model else "tiny"
        errors.append(
            f"--{missing} is missing. Give both a model and a data set (--{missing} {example} is built in), or neither "
            "for the demo preset."
        )
    elif not has_model:
        settings = settings.with_("demo", **{k: v for k, v in demo().items() if not settings.is_set(k)})
    return settings


def _reports(settings: Settings) -> Iterator[str]:
    """Yield what is wrong with each service of --report_to that cannot be used."""
    names = settings["report_to"]
    for name in [names] if isinstance(names, str) else names or []:
        module = INTEGRATIONS.get(name, "")
        if name not in INTEGRATIONS and name not in ("none", "all"):
            yield f"is not an integration of transformers. Use none, all, or any of {', '.join(INTEGRATIONS)}"
        elif name in ("none", "all") and isinstance(names, list) and len(names) > 1:
            yield f"has {name} beside others. Use {name} alone, or leave it out"
        elif module and find_spec(module) is None:
            package = module.replace("_", "-")
            yield f"needs the package {package}, which is not installed. Run pip install {package}, or use none"
        elif name == "kubeflow" and "KUBEFLOW_TRAINER_SERVER_URL" not in os.environ:
            yield "needs KUBEFLOW_TRAINER_SERVER_URL, which Kubeflow's trainer sets. Leave it out elsewhere"


def _evaluates(settings: Settings) -> bool:
    return bool(settings["eval_strategy"] != "no")


def _without_profile(name: str) -> Callable[[Settings], bool]:
    return lambda s: s[name] is not None and s["accelerate_config"] is None


def _no_evaluation(name: str) -> Callable[[Settings], bool]:
    # A patience of 0 counts as given.
    return lambda s: not _evaluates(s) and s[name] is not None and s[name] is not False


RULES = (
    *(
        Rule(
            f"{name} accelerate_config",
            _without_profile(name),
            "only takes effect with --accelerate_config. Without that, pass it to the launcher, before -m "
            "longctx.train; srun does not need it",
        )
        for name in MACHINE_FLAGS
    ),
    *(
        Rule(
            f"{name} eval_strategy",
            _no_evaluation(name),
            "needs evaluation data. Add --eval_strategy steps or epoch, or leave it out",
        )
        for name in ("eval_on_start", "eval_generate", "load_best_model_at_end", "early_stopping_patience")
    ),
    Rule(
        "metric_for_best_model eval_strategy",
        lambda s: (
            _evaluates(s)
            and s["metric_for_best_model"] is not None
            and s["metric_for_best_model"].removeprefix("eval_") not in s.method.metrics
        ),
        lambda s: f"is not measured in an evaluation. Use {' or '.join(s.method.metrics)}",
    ),
    Rule(
        "save_only_model load_best_model_at_end",
        lambda s: _evaluates(s) and s["load_best_model_at_end"] and s["save_only_model"],
        "leaves out of a checkpoint what --load_best_model_at_end True needs to load it on FSDP2 and DeepSpeed. Leave "
        "out one of the two",
    ),
    Rule(
        "eval_steps",
        lambda s: _evaluates(s) and (s["eval_steps"] or 0) > 1 and s["eval_steps"] != int(s["eval_steps"]),
        "is neither a whole number of steps nor a part of the run between 0 and 1. Leave it out to evaluate every "
        "--logging_steps",
    ),
    Rule(
        "max_steps",
        lambda s: s["max_steps"] == 0,
        "trains nothing. Give 1 or more, or leave it out to train for --num_train_epochs",
    ),
    Rule(
        "num_train_epochs max_steps",
        lambda s: s["max_steps"] < 0 and not 0 < s["num_train_epochs"] < math.inf,
        "is not a length to train for. Give a number above 0, such as 3 or 0.5, or --max_steps",
    ),
    Rule(
        "profile max_steps",
        lambda s: s["profile"] and 0 < s["max_steps"] <= STEPS_BEFORE_PROFILE,
        lambda s: (
            f"starts to trace after the first {STEPS_BEFORE_PROFILE} steps, and --max_steps {s['max_steps']} ends "
            f"before. Use --max_steps {STEPS_BEFORE_PROFILE + s['profile_steps']} or more"
        ),
    ),
    Rule(
        "logging_steps logging_strategy",
        lambda s: s["logging_strategy"] == "steps" and s["logging_steps"] == 0,
        "logs nothing. Use at least 1, or --logging_strategy no",
    ),
    Rule(
        "chat_template_path",
        lambda s: is_template_file(s["chat_template_path"] or "") and not Path(s["chat_template_path"]).is_file(),
        "is not a file. Name a .jinja file, or a tokenizer's folder or name on the hub",
    ),
    Rule(
        "attn_implementation",
        lambda s: "/" in (s["attn_implementation"] or ""),
        f"is a kernel on the hub, and longctx fetches none. Use one of {', '.join(KERNEL_NAMES)}, or leave it out",
    ),
    Rule(
        "attn_implementation",
        lambda s: (s["attn_implementation"] or "sdpa") not in KERNEL_NAMES and "/" not in s["attn_implementation"],
        f"is unknown. Use one of {', '.join(KERNEL_NAMES)}, or leave it out for the fastest kernel that is exact",
    ),
    Rule("report_to", lambda s: any(_reports(s)), lambda s: next(_reports(s))),
    *MIXTURE_RULES,
    *STREAM_RULES,
)
"""In the order in which they are told."""


def _notes(settings: Settings) -> Iterator[str]:
    """Yield notes on flags that the user set and that have no effect, and on what may not be expected."""
    for name in sorted(settings.explicit):
        flag = settings.method.flags[name]
        if flag.idle:
            yield f"--{name} has no effect {flag.idle}"
        elif not settings.acts(name):
            switch, *values = flag.needs
            yield f"--{name} has no effect without --{switch}{'' if values == [True] else ' ' + ' or '.join(values)}"
    if settings["early_stopping_patience"] is not None and not settings["load_best_model_at_end"]:
        yield "early stopping: the model of the last step is saved; --load_best_model_at_end True saves the best"
    if settings["early_stopping_patience"] is None and "early_stopping_threshold" in settings.explicit:
        yield "--early_stopping_threshold has no effect without --early_stopping_patience"
    if settings.method.reads_pairs:
        if not settings["precompute_ref_log_probs"]:
            yield "the reference is computed before training in any case"
        yield "reference: " + (
            "the model before training, whose log-probabilities are computed once"
            if uses_reference(settings)
            else "none"
        )
