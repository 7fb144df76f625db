"""The memory options of a run, as resolved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NONE, CPU, NVME = "none", "cpu", "nvme"

AUTO = "auto"
"""The value of --sp and --memory that stands for what the forecast chooses."""
ALL = "all"
"""The value of --sp that stands for one group of all devices, with as many sequences as there would be groups."""

OWN_FLAGS = (
    "offload_optimizer_device",
    "offload_param_device",
    "offload_optimizer_nvme_path",
    "offload_param_nvme_path",
    "communication_data_type",
    "tiled_mlp",
    "tiled_mlp_num_shards",
    "heads_k_stride",
    "overlap_exchange",
    "sequence_chunk_size",
)
"""Memory options that are flags of longctx, and of no other trainer."""

CHECKPOINT_KEYS = {
    "every_n_layers": "every_n_layers",
    "whole_layers": "whole_layers",
    "selective": "selective",
    "offloaded_layers": "offload",
}
"""Memory options that are keys of --activation_checkpointing_kwargs, and those keys."""


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
    def offloads(self) -> bool:
        """Whether anything is kept off the devices."""
        places = {self.offload_optimizer_device, self.offload_param_device}
        return places != {NONE} or self.activation_offloading or self.sequence_chunk_size is not None

    def settings(self) -> dict[str, Any]:
        """Return every memory option by its flag, and by its older name if it has one."""
        default = MemoryOptions()
        changed = [name for name in CHECKPOINT_KEYS if getattr(self, name) != getattr(default, name)]
        kwargs = {**self.checkpoint_kwargs, **{CHECKPOINT_KEYS[name]: getattr(self, name) for name in changed}}
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
        names = ("offloaded_layers", "heads_k_stride", "tiled_mlp_num_shards", "sequence_chunk_size")
        keywords = {name: getattr(self, name) for name in names}
        keywords |= {"selective_checkpointing": self.selective, "whole_layers": self.whole_layers or None}
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
