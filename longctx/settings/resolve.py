"""From flags and launcher profile to one resolved run; every cross-check between options is here.

Nothing here starts a process, opens data or reads weights, so a bad combination costs seconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from transformers import PretrainedConfig

from longctx.attention.backends import BACKENDS
from longctx.attention.choice import BackendChoice, assumed_documents, choose_backend, chunking_backend
from longctx.attention.cost import Setup, devices_per_node
from longctx.forecast.machine_memory import available_host_memory
from longctx.forecast.memory_options import PROFILE_LEVERS, asked_levers, prefers_ulysses
from longctx.launch.spawn import device_count
from longctx.layers.liger import check_liger_device, liger_parts
from longctx.model.adapter import changes_base, check_adapter, check_quantization
from longctx.model.allow_list import check_model
from longctx.model.load import is_template_file, load_config
from longctx.model.rope import extended, factor_for, parse_rope_scaling
from longctx.model.tied_head import untie_as_stored
from longctx.model.tiny import TINY
from longctx.sequence.mesh import ParallelDims
from longctx.settings.flags import MACHINE_FLAGS, Flags
from longctx.settings.machine_checks import check_disks, check_host_memory, check_row_length
from longctx.settings.mixture import take_mixture
from longctx.settings.profile import DEEPSPEED_FLAGS, LaunchProfile, default_config_file
from longctx.settings.ranges import check_numbers
from longctx.settings.run import Run, arrange, given_multiple, pad_multiple, row_length
from longctx.settings.trl_flags import check_supported
from longctx.training.checkpoint.files import candidates, check_writable
from longctx.training.profiling import BEFORE
from longctx.training.schedule import check_length
from longctx.ulysses import ulysses_remedy

DEMO = {
    "model_name_or_path": TINY,
    "dataset_name": "stdlib",
    "packing": True,
    "max_length": 8192,
    "overlong": "split",
    "max_steps": 20,
    "per_device_train_batch_size": 1,
    "learning_rate": 4e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "logging_steps": 1,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "output_dir": "longctx-output",
}
"""What runs without --model_name_or_path and --dataset_name."""

DEFAULTS = {"packing": True, "max_length": None}
"""Where a run of one's own differs from SFTConfig; max_length None stands for the model's context length."""

ADAPTER_DEFAULTS = {"lora_dropout": 0.0}
"""Where one with --use_peft differs from ModelConfig: dropout is refused."""

MINIMUM_VERSIONS = {"deepspeed": {"deepspeed": "0.19.8"}}
"""Oldest releases an engine is exact with, besides those every run needs.

DeepSpeed before 0.19.8 waits only for the last of a module's all-gathers (its pull request 8539); over gloo, a layer
then computes with parameters that have not all arrived.
"""

PEFT_VERSIONS = {"peft": "0.20.0"}
"""Of --use_peft, the extra `peft`."""

LIGER_VERSIONS = {"liger-kernel": "0.8.0", "triton": "3.0.0"}
"""Of --use_liger_kernel."""

QLORA_VERSIONS = {"bitsandbytes": "0.50.0"}
"""Of --load_in_4bit, the extra `qlora`."""

REQUIRED_VERSIONS = {"torch": "2.11.0", "accelerate": "1.15.0", "transformers": "5.17.0", "trl": "1.16.0"}

KERNEL_NAMES = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
"""Transformers' names, and hub kernels besides: all ask for attention that keeps packed documents apart, which the
kernel that is chosen and printed does."""

_NO_EPOCHS = "the length of a stream is not known, so neither are its epochs"
_REFUSED_IN_STREAMS = {
    "balance_packs": (True, "packs are balanced over windows of the whole data set, and of a stream few are known"),
    "eval_strategy": ("epoch", _NO_EPOCHS),
    "logging_strategy": ("epoch", _NO_EPOCHS),
    "prepare_only": (True, "a stream is tokenised and packed as it is read"),
    "save_strategy": ("epoch", _NO_EPOCHS),
    "shuffle_dataset": (True, "a stream is read in order"),
}
"""Values that need the whole data set or its length, and why."""

_IDLE_IN_STREAMS = ("data_seed", "dataset_num_proc", "num_train_epochs", "train_sampling_strategy")
"""Flags about the order of a data set, its epochs or its cache."""

_OWN_FLAGS = {
    "attn_implementation": "attn_implementation",
    "dtype": "dtype",
    "revision": "model_revision",
    "torch_dtype": "dtype",
    "trust_remote_code": "trust_remote_code",
}
"""Keys of model_init_kwargs that are no part of the model's configuration, and the flags they have."""


