"""torch.compile for decoder layers, around their attention.

A layer's forward is compiled by itself, inside the hooks of engines and activation checkpointing. Attention breaks the
graph, since its messages and plans cannot be compiled. Layers share the graphs, and so do batches: a second length is
compiled for all lengths.
"""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from longctx.model.allow_list import has_experts
from longctx.upstream.transformers_internals import change_class

CHANGES_LAYERS = {
    "sequence_chunk_size": "runs layers chunk by chunk and leaves them at their attention",
    "tiled_mlp": "runs MLPs tile by tile in a backward pass of its own",
    "tiled_mlp_num_shards": "runs MLPs tile by tile in a backward pass of its own",
    "use_liger_kernel": "puts kernels of its own into layers",
    "use_peft": "puts adapters into layers",
}
"""Flags with which compiled layers are not verified, and what each does."""


def check_compile(settings: Mapping[str, Any], engine: str, model_config: PretrainedConfig) -> None:
    """Check that layers can be compiled in a run with these settings.

    Raises:
        ValueError: for a model, another flag or an engine that compiled layers are not verified with, or without a C++
            compiler.
    """
    if has_experts(model_config):
        raise ValueError(
            f"--torch_compile True with {model_config.model_type}, a mixture of experts, whose routers count tokens: "
            "the two are not verified together. Leave out --torch_compile."
        )
    check_compiled_layers(settings)
    if engine not in ("fsdp2", "none"):
        raise ValueError(
            f"--torch_compile True: the engine is {engine}, whose hooks inside layers cannot be compiled. Use --engine "
            "fsdp2, or leave it out."
        )
    compiler = os.environ.get("CXX") or "g++"
    if settings["torch_compile_backend"] in (None, "inductor") and shutil.which(compiler) is None:
        raise ValueError(
            f"--torch_compile True needs a C++ compiler, and {compiler} is not found. Install g++, or set CXX to "
            "another compiler."
        )


def check_compiled_layers(settings: Mapping[str, Any]) -> None:
    """Raise ValueError if flags, by name, ask for something else that changes decoder layers."""
    for name, does in CHANGES_LAYERS.items():
        if settings.get(name):
            raise ValueError(
                f"--torch_compile True with --{name} {settings[name]}, which {does}: the two are not verified "
                "together. Leave out one of them."
            )


def install_compiled(model: PreTrainedModel, backend: str | None = None, mode: str | None = None) -> None:
    """Compile the forward of every decoder layer, when it is first called.

    Args:
        backend, mode: as in torch.compile; None for its defaults.
    """
    compiled: dict[type, type] = {}
    for layer in model.modules():
        cls = type(layer)
        if not isinstance(layer, GradientCheckpointingLayer):
            continue
        if cls not in compiled:
            forward = torch.compile(inspect.unwrap(cls.forward), backend=backend or "inductor", mode=mode)
            compiled[cls] = type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})
        change_class(layer, compiled[cls])
