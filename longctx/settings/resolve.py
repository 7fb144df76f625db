"""Resolve flags, profile, environment and model config to one run, in stages that change nothing in place.

Nothing here starts a process, opens data or reads weights, so a bad combination costs seconds. Checks stand beside the
settings they concern; `python -m longctx.settings` prints a table of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from transformers import PretrainedConfig

from longctx.attention.cost import Setup, devices_per_node
from longctx.data import STDLIB
from longctx.forecast.hardware import Hardware
from longctx.forecast.memory_options import ALL, AUTO
from longctx.launch.spawn import device_count
from longctx.layers.compiled import check_compile
from longctx.layers.liger import check_liger_device, liger_parts
from longctx.model.adapter import check_adapted_experts, check_adapter, check_quantization
from longctx.model.tiny import TINY
from longctx.ranks import is_first_rank
from longctx.settings.auto import choose_layout, one_group, with_forecast
from longctx.settings.data import stream, take_mixture
from longctx.settings.engine import (
    ask_memory_options,
    choose,
    choose_engine,
    choose_precision,
    clipping,
    precision_notes,
)
from longctx.settings.flags import Flags
from longctx.settings.machine_checks import (
    LIGER_VERSIONS,
    PEFT_VERSIONS,
    QLORA_VERSIONS,
    REQUIRED_VERSIONS,
    check_machine,
    check_versions,
)
from longctx.settings.model_config import configure_model, limit_length
from longctx.settings.processes import Processes, accumulate, check_dp_shard, count_all_processes, count_processes
from longctx.settings.profile import LaunchProfile
from longctx.settings.run import Run, arrange, given_multiple, pad_multiple
from longctx.settings.values import Values, check_counts, check_numbers, check_profile, read_values, take_profile
from longctx.training.checkpoint.folder import check_output, default_folder, is_restarted


def resolve(flags: Flags, profile: LaunchProfile, env: Mapping[str, str]) -> Run:
    """Return the resolved run.

    Raises:
        ValueError: for the first setting that cannot be carried out exactly, with its value, limit and remedy.
    """
    check_versions(REQUIRED_VERSIONS, "longctx")
    check_profile(profile)
    hardware = Hardware.here(device_count())

    values = read_values(flags)
    values = _take_output(stream(take_mixture(values)), env)
    values, model_config = configure_model(values)
    arranged = partial(_arranged, model_config=model_config, profile=profile, env=env, hardware=hardware)
    world_size = count_all_processes(flags, profile, env, hardware.gpus)
    if values["sp"] == ALL:
        values = one_group(values, world_size, arranged)
    if AUTO in (values["sp"], values["memory"]):
        run = choose_layout(values, world_size, arranged)
    else:
        run = arranged(values)
    return with_forecast(run, values, arranged)


def _arranged(
    values: Values,
    *,
    model_config: PretrainedConfig,
    profile: LaunchProfile,
    env: Mapping[str, str],
    hardware: Hardware,
) -> Run:
    """Return the run for values of --sp and --memory that are not auto, without a forecast."""
    flags = values.flags
    values, processes = count_processes(values, profile, env, hardware.gpus)
    use_cpu = processes.use_cpu
    values = choose_precision(values, profile, use_cpu=use_cpu)
    values = take_profile(values, profile)
    check_numbers(values)  # the profile's, too
    check_counts(values)
    values = limit_length(values, model_config)

    setup = _attention_setup(values, model_config, processes, env, hardware)
    multiple = given_multiple(flags)
    values, memory_options = ask_memory_options(values, profile)
    wanted_backend, backend = choose(processes.wanted_backend, setup, values, memory_options)
    dims = arrange(processes.world_size, backend, processes.dp_replicate)
    check_dp_shard(profile, dims)
    values = accumulate(values, profile, dims)
    engine = choose_engine(flags, profile, backend, dims, use_cpu=use_cpu)
    if values["use_peft"]:
        check_versions(PEFT_VERSIONS, "--use_peft")
        check_adapter(values, model_config, engine.name)
    if values["use_liger_kernel"]:
        values = _take_liger(values, model_config, use_cpu=use_cpu)
    if values["torch_compile"]:
        check_compile(values, engine.name, model_config)
    values = values.note(*precision_notes(values, engine.name, use_cpu=use_cpu))
    values = values.set(
        max_grad_norm=clipping(values["max_grad_norm"], engine.name), pad_to_multiple_of=pad_multiple(multiple, dims)
    )
    if values["measure_links"] and processes.sp == 1:
        values = values.note("--measure_links has no effect at sp 1: no sequence is shared")

    run = Run(
        flags=flags,
        settings=dict(values),
        filled=values.filled,
        model_config=model_config,
        dims=dims,
        wanted_backend=wanted_backend,
        setup=setup,
        backend=backend,
        engine=engine.name,
        engine_reason=engine.reason,
        promotes_engine=engine.is_promoted,
        zero_stage=engine.zero_stage,
        asked_memory_options=memory_options,
        checkpoints_by_default=bool(values["gradient_checkpointing"]),
        use_cpu=use_cpu,
        hardware=hardware,
        launched=profile.launched,
        is_demo=values.is_demo,
        notes=values.notes,
    )
    run = run.with_memory_options().with_prompts()
    if values["use_peft"] and values["lora_target_parameters"]:
        check_adapted_experts(run.settings)
    if values["load_in_4bit"]:
        check_versions(QLORA_VERSIONS, "--load_in_4bit")
        check_quantization(run.settings, model_config, engine.name, use_cpu)
    check_machine(run, env)
    return run


def _take_output(values: Values, env: Mapping[str, str]) -> Values:
    """Return values with the output folder, after a check that this run may write there; restarts go on in it."""
    asked = values["resume_from_checkpoint"]
    folder = Path(values["output_dir"]) if values["output_dir"] else default_folder(resuming=asked is not None)
    values = values.set(output_dir=str(folder))
    restarted = is_restarted(folder, env)
    if restarted:
        values = values.set(resume_from_checkpoint=asked or "auto", overwrite_output_dir=False)
    if not values["prepare_only"]:
        check_output(
            folder,
            asked=values["resume_from_checkpoint"],
            overwrite=values["overwrite_output_dir"],
            timeout=values["ddp_timeout"] if is_first_rank() and not restarted else None,
            reads=_read_by(values),
        )
    return values


def _read_by(values: Values) -> list[tuple[str, str]]:
    """Return flags and the paths that they name, of what a run reads besides checkpoints."""
    of_flags = [(name, values[name]) for name in ("model_name_or_path", "dataset_name", "chat_template_path")]
    of_flags += [("datasets", data_set.path) for data_set in values["datasets"] or []]
    return [(flag, path) for flag, path in of_flags if path and path not in (TINY, STDLIB)]


def _attention_setup(
    values: Values,
    model_config: PretrainedConfig,
    processes: Processes,
    env: Mapping[str, str],
    hardware: Hardware,
) -> Setup:
    """Return the heads and speeds that the choice of a backend needs."""
    use_cpu = processes.use_cpu
    is_half = values["bf16"] or values["dtype"] == "bfloat16"
    return Setup.of_model(
        model_config,
        processes.sp,
        element_size=2 if is_half else 4,
        device_name="CPU" if use_cpu else hardware.gpu_name,
        devices_per_node=devices_per_node(processes.world_size, env, 0 if use_cpu else hardware.gpus),
    )


def _take_liger(values: Values, model_config: PretrainedConfig, *, use_cpu: bool) -> Values:
    """Return values whose `liger_kernel_config` names the parts that Liger computes, or raise ValueError."""
    check_versions(LIGER_VERSIONS, "--use_liger_kernel")
    parts = liger_parts(model_config, values["liger_kernel_config"])
    if not values["prepare_only"]:
        check_liger_device(use_cpu)
    return values.set(liger_kernel_config=dict.fromkeys(parts, True))