def resolve(flags: Flags, profile: LaunchProfile, env: Mapping[str, str]) -> Run:
    """Decide everything, or refuse.

    Raises:
        ValueError: for the first setting that cannot be carried out exactly, with its value, the limit, the remedy.
    """
    _check_versions(REQUIRED_VERSIONS, "longctx")
    _check_profile(profile)
    _check_machine_flags(flags)
    settings, filled, is_demo = _defaults(flags)
    check_numbers(settings)
    notes: list[str] = []
    notes += check_supported(flags, settings)
    if settings["early_stopping_patience"] is not None and settings["metric_for_best_model"] is None:
        settings["metric_for_best_model"] = "loss"
    _check_values(settings)
    output_dir = Path(settings["output_dir"] or "trainer_output")  # as TrainingArguments have it
    if not (settings["prepare_only"] or settings["dry_run"]):
        check_writable(output_dir)
    if settings["resume_from_checkpoint"] is not None:
        candidates(str(settings["resume_from_checkpoint"]), output_dir)
    notes += take_mixture(flags, settings)
    if settings["dataset_streaming"]:
        notes += _take_streaming(flags, settings)
    settings["rope_scaling"] = parse_rope_scaling(settings["rope_scaling"])
    model_config = _model_config(settings, notes)
    notes += _rope_notes(settings, model_config)
    if changes_base(settings):
        notes.append(
            "the adapter's folder gets a config.json, of the base model as it is trained, to load that model with: "
            "AutoModelForCausalLM.from_pretrained(BASE, config=AutoConfig.from_pretrained(DIR)), then the adapter"
        )
    sp, wanted_backend = _degrees(flags, profile)
    dp_replicate = _agree(flags, "dp_replicate", profile.dp_replicate, "parallelism_config_dp_replicate_size") or 1
    use_cpu = bool(settings["use_cpu"]) or profile.use_cpu or device_count() == 0
    if is_demo and not use_cpu and "use_cpu" not in flags.explicit:
        sp, use_cpu, told = _fit_demo(flags, profile, env, sp=sp, dp_replicate=dp_replicate)
        notes += told
    needs_no_gpu = use_cpu or settings["prepare_only"]  # data is prepared on machines of another kind, too
    world_size = _world_size(flags, profile, env, sp=sp, dp_replicate=dp_replicate, use_cpu=needs_no_gpu)
    settings["bf16"] = _precision(flags, profile, use_cpu)
    _take_from_profile(flags, profile, settings, notes)
    check_numbers(settings)  # those of the profile, too
    _check_counts(settings)
    settings["max_length"] = _max_length(settings, model_config, notes)
    setup = _setup(settings, model_config, sp, world_size, env, use_cpu)
    multiple = given_multiple(flags)
    levers = _asked_levers(flags, profile, settings, notes)
    wanted_backend, backend = _choose_backend(flags, wanted_backend, setup, settings, levers)
    dims = arrange(world_size, backend, dp_replicate)
    _check_dp_shard(profile, dims)
    engine, engine_reason = _engine(flags, profile, backend, dims)
    _check_versions(MINIMUM_VERSIONS.get(engine, {}), f"the {engine} engine")
    zero_stage = (3 if profile.zero_stage is None else profile.zero_stage) if engine == "deepspeed" else None
    _check_engine(engine, zero_stage, dims)
    _check_fsdp1(engine, use_cpu)
    if settings["use_peft"]:
        _check_versions(PEFT_VERSIONS, "--use_peft")
        check_adapter(settings, model_config, engine)
    if settings["use_liger_kernel"]:
        _take_liger(settings, model_config, needs_no_gpu=bool(settings["prepare_only"]), use_cpu=use_cpu)
    notes += _precision_notes(settings, engine, use_cpu)
    settings["max_grad_norm"] = _max_grad_norm(settings["max_grad_norm"], engine)
    settings["pad_to_multiple_of"] = pad_multiple(multiple, dims)
    if settings["measure_links"] and sp == 1:
        notes.append("--measure_links has no effect at sp 1: no sequence is shared")
    run = Run(
        flags=flags,
        settings=settings,
        filled=filled,
        model_config=model_config,
        dims=dims,
        wanted_backend=wanted_backend,
        setup=setup,
        backend=backend,
        engine=engine,
        engine_reason=engine_reason,
        promotes_engine=profile.engine is None and engine != "none",
        zero_stage=zero_stage,
        asked_levers=levers,
        checkpoints_by_default=bool(settings["gradient_checkpointing"]),
        use_cpu=use_cpu,
        launched=profile.launched,
        is_demo=is_demo,
        notes=tuple(notes),
    ).settled()
    if settings["load_in_4bit"]:
        _check_versions(QLORA_VERSIONS, "--load_in_4bit")
        check_quantization(run.settings, model_config, engine, use_cpu)
    _check_machine(run, env)
    return run


