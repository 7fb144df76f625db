"""Memory options, which let sequences be longer, resolved from `--memory` and the flag of each.

An explicit flag, or a key of the launcher's profile, overrides the preset. PRESETS lists what each preset sets where
the run supports it. Every memory option is exact; most cost time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from longctx.forecast.memory_options import CHECKPOINT_KEYS, CPU, NONE, NVME, OWN_FLAGS, MemoryOptions
from longctx.forecast.shape import RunShape
from longctx.settings.values import Settings

CHUNK_TOKENS = 8192
"""Most tokens of a rank that the sequence-chunked step of a preset has on the device at a time."""
FEWEST_CHUNKS = 4
"""Chunks into which it cuts a short sequence."""

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "balanced": {},
    "fastest": {"activation_checkpointing": False},
    "longest": {
        "activation_checkpointing": True,
        "activation_offloading": True,
        "selective": False,
        "sequence_chunk_size": CHUNK_TOKENS,
        "tiled_mlp": True,
        "heads_k_stride": 1,
        "offload_optimizer_device": CPU,
        "offload_param_device": CPU,
        "small_buckets": True,
    },
}
"""What each value of --memory sets, by flag. `longest` leaves out what the run does not support, see `_possible`.
`balanced` leaves everything at its default."""


def asked_memory_options(settings: Settings) -> dict[str, Any]:
    """Return the memory options that somebody set: flags by their names, --gradient_checkpointing_kwargs by its keys.

    Raises:
        ValueError: if a value in --gradient_checkpointing_kwargs is wrong.
    """
    asked = {name: settings[name] for name in OWN_FLAGS if settings.is_set(name) and settings[name] is not None}
    checkpoints = settings["gradient_checkpointing"]
    if checkpoints is False or (checkpoints and settings.is_set("gradient_checkpointing")):  # the demo sets False
        asked["activation_checkpointing"] = checkpoints
    if settings["gradient_checkpointing_kwargs"] is not None:
        asked |= _of_checkpoints(settings["gradient_checkpointing_kwargs"])
    if settings.is_set("activation_offloading"):
        asked["activation_offloading"] = settings["activation_offloading"]
    return asked


def memory_flags(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of flags, by name, that ask for these memory options: the inverse of `asked_memory_options`."""
    kwargs = {key: asked[name] for name, key in CHECKPOINT_KEYS.items() if name in asked}
    if "offloaded_layers" in asked and not asked["offloaded_layers"]:
        kwargs["offload"] = False
    flags = {name: value for name, value in asked.items() if name not in (*CHECKPOINT_KEYS, "checkpoint_kwargs")}
    if "offload" in kwargs:
        flags.pop("activation_offloading", None)
    if kwargs or "checkpoint_kwargs" in asked:
        flags["activation_checkpointing_kwargs"] = json.dumps({**kwargs, **asked.get("checkpoint_kwargs", {})})
    return flags


