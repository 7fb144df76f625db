"""The memory options of a run, as resolved, and which of them a run supports and go together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longctx.forecast.shape import RunShape

NONE, CPU, NVME = "none", "cpu", "nvme"

AUTO = "auto"
"""The value of --sp and --memory that stands for what the forecast chooses."""
ALL = "all"
"""The value of --sp that stands for one group of all devices, with as many sequences as there would be groups."""

PROFILE_OPTIONS = (
    "offload_optimizer_device",
    "offload_param_device",
    "offload_optimizer_nvme_path",
    "offload_param_nvme_path",
    "communication_data_type",
)
"""Flags that an accelerate profile or a DeepSpeed file can set as well."""

OWN_FLAGS = (
    *PROFILE_OPTIONS,
    "tiled_mlp",
    "tiled_mlp_num_shards",
    "heads_k_stride",
    "overlap_exchange",
    "sequence_chunk_size",
)


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """The resolved value of every memory option of a run."""

    memory: str = "balanced"
    """The preset."""
    set_by_preset: tuple[str, ...] = ()
    """Names of the memory options that the preset set."""
    activation_checkpointing: bool = True
    every_n_layers: int = 1
    """One in this many layers is checkpointed."""
    whole_layers: int = 0
    """The last layers, which are not checkpointed."""
    activation_offloading: bool = False
    """Whether what the backward pass needs waits in host memory."""
    offloaded_layers: int | None = None
    """The first checkpointed layers, whose checkpoints alone are offloaded; None means all. With chunks, the first
    layers that keep attention's output in host memory and not on the device."""
    selective: bool | int | None = None
    """Whether checkpoints keep attention's output, or the number of the last checkpointed layers that do; None means
    the backend's default."""
    checkpoint_kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Keywords for torch.utils.checkpoint."""
    tiled_mlp_num_shards: int | None = None
    """Tiles of the MLP; 0 derives their number from the length, and None means no tiles."""
    heads_k_stride: int | None = None
    overlap_exchange: bool | None = None
    """Whether some heads are exchanged while others are attended to; None where that is modelled to be faster."""
    sequence_chunk_size: int | None = None
    offload_optimizer_device: str = NONE
    offload_param_device: str = NONE
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    communication_data_type: str = "auto"
    """fp32, bf16, or auto: fp32 on FSDP2, the training precision on DeepSpeed."""
    small_buckets: bool = False
    """Whether DeepSpeed reduces, fetches and keeps less at a time than a layer."""

    @property
    def differs_by_layer(self) -> bool:
        """Whether numbers of layers say what layers keep."""
        return self.whole_layers > 0 or type(self.selective) is int or self.offloaded_layers is not None

    @property
    def offloads(self) -> bool:
        """Whether anything is kept off the devices."""
        places = {self.offload_optimizer_device, self.offload_param_device}
        return places != {NONE} or self.activation_offloading or self.sequence_chunk_size is not None

    def settings(self) -> dict[str, Any]:
        """Return every memory option by its flag, and by its older name if it has one."""
        kwargs = dict(self.checkpoint_kwargs)
        if self.every_n_layers > 1:
            kwargs["every_n_layers"] = self.every_n_layers
        if self.selective is not None:
            kwargs["selective"] = self.selective
        if self.whole_layers:
            kwargs["whole_layers"] = self.whole_layers
        if self.offloaded_layers is not None:
            kwargs["offload"] = self.offloaded_layers
        return {
            "activation_checkpointing": self.activation_checkpointing,
            "activation_checkpointing_kwargs": kwargs or None,
            "gradient_checkpointing": self.activation_checkpointing,
            "gradient_checkpointing_kwargs": kwargs or None,
            "activation_offloading": self.activation_offloading,
            "tiled_mlp": self.tiled_mlp_num_shards is not None,
            **{name: getattr(self, name) for name in OWN_FLAGS if name != "tiled_mlp"},
        }

    def parallelize_arguments(self) -> dict[str, Any]:
        """Return the memory options that `longctx.parallelize` carries out, by keyword."""
        keywords = {
            "selective_checkpointing": self.selective,
            "whole_layers": self.whole_layers or None,
            "offloaded_layers": self.offloaded_layers,
            "heads_k_stride": self.heads_k_stride,
            "tiled_mlp_num_shards": self.tiled_mlp_num_shards,
            "sequence_chunk_size": self.sequence_chunk_size,
        }
        return {name: value for name, value in keywords.items() if value is not None}

    def describe(self) -> str:
        """Return the preset and every memory option that is on, in one line."""
        on = [text for name, text in self._on() if name not in self.set_by_preset]
        by_preset = [text for name, text in self._on() if name in self.set_by_preset]
        source = f"{self.memory}: {', '.join(by_preset)}" if by_preset else self.memory
        return "; ".join([source, *([", ".join(on)] if on else [])])

    def _on(self) -> list[tuple[str, str]]:
        """Return (name, text) of the memory options that are on, and of those that a preset has switched off."""
        chunked = self.sequence_chunk_size is not None
        every = f" of every {self.every_n_layers} layers" if self.every_n_layers > 1 else ""
        if self.whole_layers:
            every = f" of all but the last {_layers(self.whole_layers)}"
        kept = f" of {_layers(self.selective)}" if type(self.selective) is int else ""
        first = "" if self.offloaded_layers is None else f" of the first {_layers(self.offloaded_layers)}"
        place = f", on the host{first}" if chunked and first else ""
        checkpoints = f"activation checkpointing{every}" if self.activation_checkpointing else "no checkpointing"
        memory_options = [
            ("activation_checkpointing", not chunked, checkpoints),
            ("sequence_chunk_size", chunked, f"layers over {self.sequence_chunk_size or 0:,} tokens a rank at a time"),
            ("activation_offloading", self.activation_offloading, f"activations{first} on the host"),
            ("selective", self.selective is False, "attention computed again"),
            ("selective", bool(self.selective), f"attention's output{kept} kept{place}"),
            ("tiled_mlp", self.tiled_mlp_num_shards == 0, "MLP in tiles"),
            ("tiled_mlp", bool(self.tiled_mlp_num_shards), f"MLP in {self.tiled_mlp_num_shards} tiles"),
            ("heads_k_stride", self.heads_k_stride is not None, f"{self.heads_k_stride} key/value heads at a time"),
            ("overlap_exchange", self.overlap_exchange is True, "exchange beside attention"),
            ("offload_optimizer_device", self.offload_optimizer_device != NONE, self._place("optimizer")),
            ("offload_param_device", self.offload_param_device != NONE, self._place("param")),
            (
                "communication_data_type",
                self.communication_data_type != "auto",
                f"gradients reduced in {self.communication_data_type}",
            ),
            ("small_buckets", self.small_buckets, "small buckets"),
        ]
        return [(name, text) for name, is_on, text in memory_options if is_on]

    def _place(self, kind: str) -> str:
        device, path = getattr(self, f"offload_{kind}_device"), getattr(self, f"offload_{kind}_nvme_path")
        what = "optimizer states" if kind == "optimizer" else "parameters"
        return f"{what} in {path}" if device == NVME else f"{what} on the host"


def _layers(count: int) -> str:
    return f"{count} layers" if count != 1 else "layer"


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
    if "sequence_chunk_size" in asked and shape.model.recurrent is not None:
        raise ValueError(
            f"--sequence_chunk_size {asked['sequence_chunk_size']}: this model's recurrent layers carry a state "
            "through all tokens, which is not cut into chunks. Leave it out."
        )
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
    if chunk is not None and any(acting_on_layers.values()):
        other = next(name for name, acts in acting_on_layers.items() if acts)
        raise ValueError(
            f"--sequence_chunk_size {chunk} leaves no whole layer that {other} could act on; its activations are in "
            f"host memory already. Leave out one of the two."
        )
    for_checkpoints = {
        "every_n_layers": memory_options.every_n_layers > 1,
        "selective": memory_options.selective is not None,
        "whole_layers": memory_options.whole_layers > 0,
        "offload": memory_options.offloaded_layers is not None,
    }
    if not memory_options.activation_checkpointing and any(for_checkpoints.values()):
        name = next(name for name, is_set in for_checkpoints.items() if is_set)
        raise ValueError(
            f"--activation_checkpointing_kwargs sets {name}, and activation checkpointing is off. Add "
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