def _take_liger(settings: dict[str, Any], model_config: PretrainedConfig, *, needs_no_gpu: bool, use_cpu: bool) -> None:
    """Put the parts of the model that Liger computes into `liger_kernel_config`, or refuse."""
    _check_versions(LIGER_VERSIONS, "--use_liger_kernel")
    parts = liger_parts(model_config, settings["liger_kernel_config"])
    if not needs_no_gpu:
        check_liger_device(use_cpu)
    settings["liger_kernel_config"] = dict.fromkeys(parts, True)


def _check_machine(run: Run, env: Mapping[str, str]) -> None:
    """What a row and its offloading ask of this machine."""
    check_row_length(
        run.settings["max_length"],
        run.settings["per_device_train_batch_size"],
        heads=run.setup.num_heads // run.dims.ulysses,
        ring=run.dims.ring,
    )
    if not run.levers.offloads:
        return
    local = int(env.get("LOCAL_WORLD_SIZE", 0)) or (run.setup.devices_per_node if run.launched else run.dims.world_size)
    # As if on devices, so that what it has on the host is what is offloaded.
    setup = replace(run.memory_setup(min(local, run.dims.world_size)), is_cpu=False)
    check_host_memory(setup, run.settings["max_length"], available_host_memory())
    check_disks(run.levers, setup, use_cpu=run.use_cpu)


def _defaults(flags: Flags) -> tuple[dict[str, Any], frozenset[str], bool]:
    """All values with the demo preset or our defaults filled in, which were, and whether it is the demo."""
    named = {name for name in ("model_name_or_path", "dataset_name") if flags.values[name] is not None}
    named |= {"dataset_name"} if flags.datasets else set()
    if len(named) == 1:
        missing, example = (
            ("--dataset_name", "stdlib") if "model_name_or_path" in named else ("--model_name_or_path", "tiny")
        )
        raise ValueError(
            f"{missing} is missing. Give both a model and a data set ({missing} {example} is built in), "
            "or neither for the demo preset."
        )
    preset = (DEFAULTS if named else DEMO) | (ADAPTER_DEFAULTS if flags.use_peft else {})
    filled = {name: value for name, value in preset.items() if name not in flags.explicit}
    return {**flags.values, **filled}, frozenset(filled), not named


def _check_versions(minimum: Mapping[str, str], user: str) -> None:
    for package, oldest in minimum.items():
        try:
            installed = version(package)
        except PackageNotFoundError:
            installed = None
        if installed is None or Version(installed) < Version(oldest):
            found = f"{package} {installed} is installed" if installed else f"{package} is not installed"
            raise ValueError(f"{found} and {user} needs {oldest} or later. Run pip install -U '{package}>={oldest}'.")