def _of_checkpoints(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options in --gradient_checkpointing_kwargs; `checkpoint_kwargs` has what is left for torch."""
    flag, kwargs = f"--gradient_checkpointing_kwargs {json.dumps(given)}", dict(given)
    every = kwargs.get("every_n_layers", 1)
    if type(every) is not int or every < 1:
        raise ValueError(f"{flag}: every_n_layers {every!r} is not a whole number of at least 1.")
    for name in ("offload", "selective"):
        if not _is_number_of_layers(kwargs.get(name, 0)) and not isinstance(kwargs[name], bool):
            raise ValueError(f"{flag}: {name} {kwargs[name]!r} is neither true, false nor a number of layers.")
    if not _is_number_of_layers(kwargs.get("whole_layers", 0)):
        raise ValueError(f"{flag}: whole_layers {kwargs['whole_layers']!r} is not a number of layers. Use at least 0.")
    memory_options: dict[str, Any] = {
        name: kwargs.pop(name) for name in ("every_n_layers", "selective", "whole_layers") if name in kwargs
    }
    if "offload" in kwargs:
        given = kwargs.pop("offload")
        memory_options["activation_offloading"] = bool(given)
        if given and not isinstance(given, bool):
            memory_options["offloaded_layers"] = given
    return memory_options | ({"checkpoint_kwargs": kwargs} if kwargs else {})


def _is_number_of_layers(value: Any) -> bool:
    return type(value) is int and value >= 0


def prefers_ulysses(memory: str, asked: Mapping[str, Any]) -> bool:
    """Whether the sequence-chunked step is asked for, which has less on the device without a ring."""
    by_preset = memory == "longest" and not _whole_layers(asked)
    return by_preset or asked.get("sequence_chunk_size") is not None


def with_options(shape: RunShape, memory: str, asked: Mapping[str, Any], length: int) -> RunShape:
    """Return the shape with the memory options of a preset, and with those that are asked for.

    Args:
        shape: whose own memory options do not matter.
        memory: a name of PRESETS.
        asked: what the user or a profile set, by flag, as `asked_memory_options` returns it.
        length: tokens of a row, on which the chunks of a preset depend.

    Raises:
        ValueError: for a memory option that the run does not support, with its value, the limit and the remedy.
    """
    check_support(asked, shape)
    preset = _possible(memory, asked, shape, -(-length * shape.rows // shape.sp))
    values = {**preset, **asked, "tiled_mlp_num_shards": _num_shards({**preset, **asked})}
    values.pop("tiled_mlp", None)
    if values.get("sequence_chunk_size") is not None and values.get("offloaded_layers") is not None:
        values["activation_offloading"] = False
    memory_options = MemoryOptions(memory=memory, set_by_preset=tuple(preset), **values)
    check_combinations(memory_options, shape)
    return replace(shape, options=memory_options)


def _possible(memory: str, asked: Mapping[str, Any], shape: RunShape, local_tokens: int) -> dict[str, Any]:
    """Return what the preset sets in this run and nobody else has set.

    `longest` sets the sequence-chunked step if the run supports it, which holds no whole layer and offloads what it
    keeps; else the memory options that make whole layers smaller.
    """
    preset = dict(PRESETS[memory])
    if memory != "longest":
        return {name: value for name, value in preset.items() if name not in asked and not _needs_checkpointing(asked)}
    never_whole = ("activation_offloading", "tiled_mlp", "heads_k_stride")
    chunks = shape.can_chunk and not _whole_layers(asked)
    left_out = {*never_whole} if chunks or "sequence_chunk_size" in asked else {"sequence_chunk_size"}
    if asked.get("activation_checkpointing") is False:
        left_out |= {"selective"}
    cannot_tile = shape.engine_name == "fsdp1" or shape.compiled or not shape.model.has_mlps
    if cannot_tile or "tiled_mlp_num_shards" in asked:
        left_out.add("tiled_mlp")
    if shape.engine_name != "deepspeed":
        left_out |= {"offload_optimizer_device", "small_buckets"}
    if shape.engine_name != "fsdp2":
        left_out.add("offload_param_device")  # ZeRO-3's takes much time and frees little memory
    chunk = max(1, min(CHUNK_TOKENS, math.ceil(local_tokens / FEWEST_CHUNKS)))
    preset["sequence_chunk_size"] = chunk
    return {name: value for name, value in preset.items() if name not in left_out and name not in asked}


def _whole_layers(asked: Mapping[str, Any]) -> bool:
    """Whether a memory option is asked for that only a step with whole layers has."""
    return bool({"tiled_mlp", "tiled_mlp_num_shards", "heads_k_stride"} & asked.keys()) or (
        asked.get("activation_checkpointing") is False
        or asked.get("every_n_layers", 1) > 1
        or bool(asked.get("overlap_exchange"))
        or _by_layer(asked)
    )


def _by_layer(asked: Mapping[str, Any]) -> bool:
    """Whether layers are asked to keep different things."""
    return bool(asked.get("whole_layers")) or "offloaded_layers" in asked or type(asked.get("selective")) is int


def _needs_checkpointing(asked: Mapping[str, Any]) -> bool:
    """Whether a memory option is asked for that needs activation checkpointing."""
    return asked.get("sequence_chunk_size") is not None or asked.get("every_n_layers", 1) > 1 or _by_layer(asked)


def _num_shards(values: Mapping[str, Any]) -> int | None:
    if values.get("tiled_mlp") is False:
        return None
    return values.get("tiled_mlp_num_shards", 0 if values.get("tiled_mlp") else None)


def check_support(asked: Mapping[str, Any], shape: RunShape) -> None:
    """Raise ValueError for a memory option that, by itself, the run does not support."""
    if asked.get("tiled_mlp") is False and "tiled_mlp_num_shards" in asked:
        raise ValueError(
            f"--tiled_mlp_num_shards {asked['tiled_mlp_num_shards']} contradicts --tiled_mlp False. Leave out one."
        )
    if "sequence_chunk_size" in asked and not shape.backend.can_chunk:
        raise ValueError(
            f"--sequence_chunk_size {asked['sequence_chunk_size']} is not supported by this run's attention backend. "
            "Use another --sp_backend, or leave it out."
        )
    if "sequence_chunk_size" in asked and (obstacle := shape.model.chunk_obstacle):
        raise ValueError(
            f"--sequence_chunk_size {asked['sequence_chunk_size']}: this model's {obstacle}. Leave it out."
        )
    if not shape.model.has_mlps and _num_shards(asked) is not None:
        raise ValueError("--tiled_mlp: no layer of this model has an MLP. Leave it out.")
    if asked.get("overlap_exchange") and shape.ulysses == 1:
        raise ValueError(
            "--overlap_exchange True: no ranks of this run exchange tokens for heads. Use --sp_backend ulysses or "
            "hybrid with --sp above 1, or leave it out."
        )
    if shape.compiled:
        from longctx.layers.compiled import check_compiled_layers  # which loads torch

        check_compiled_layers(asked)
    on_fsdp1 = [n for n in ("sequence_chunk_size", "tiled_mlp", "tiled_mlp_num_shards") if asked.get(n)]
    if on_fsdp1 and shape.engine_name == "fsdp1":
        raise ValueError(
            f"--{on_fsdp1[0]} {asked[on_fsdp1[0]]}: the engine is fsdp1, and it is not verified with FSDP1's "
            f"flattened weights. Set fsdp_version: 2 (--config_file configs/fsdp2.yaml), or leave it out."
        )
    if asked.get("communication_data_type") == "bf16" and not shape.bf16:
        raise ValueError(
            "--communication_data_type bf16 rounds fp32 gradients to three digits, and this run trains in fp32. "
            "Add --bf16 True, or leave it out."
        )
    if "communication_data_type" in asked and shape.engine_name not in ("deepspeed", "fsdp2"):
        raise ValueError(
            f"--communication_data_type {asked['communication_data_type']}: the engine is {shape.engine_name}, which "
            "does not offer this choice. Leave it out, or use --engine fsdp2 or deepspeed."
        )


def check_combinations(memory_options: MemoryOptions, shape: RunShape) -> None:
    """Raise ValueError for memory options that contradict each other, or that the run does not support together."""
    chunk = memory_options.sequence_chunk_size
    if chunk is not None and not memory_options.activation_checkpointing:
        raise ValueError(
            f"--sequence_chunk_size {chunk} computes every layer again in the backward pass, and activation "
            "checkpointing is off. Leave out one of the two."
        )
    acting_on_layers = {
        "every_n_layers": memory_options.every_n_layers > 1,
        "whole_layers": memory_options.whole_layers > 0,
        "--tiled_mlp": memory_options.tiled_mlp_num_shards is not None,
        "--heads_k_stride": memory_options.heads_k_stride is not None,
        "--overlap_exchange": memory_options.overlap_exchange is True,
        "--activation_offloading": memory_options.activation_offloading,
    }
    if chunk is not None and (others := [name for name, acts in acting_on_layers.items() if acts]):
        raise ValueError(
            f"--sequence_chunk_size {chunk} leaves no whole layer that {others[0]} could act on; its activations are "
            f"in host memory already. Leave out one of the two."
        )
    for_checkpoints = {
        "every_n_layers": memory_options.every_n_layers > 1,
        "selective": memory_options.selective is not None,
        "whole_layers": memory_options.whole_layers > 0,
        "offload": memory_options.offloaded_layers is not None,
    }
    names = [name for name, is_set in for_checkpoints.items() if is_set]
    if names and not memory_options.activation_checkpointing:
        raise ValueError(
            f"--activation_checkpointing_kwargs sets {names[0]}, and activation checkpointing is off. Add "
            "--activation_checkpointing True, or leave it out."
        )
    if shape.unverified_with:
        _check_unverified(memory_options, shape.unverified_with)
    _check_layers(memory_options, shape.model.num_layers)
    _check_offload(memory_options, shape)


def _check_unverified(memory_options: MemoryOptions, flag: str) -> None:
    """Raise ValueError for a memory option that is not verified together with a flag."""
    acting = {
        "tiled_mlp": memory_options.tiled_mlp_num_shards is not None,
        "sequence_chunk_size": memory_options.sequence_chunk_size is not None,
        "offload_param_device": memory_options.offload_param_device != NONE,
    }
    for name in (name for name, acts in acting.items() if acts):
        by_preset = ", which --memory longest sets," if name in memory_options.set_by_preset else ""
        raise ValueError(
            f"--{name} {memory_options.settings()[name]}{by_preset} with {flag} is not verified against one process. "
            "Leave out one of the two."
        )


def _check_layers(memory_options: MemoryOptions, num_layers: int) -> None:
    """Raise ValueError if the model lacks layers that checkpoints name, or two memory options choose them."""
    from longctx.layers.checkpoints import LayerCheckpoints, check_layers  # which loads torch

    selective = memory_options.selective if type(memory_options.selective) is int else 0
    by_layer = LayerCheckpoints(
        whole=memory_options.whole_layers, selective=selective, offloaded=memory_options.offloaded_layers
    )
    if memory_options.every_n_layers > 1 and by_layer != LayerCheckpoints():
        raise ValueError(
            f"--activation_checkpointing_kwargs: every_n_layers {memory_options.every_n_layers} and numbers of layers "
            "(whole_layers, selective, offload) choose layers in two ways. Leave one of them out."
        )
    if memory_options.checkpoint_kwargs.get("use_reentrant") and selective:
        raise ValueError(
            f"--activation_checkpointing_kwargs: selective {selective} keeps attention's output, and reentrant "
            "checkpointing computes it again. Leave out use_reentrant."
        )
    try:
        check_layers(by_layer, num_layers)
    except ValueError as error:
        raise ValueError(f"--activation_checkpointing_kwargs: {error}") from None


def _check_offload(memory_options: MemoryOptions, shape: RunShape) -> None:
    """Raise ValueError if the engine cannot put optimizer states or parameters where they are asked for."""
    for kind in ("optimizer", "param"):
        flag, path_flag = f"--offload_{kind}_device", f"--offload_{kind}_nvme_path"
        device, path = (
            getattr(memory_options, f"offload_{kind}_device"),
            getattr(memory_options, f"offload_{kind}_nvme_path"),
        )
        if device == NVME and path is None:
            raise ValueError(f"{flag} nvme needs a folder: add {path_flag} DIR on a local SSD.")
        if device != NVME and path is not None:
            raise ValueError(
                f"{path_flag} {path} needs {flag} nvme, and {flag} is {device}. Set it to nvme, or leave both out."
            )
        if device == NONE:
            continue
        if shape.engine_name not in ("deepspeed", "fsdp2"):
            raise ValueError(
                f"{flag} {device} is an option of DeepSpeed and FSDP2, and the engine is {shape.engine_name}. Use "
                f"--engine deepspeed."
            )
        if shape.engine_name == "fsdp2" and kind == "optimizer":
            raise ValueError(
                f"{flag} {device}: FSDP2 keeps optimizer states where the parameters are. Use --offload_param_device "
                "cpu, which moves both, or --engine deepspeed."
            )
        if shape.engine_name == "fsdp2" and device == NVME:
            raise ValueError(f"{flag} nvme is an option of DeepSpeed ZeRO-3. Use --engine deepspeed, or {flag} cpu.")
        needs = 3 if kind == "param" or device == NVME else 1
        if shape.engine_name == "deepspeed" and (shape.zero_stage or 0) < needs:
            raise ValueError(
                f"{flag} {device} needs ZeRO-{needs}, and the run has ZeRO-{shape.zero_stage}. Use a higher stage."
            )
