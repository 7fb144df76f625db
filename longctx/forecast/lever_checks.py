"""Which memory levers a run supports, and which of them go together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longctx.forecast.levers import NONE, NVME, Levers, RunTraits
from longctx.layers.checkpointed_layers import LayerCheckpoints, check_layers
from longctx.layers.compiled import check_compiled_layers


def check_asked(asked: Mapping[str, Any], place: RunTraits) -> None:
    """Raise ValueError for a lever that, by itself, the run does not support."""
    for name in ("tiled_mlp_num_shards", "heads_k_stride", "sequence_chunk_size"):
        if asked.get(name, 1) < 1:
            raise ValueError(f"--{name} {asked[name]} is below 1. Leave it out, or use at least 1.")
    if asked.get("tiled_mlp") is False and "tiled_mlp_num_shards" in asked:
        raise ValueError(
            f"--tiled_mlp_num_shards {asked['tiled_mlp_num_shards']} contradicts --tiled_mlp False. Leave out one."
        )
    if "sequence_chunk_size" in asked and not place.backend_can_chunk:
        raise ValueError(
            f"--sequence_chunk_size {asked['sequence_chunk_size']} is not supported by this run's attention backend. "
            "Use another --sp_backend, or leave it out."
        )
    if "sequence_chunk_size" in asked and place.has_linear_attention:
        raise ValueError(
            f"--sequence_chunk_size {asked['sequence_chunk_size']}: this model's linear attention carries a state "
            "through all tokens, which is not cut into chunks. Leave it out."
        )
    if place.is_compiled:
        check_compiled_layers(asked)
    on_fsdp1 = [n for n in ("sequence_chunk_size", "tiled_mlp", "tiled_mlp_num_shards") if asked.get(n)]
    if on_fsdp1 and place.engine == "fsdp1":
        raise ValueError(
            f"--{on_fsdp1[0]} {asked[on_fsdp1[0]]}: the engine is fsdp1, and it is not verified with FSDP1's "
            f"flattened weights. Set fsdp_version: 2 (--config_file configs/fsdp2.yaml), or leave it out."
        )
    if asked.get("communication_data_type") == "bf16" and not place.bf16:
        raise ValueError(
            "--communication_data_type bf16 rounds fp32 gradients to three digits, and this run trains in fp32. "
            "Add --bf16 True, or leave it out."
        )
    if "communication_data_type" in asked and place.engine not in ("deepspeed", "fsdp2"):
        raise ValueError(
            f"--communication_data_type {asked['communication_data_type']}: the engine is {place.engine}, which does "
            f"not offer this choice. Leave it out, or use --engine fsdp2 or deepspeed."
        )


def check_together(levers: Levers, place: RunTraits) -> None:
    chunk = levers.sequence_chunk_size
    if chunk is not None and not levers.activation_checkpointing:
        raise ValueError(
            f"--sequence_chunk_size {chunk} computes every layer again in the backward pass, and activation "
            "checkpointing is off. Leave out one of the two."
        )
    acting_on_layers = {
        "every_n_layers": levers.every_n_layers > 1,
        "whole_layers": levers.whole_layers > 0,
        "--tiled_mlp": levers.tiled_mlp_num_shards is not None,
        "--heads_k_stride": levers.heads_k_stride is not None,
        "--activation_offloading": levers.activation_offloading,
    }
    if chunk is not None and any(acting_on_layers.values()):
        other = next(name for name, acts in acting_on_layers.items() if acts)
        raise ValueError(
            f"--sequence_chunk_size {chunk} leaves no whole layer that {other} could act on; its activations are in "
            f"host memory already. Leave out one of the two."
        )
    for_checkpoints = {
        "every_n_layers": levers.every_n_layers > 1,
        "selective": levers.selective is not None,
        "whole_layers": levers.whole_layers > 0,
        "offload": levers.offloaded_layers is not None,
    }
    if not levers.activation_checkpointing and any(for_checkpoints.values()):
        name = next(name for name, is_set in for_checkpoints.items() if is_set)
        raise ValueError(
            f"--activation_checkpointing_kwargs sets {name}, and activation checkpointing is off. Add "
            "--activation_checkpointing True, or leave it out."
        )
    _check_layers(levers, place.num_layers)
    _check_offload(levers, place)


def _check_layers(levers: Levers, num_layers: int) -> None:
    """Raise ValueError if the model does not have the layers that checkpoints name, or two levers choose them."""
    selective = levers.selective if type(levers.selective) is int else 0
    by_layer = LayerCheckpoints(whole=levers.whole_layers, selective=selective, offloaded=levers.offloaded_layers)
    if levers.every_n_layers > 1 and by_layer != LayerCheckpoints():
        raise ValueError(
            f"--activation_checkpointing_kwargs: every_n_layers {levers.every_n_layers} and numbers of layers "
            "(whole_layers, selective, offload) choose layers in two ways. Leave one of them out."
        )
    if levers.checkpoint_kwargs.get("use_reentrant") and selective:
        raise ValueError(
            f"--activation_checkpointing_kwargs: selective {selective} keeps attention's output, and reentrant "
            "checkpointing computes it again. Leave out use_reentrant."
        )
    try:
        check_layers(by_layer, num_layers)
    except ValueError as error:
        raise ValueError(f"--activation_checkpointing_kwargs: {error}") from None


def _check_offload(levers: Levers, place: RunTraits) -> None:
    """Raise ValueError if the engine cannot put optimizer states or parameters where they are asked for."""
    for kind in ("optimizer", "param"):
        flag, path_flag = f"--offload_{kind}_device", f"--offload_{kind}_nvme_path"
        device, path = getattr(levers, f"offload_{kind}_device"), getattr(levers, f"offload_{kind}_nvme_path")
        if device == NVME and path is None:
            raise ValueError(f"{flag} nvme needs a folder: add {path_flag} DIR on a local SSD.")
        if device != NVME and path is not None:
            raise ValueError(
                f"{path_flag} {path} needs {flag} nvme, and {flag} is {device}. Set it to nvme, or leave both out."
            )
        if device == NONE:
            continue
        if place.engine not in ("deepspeed", "fsdp2"):
            raise ValueError(
                f"{flag} {device} is an option of DeepSpeed and FSDP2, and the engine is {place.engine}. Use "
                f"--engine deepspeed."
            )
        if place.engine == "fsdp2" and kind == "optimizer":
            raise ValueError(
                f"{flag} {device}: FSDP2 keeps optimizer states where the parameters are. Use --offload_param_device "
                "cpu, which moves both, or --engine deepspeed."
            )
        if place.engine == "fsdp2" and device == NVME:
            raise ValueError(f"{flag} nvme is an option of DeepSpeed ZeRO-3. Use --engine deepspeed, or {flag} cpu.")
        needs = 3 if kind == "param" or device == NVME else 1
        if place.engine == "deepspeed" and (place.zero_stage or 0) < needs:
            raise ValueError(
                f"{flag} {device} needs ZeRO-{needs}, and the run has ZeRO-{place.zero_stage}. Use a higher stage."
            )