def _check_profile(profile: LaunchProfile) -> None:
    if profile.unsupported:
        raise ValueError(
            f"distributed_type {profile.unsupported} in {_profile_name()} is none that longctx runs on. "
            "Use a profile of configs/, such as --config_file configs/fsdp2.yaml."
        )
    if profile.tp > 1:
        raise ValueError(
            f"parallelism_config_tp_size {profile.tp} in {_profile_name()}: longctx has no tensor parallelism. "
            "Set it to 1: --sp spreads the sequence and FSDP2 or ZeRO-3 the weights "
            "(torchtitan or Megatron-LM have tensor parallelism)."
        )
    if profile.mixed_precision in ("fp16", "fp8"):
        raise ValueError(
            f"mixed_precision {profile.mixed_precision} in {_profile_name()} is not compared with the reference yet. "
            "Use bf16, or leave the key out and set --bf16."
        )


def _check_machine_flags(flags: Flags) -> None:
    """--accelerate_config has taken them out, where it was given."""
    for name in MACHINE_FLAGS:
        if flags.values[name] is not None:
            raise ValueError(
                f"--{name} {flags.values[name]} is for --accelerate_config. Without it, give it to the launcher, "
                "before -m longctx.train; srun needs none."
            )


def _profile_name() -> str:
    left_behind = default_config_file()
    if left_behind is not None:
        return f"accelerate's config (--config_file, or {left_behind} where none was given)"
    return "accelerate's config"


def _check_values(settings: Mapping[str, Any]) -> None:
    """Values that no other flag decides about."""
    for name in ("sp", "cp"):
        if settings[name] is not None and settings[name] < 1:
            raise ValueError(f"--{name} {settings[name]}: at least 1 device shares a sequence. Give their number.")
    if settings["max_length"] is not None and settings["max_length"] < 2:
        raise ValueError(
            f"--max_length {settings['max_length']} is below 2: a token needs one to predict. Use at least 2."
        )
    check_length(settings["max_steps"], settings["num_train_epochs"])
    if settings["profile_steps"] < 1:
        raise ValueError(
            f"--profile_steps {settings['profile_steps']} is below 1: there would be nothing to trace. Use at least 1."
        )
    if settings["profile"] and 0 < settings["max_steps"] <= BEFORE:
        raise ValueError(
            f"--profile True traces steps after the first {BEFORE}, and --max_steps {settings['max_steps']} ends "
            f"before. Use --max_steps {BEFORE + settings['profile_steps']} or more."
        )
    path = settings["chat_template_path"]
    if path and is_template_file(path) and not Path(path).is_file():
        raise ValueError(
            f"--chat_template_path {path} is no file. Name a .jinja file, or a tokenizer's folder or name on the hub."
        )
    kernel = settings["attn_implementation"]
    if kernel is not None and kernel not in KERNEL_NAMES and "/" not in kernel:
        raise ValueError(f"--attn_implementation {kernel} is unknown. Use one of {', '.join(KERNEL_NAMES)}.")


def _take_streaming(flags: Flags, settings: dict[str, Any]) -> list[str]:
    """Notes on what a stream does otherwise.

    Raises:
        ValueError: for what needs the whole data set, or its length.
    """
    if settings["max_steps"] <= 0:
        raise ValueError(
            f"--dataset_streaming True with --max_steps {settings['max_steps']}: nobody knows how many steps a stream "
            "has. Add --max_steps N; where the data set ends before, it is read again from its start."
        )
    settings["balance_packs"] = flags.balance_packs if "balance_packs" in flags.explicit else False
    for name, (value, reason) in _REFUSED_IN_STREAMS.items():
        if getattr(settings[name], "value", settings[name]) == value:
            remedy = f"Use --{name} steps" if value == "epoch" else f"Leave out --{name}"
            raise ValueError(
                f"--{name} {value} with --dataset_streaming True: {reason}. {remedy}, or leave out --dataset_streaming."
            )
    if settings["packing"] and settings["packing_strategy"] != "bfd":
        raise ValueError(
            f"--packing_strategy {settings['packing_strategy']} with --dataset_streaming True: documents of a stream "
            "are packed as they come, whole. Leave it out, and use --overlong split for documents longer than a row."
        )
    return [
        "streaming: documents come in the order of the data set, and nothing is shuffled; the data set is read again "
        "from its start for as long as --max_steps says",
        *(f"--{name} has no effect on a stream" for name in _IDLE_IN_STREAMS if name in flags.explicit),
    ]


def _model_config(settings: Mapping[str, Any], notes: list[str]) -> PretrainedConfig:
    """The model's configuration, if it is one of those known to be exact."""
    overrides = _model_init_kwargs(settings["model_init_kwargs"])
    config = load_config(
        settings["model_name_or_path"],
        revision=settings["model_revision"],
        trust_remote_code=settings["trust_remote_code"],
        **overrides,
    )
    if untie_as_stored(config, settings["model_name_or_path"], revision=settings["model_revision"]):
        notes.append(
            "the head is not tied to the embeddings: the configuration says tie_word_embeddings true, but the model's "
            "files hold a head with other values, which is trained and saved as it is"
        )
    if settings["rope_scaling"] is not None:
        if twice := sorted(overrides.keys() & {"rope_parameters", "rope_scaling", "max_position_embeddings"}):
            raise ValueError(f"--rope_scaling and {twice[0]} in --model_init_kwargs set the same. Keep one of them.")
        config = extended(config, settings["rope_scaling"])
    check_model(config)
    if settings["dtype"] == "auto" and str(config.dtype).endswith("float16") and "bfloat16" not in str(config.dtype):
        raise ValueError(
            f"--dtype auto means {config.dtype} for {settings['model_name_or_path']}, whose gradients underflow "
            "without a scaled loss, which is not built. Use --dtype float32 or bfloat16."
        )
    return config


def _rope_notes(settings: Mapping[str, Any], model_config: PretrainedConfig) -> list[str]:
    scaling, context = settings["rope_scaling"], model_config.get_text_config().max_position_embeddings
    if scaling is None:
        return []
    return [
        f"positions are scaled ({scaling['rope_type']}): {context:,} = {scaling['factor']:g} × the original context"
    ]


def _model_init_kwargs(given: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """--model_init_kwargs as keys of the model's configuration."""
    try:
        kwargs = json.loads(given) if isinstance(given, str) else dict(given or {})
    except ValueError as error:
        raise ValueError(f"--model_init_kwargs {given} is no JSON object: {error}") from None
    if not isinstance(kwargs, dict):
        raise ValueError(f"--model_init_kwargs {given} is no JSON object. Example: '{{\"attention_dropout\": 0.0}}'.")
    for name in kwargs.keys() & _OWN_FLAGS.keys():
        raise ValueError(f"--model_init_kwargs sets {name} {kwargs[name]}. Give it as --{_OWN_FLAGS[name]}.")
    return kwargs


def _degrees(flags: Flags, profile: LaunchProfile) -> tuple[int, str]:
    """(sp, backend as asked for), from --sp/--cp/--sp_backend and the profile's cp_size/sp_size."""
    backend = flags.sp_backend
    if flags.cp is not None:
        of_cp = BACKENDS.of_degree("cp")
        if flags.sp not in (None, flags.cp) or ("sp_backend" in flags.explicit and backend != of_cp):
            raise ValueError(
                f"--cp {flags.cp} means --sp {flags.cp} --sp_backend {of_cp}, but --sp {flags.sp} --sp_backend "
                f"{backend} is given too. Keep one of the two."
            )
        backend = of_cp
    asked = flags.cp if flags.cp is not None else flags.sp
    if profile.cp and profile.sp:
        raise ValueError(
            f"parallelism_config_cp_size {profile.cp} and parallelism_config_sp_size {profile.sp} in "
            f"{_profile_name()}: set one of them to 1. Both at once are --sp_backend hybrid."
        )
    for size, degree in ((profile.cp, "cp"), (profile.sp, "sp")):
        if size is None:
            continue
        its_backend = BACKENDS.of_degree(degree)
        if asked not in (None, size) or backend not in ("auto", its_backend):
            raise ValueError(
                f"--sp {asked} --sp_backend {backend} contradicts {_profile_name()}, which sets "
                f"parallelism_config_{degree}_size {size} ({its_backend}). Change one of them."
            )
        return size, its_backend
    return asked or 1, backend


def _agree(flags: Flags, name: str, from_profile: Any, key: str) -> Any:
    """A value that flag and profile may both set."""
    given = flags.values[name] if name in flags.explicit else None
    if given is not None and from_profile is not None and given != from_profile:
        raise ValueError(
            f"--{name} {given} contradicts {_profile_name()}, which sets {key} {from_profile}. "
            "Change one of them, or set the key to auto."
        )
    return given if given is not None else from_profile


def _fit_demo(
    flags: Flags, profile: LaunchProfile, env: Mapping[str, str], *, sp: int, dp_replicate: int
) -> tuple[int, bool, list[str]]:
    """Fit the demo to a machine with fewer GPUs than it asks for: return its sp, whether it runs on the CPU, and notes.

    It has to run anywhere. Several ranks cannot share a GPU, since NCCL refuses two on one, so they go to the CPU.
    Where a launcher has started fewer processes than share a sequence, one on each GPU, all of them share it.
    """
    world_size, local = _processes(flags, profile, env, sp=sp, dp_replicate=dp_replicate)
    devices = device_count()
    if local > devices:
        why = f"{local} processes need {local} GPUs, and {devices} {'is' if devices == 1 else 'are'} visible"
        return sp, True, [f"the demo runs on the CPU: {why}; --sp {devices} runs it on the GPU{'s' * (devices > 1)}"]
    if profile.launched and world_size < sp:
        return world_size, False, [f"the demo runs at sp {world_size}: the launcher started so many, and --sp is {sp}"]
    return sp, False, []


def _processes(
    flags: Flags, profile: LaunchProfile, env: Mapping[str, str], *, sp: int, dp_replicate: int
) -> tuple[int, int]:
    """Processes of the run, and of this machine: 0 where a launcher does not say, which gives each its GPU, too."""
    if profile.launched:
        return int(env["WORLD_SIZE"]), int(env.get("LOCAL_WORLD_SIZE", 0))
    world_size = flags.num_processes or sp * dp_replicate
    return world_size, world_size


def _world_size(
    flags: Flags, profile: LaunchProfile, env: Mapping[str, str], *, sp: int, dp_replicate: int, use_cpu: bool
) -> int:
    world_size, local = _processes(flags, profile, env, sp=sp, dp_replicate=dp_replicate)
    if profile.launched and flags.num_processes not in (None, world_size):
        raise ValueError(
            f"--num_processes {flags.num_processes} contradicts the launcher, which started {world_size}. Leave "
            f"the flag out, or have the launcher start {flags.num_processes}."
        )
    if world_size < 1:
        raise ValueError(f"--num_processes {world_size} is below 1. Use at least 1.")
    if not use_cpu and local > (devices := device_count()):
        raise ValueError(
            f"{local} processes on this machine need {local} GPUs, and {devices} are visible. "
            f"Use --sp {devices}, or --use_cpu to run on the CPU."
        )
    return world_size


def _check_dp_shard(profile: LaunchProfile, dims: ParallelDims) -> None:
    if profile.dp_shard is not None and profile.dp_shard != dims.dp_shard:
        raise ValueError(
            f"parallelism_config_dp_shard_size {profile.dp_shard} in {_profile_name()} contradicts dp_shard "
            f"{dims.dp_shard} of {dims}. dp_replicate × dp_shard × sp must equal num_processes {dims.world_size}."
        )


def _engine(flags: Flags, profile: LaunchProfile, backend: BackendChoice, dims: ParallelDims) -> tuple[str, str]:
    if profile.engine is not None:
        if flags.engine not in ("auto", profile.engine):
            raise ValueError(
                f"--engine {flags.engine} contradicts {_profile_name()}, which starts {profile.engine}. "
                "Change one of them."
            )
        return profile.engine, "the launcher's profile"
    if flags.engine != "auto":
        return flags.engine, "asked for"
    if dims.world_size == 1:
        return "none", "one process"
    if flags.load_in_4bit:
        return "fsdp2", "auto: 4-bit weights are replicated on FSDP2"
    if dims.dp_replicate > 1:
        return "fsdp2", "auto: copies of a sharded model are FSDP2's"
    runs_on = "DeepSpeed ZeRO-3" if backend.engine == "deepspeed" else "FSDP2"
    return backend.engine, f"auto: {'sp 1' if backend.name == 'local' else backend.name} runs on {runs_on}"


def _check_engine(engine: str, zero_stage: int | None, dims: ParallelDims) -> None:
    if engine in ("deepspeed", "fsdp2", "fsdp1") and dims.world_size == 1 and engine != "deepspeed":
        raise ValueError(
            f"The engine {engine} shards over processes, and there is 1. Leave out --engine, or start more."
        )
    if engine == "deepspeed" and zero_stage == 0:
        raise ValueError(
            f"ZeRO stage 0 is not compared with one process. Set zero_stage to 1, 2 or 3 in {_profile_name()}, or use "
            "--engine fsdp2 without it."
        )
    if engine == "deepspeed" and dims.dp_replicate > 1:
        raise ValueError(
            f"--dp_replicate {dims.dp_replicate} keeps copies of a sharded model, which FSDP2 can do and DeepSpeed "
            "cannot. Use --engine fsdp2, or dp_replicate 1."
        )
    if engine == "fsdp1" and dims.sp > 1:
        raise ValueError(f"sp {dims.sp} needs FSDP2 or DeepSpeed; the profile asks for FSDP1. Set fsdp_version: 2.")
    if engine == "fsdp2" and dims.dp_replicate > 1 and dims.dp_replicate == dims.world_size:
        raise ValueError(
            f"--dp_replicate {dims.dp_replicate} on {dims.world_size} processes leaves nothing to shard. "
            "Lower it, or leave it out to shard over all processes."
        )


def _check_fsdp1(engine: str, use_cpu: bool) -> None:
    if engine == "fsdp1" and use_cpu:
        raise ValueError(
            f"fsdp_version 1 in {_profile_name()}: PyTorch's FSDP1 does not run on the CPU. "
            "Set fsdp_version: 2 (--config_file configs/fsdp2.yaml), or use a machine with GPUs."
        )


def _precision(flags: Flags, profile: LaunchProfile, use_cpu: bool) -> bool:
    """Whether to train in bf16: the flag, else the profile, else bf16 on GPUs and fp32 on the CPU."""
    given = flags.bf16 if "bf16" in flags.explicit else None
    if given is False and profile.mixed_precision == "bf16":
        raise ValueError(f"--bf16 False contradicts {_profile_name()}, which sets mixed_precision bf16. Change one.")
    if given is not None:
        return bool(given)
    return profile.mixed_precision == "bf16" or not use_cpu


def _precision_notes(settings: Mapping[str, Any], engine: str, use_cpu: bool) -> list[str]:
    """What the chosen precision costs, where a user may not expect it."""
    notes = []
    if settings["dtype"] != "float32" and engine == "none":
        notes.append(f"--dtype {settings['dtype']}: one process keeps no fp32 copy of the weights, as the engines do")
    if not use_cpu and not settings["bf16"]:
        notes.append("fp32 on a GPU: attention is slower than in bf16, for which flash kernels are made")
    return notes


def _take_from_profile(flags: Flags, profile: LaunchProfile, settings: dict[str, Any], notes: list[str]) -> None:
    """Values that a profile may hold instead of a flag; `auto` there leaves them to the flags."""
    sources = (
        ("gradient_accumulation_steps", profile.gradient_accumulation_steps, "gradient_accumulation_steps"),
        ("max_grad_norm", profile.gradient_clipping, "gradient_clipping"),
        ("per_device_train_batch_size", profile.micro_batch_size, "train_micro_batch_size_per_gpu"),
        *((name, profile.deepspeed_values.get(name), key) for name, key in DEEPSPEED_FLAGS.items()),
    )
    for name, value, key in sources:
        agreed = _agree(flags, name, value, key)
        if agreed is not None and agreed != settings[name]:
            notes.append(f"{name} {agreed} is the profile's {key}")
            settings[name] = agreed


def _asked_levers(
    flags: Flags, profile: LaunchProfile, settings: Mapping[str, Any], notes: list[str]
) -> dict[str, Any]:
    """Memory levers that a flag or the profile sets, by flag."""
    asked = asked_levers(settings, flags.explicit)
    for name in PROFILE_LEVERS:
        if (agreed := _agree(flags, name, profile.levers.get(name), name)) is not None:
            asked[name] = agreed
    if profile.activation_checkpointing:  # the trainer's, which keeps the ring's output
        if asked.get("activation_checkpointing") is not True:
            notes.append("activation_checkpointing is on: the profile says fsdp_activation_checkpointing: true")
        asked["activation_checkpointing"] = True
        if profile.activation_checkpointing_offload:
            asked["activation_offloading"] = True
    return asked


def _choose_backend(
    flags: Flags, wanted: str, setup: Setup, settings: Mapping[str, Any], levers: Mapping[str, Any]
) -> tuple[str, BackendChoice]:
    """What is wanted, and what it comes to; a sequence-chunked step makes `auto` want Ulysses, where it can be."""

    def choose(name: str) -> BackendChoice:
        return choose_backend(
            name,
            setup,
            assumed_documents(row_length(settings), packed=settings["packing"]),
            ring_size=flags.ring_size,
            pad_to_multiple_of=given_multiple(flags),
        )

    chunk_size = levers.get("sequence_chunk_size")
    if chunk_size is not None and setup.num_linear_heads is None:
        _check_chunks(chunk_size, wanted, setup)
    chunks = prefers_ulysses(settings["memory"], levers) and not setup.num_linear_heads
    if wanted == "auto" and setup.sp > 1 and chunks and (name := chunking_backend(setup)) is not None:
        return name, replace(choose(name), reason="auto: the sequence-chunked step runs on it")
    return wanted, choose(wanted)


def _check_chunks(size: int, backend: str, setup: Setup) -> None:
    """Check that a sequence-chunked step has a backend that it can run on."""
    remedy = ulysses_remedy(setup.num_heads, setup.sp)
    if setup.sp > 1 and backend != "auto" and not BACKENDS[backend].can_chunk:
        raise ValueError(
            f"--sequence_chunk_size {size} with --sp_backend {backend}: chunks that wait in host memory do not travel "
            f"round a ring. {remedy}"
        )
    if setup.num_heads % setup.sp:
        raise ValueError(f"--sequence_chunk_size {size} with --sp {setup.sp}: {remedy}")


def _check_counts(settings: Mapping[str, Any]) -> None:
    if settings["logging_strategy"] == "steps" and settings["logging_steps"] == 0:
        raise ValueError("--logging_steps 0 logs nothing. Use at least 1, or --logging_strategy no.")
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "ddp_timeout"):
        if settings[name] < 1:
            raise ValueError(f"--{name} {settings[name]} is below 1. Use at least 1.")


def _max_grad_norm(value: float | None, engine: str) -> float:
    """0 is no clipping. The Trainer then measures no norm either, except on DeepSpeed: an infinite bound does both."""
    return value or (0.0 if engine == "deepspeed" else math.inf)


def _max_length(settings: Mapping[str, Any], model_config: PretrainedConfig, notes: list[str]) -> int:
    """As set, else the model's context length.

    Raises:
        ValueError: where it is beyond what --rope_scaling extends that to.
    """
    context = model_config.get_text_config().max_position_embeddings
    length = settings["max_length"] or context
    if length > context and (scaling := settings["rope_scaling"]) is not None:
        factor = factor_for(length, round(context / scaling["factor"]))
        raise ValueError(
            f"--max_length {length} is beyond {context}, to which --rope_scaling with factor {scaling['factor']:g} "
            f"extends the model's context. Use factor {factor}, or --max_length {context}."
        )
    if length > context:
        notes.append(
            f"max_length {length:,} is beyond the model's context of {context:,}; positions are not rescaled, which "
            f"--rope_scaling yarn:{factor_for(length, context)} would do"
        )
    return int(length)


def _setup(
    settings: Mapping[str, Any],
    model_config: PretrainedConfig,
    sp: int,
    world_size: int,
    env: Mapping[str, str],
    use_cpu: bool,
) -> Setup:
    """Heads and speeds, as the choice of a backend needs them."""
    is_half = settings["bf16"] or settings["dtype"] == "bfloat16"
    return Setup.of_model(
        model_config,
        sp,
        element_size=2 if is_half else 4,
        device_name="CPU" if use_cpu or not torch.cuda.is_available() else torch.cuda.get_device_name(),
        devices_per_node=devices_per_node(world_size, env, 0 if use_cpu else device_count()),
    )
