"""What a step's memory depends on besides its length: the model, its layout, its engine and its memory options."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np

from longctx.attention.backends import BACKENDS
from longctx.forecast.coefficients import FP32, NESTED_SCALE_BYTES, NF4_BLOCK, NF4_BYTES
from longctx.forecast.model_sizes import ModelSizes, adapter_rows
from longctx.layers.liger import fuses_layers
from longctx.sequence.mesh import ParallelDims

Engine = Literal["none", "fsdp2", "zero1", "zero2", "zero3"]
OffloadDevice = Literal["none", "cpu", "nvme"]


@dataclass(frozen=True, kw_only=True)
class MemorySetup:
    """Everything but the length that a step's memory depends on.

    `whole_layers`, `selective_layers` and `offloaded_layers` can be int arrays of one shape, for many set-ups at once.
    """

    model: ModelSizes
    world_size: int = 1
    dp_replicate: int = 1
    sp: int = 1
    ring: int = 1
    """Ranks that pass keys and values around; sp / ring ranks exchange tokens for heads."""
    sp_backend: str | None = None
    """A value of --sp_backend; None means the first registered backend that has these degrees."""
    passes_gradients_on: bool = False
    """Whether a gather passes the gradients on from rank to rank, as torch's context parallelism does."""
    ranks_per_node: int = 1
    engine: Engine = "none"
    bf16: bool = True
    """Whether activations are bf16, else fp32."""
    weight_bytes: int = 4
    """Bytes of a parameter as it was loaded, in which FSDP2 and a single process train it."""
    num_rows: int = 1
    """Rows of a micro-batch on a rank."""
    fused_loss: bool = True
    """Whether logits exist only for a few tokens at a time."""
    fused_layers: bool = False
    """Whether norms and the MLP's activation are single kernels that save only their inputs (Liger, torch.compile)."""
    gradient_checkpointing: bool = True
    every_n_layers: int = 1
    whole_layers: int = 0
    """The last layers, which are not checkpointed."""
    selective_checkpointing: bool = False
    """Whether checkpointed layers keep attention's output, too."""
    selective_layers: int | None = None
    """The last of the checkpointed layers, which alone keep it; None means all."""
    activation_offloading: bool = False
    """Whether checkpoints wait in host memory."""
    offloaded_layers: int | None = None
    """The first of the checkpointed layers, whose checkpoints alone do; None means all."""
    tiled_mlp_num_shards: int | None = None
    """Number of MLP tiles. 0 stands for tiles of `tile_tokens` tokens, and None for no tiles."""
    heads_k_stride: int | None = None
    """Key/value heads of a rank at a time; None means all, or a quarter of them for a gather."""
    overlap_exchange: bool = False
    """Whether some heads are exchanged while others are attended to, `heads_k_stride` or a few of them at a time."""
    projects_by_stage: bool = False
    """Whether each stage also projects its heads itself (UPipe, arXiv 2602.21196), which longctx does not do."""
    sequence_chunk_size: int | None = None
    """Tokens of a rank on the device at a time, while the others wait in host memory; None means all of them."""
    offload_optimizer: OffloadDevice = "none"
    offload_param: OffloadDevice = "none"
    pins_host_memory: bool = True
    """Whether offloaded tensors lie in pinned memory, which devices copy to and from by themselves."""
    reduce_bytes: int = 4
    """Bytes of a gradient's element while it is reduced; ZeRO also adds gradients up in this precision."""
    bucket_size: int | None = None
    """Elements that DeepSpeed reduces at a time; None means those of a layer."""
    live_parameters: int = 1_000_000_000
    """Parameters that ZeRO-3 keeps gathered; by default DeepSpeed's own number."""
    kernel: Literal["flash-attn 2", "flash-attn 3", "sdpa"] = "flash-attn 2"
    """Attention's kernel; `sdpa` is stock transformers' call, with a flash kernel behind it."""
    accumulates_gradients: bool = False
    """Whether gradients of an earlier micro-batch are there throughout the step."""
    is_cpu: bool = False
    """Whether the devices are the host's own CPU, so that all memory is the host's."""
    quantized_weight_bytes: float | None = None
    """Bytes of a 4-bit weight of a linear layer, its scale included. None without quantisation."""

    def __post_init__(self) -> None:
        if self.sp % self.ring or self.model.num_heads % self.ulysses:
            raise ValueError(
                f"sp {self.sp} with ring {self.ring} leaves {self.sp / self.ring:g} Ulysses ranks for "
                f"{self.model.num_heads} heads. Use a ring that divides sp, so that the Ulysses ranks divide the heads."
            )

    @classmethod
    def of_settings(
        cls,
        model: ModelSizes,
        settings: Mapping[str, Any],
        *,
        dims: ParallelDims,
        backend: str,
        engine: str,
        zero_stage: int | None,
        use_cpu: bool,
        ranks_per_node: int,
    ) -> MemorySetup:
        """Return the setup of a run from the final values of its flags."""
        get = settings.get
        kwargs = get("activation_checkpointing_kwargs") or get("gradient_checkpointing_kwargs") or {}
        small: dict[str, Any] = {"bucket_size": min(model.layer_parameters, model.hidden_size**2)}
        small["live_parameters"] = 2 * model.layer_parameters
        checkpoints = bool(get("activation_checkpointing") or get("gradient_checkpointing"))
        selective, offload = kwargs.get("selective", BACKENDS[backend].keeps_output), kwargs.get("offload")
        if get("use_peft"):
            model = replace(model, num_trained_parameters=settings["lora_r"] * adapter_rows(model))
        return cls(
            model=model,
            world_size=dims.world_size,
            dp_replicate=dims.dp_replicate,
            sp=dims.sp,
            ring=dims.ring,
            sp_backend=backend if dims.sp > 1 else None,
            ranks_per_node=ranks_per_node,
            engine=cast(Engine, f"zero{zero_stage}" if zero_stage else "fsdp2" if engine == "fsdp1" else engine),
            bf16=bool(get("bf16")) or get("dtype") == "bfloat16",
            weight_bytes=4 if get("dtype") == "float32" else 2,
            quantized_weight_bytes=_quantized_weight_bytes(settings),
            num_rows=settings["per_device_train_batch_size"],
            fused_layers=bool(get("torch_compile"))
            or (bool(get("use_liger_kernel")) and fuses_layers(get("liger_kernel_config"))),
            gradient_checkpointing=checkpoints,
            every_n_layers=kwargs.get("every_n_layers") or 1,
            whole_layers=kwargs.get("whole_layers") or 0,
            selective_checkpointing=checkpoints and bool(selective),
            selective_layers=None if isinstance(selective, bool) else selective,
            activation_offloading=checkpoints and bool(get("activation_offloading") or offload),
            offloaded_layers=None if isinstance(offload, bool) else offload,
            tiled_mlp_num_shards=get("tiled_mlp_num_shards")
            if not get("tiled_mlp")
            else get("tiled_mlp_num_shards") or 0,
            heads_k_stride=get("heads_k_stride"),
            sequence_chunk_size=get("sequence_chunk_size"),
            offload_optimizer=get(f"offload_{'param' if engine == 'fsdp2' else 'optimizer'}_device") or "none",
            offload_param=get("offload_param_device") or "none",  # where FSDP2 keeps the optimizer's states, too
            reduce_bytes=_reduce_bytes(get("communication_data_type"), engine, bool(get("bf16"))),
            accumulates_gradients=settings["gradient_accumulation_steps"] > 1,
            is_cpu=use_cpu,
            **(small if get("memory") == "longest" else {}),
        )

    @property
    def backend(self) -> str:
        """A value of --sp_backend, or `local`.

        Raises:
            ValueError: if `sp_backend` does not have these degrees.
        """
        if self.sp == 1:
            return "local"
        able = _backends_with(self.sp, self.ring, tuple(BACKENDS))
        if self.sp_backend not in (None, *able):
            raise ValueError(
                f"sp_backend {self.sp_backend} has no ring of {self.ring} with sp {self.sp}. Use {', '.join(able)}."
            )
        return self.sp_backend or able[0]

    @property
    def differs_by_layer(self) -> bool:
        """Whether numbers of layers say what layers keep."""
        return self.whole_layers > 0 or self.selective_layers is not None or self.offloaded_layers is not None

    @property
    def num_checkpointed(self) -> int:
        """Layers that are checkpointed."""
        if not self.gradient_checkpointing:
            return 0
        return -(-(self.model.num_layers - self.whole_layers) // self.every_n_layers)

    @property
    def num_selective(self) -> int:
        """Checkpointed layers that keep attention's output."""
        if not self.selective_checkpointing:
            return 0
        return self.num_checkpointed if self.selective_layers is None else self.selective_layers

    @property
    def num_offloaded(self) -> int:
        """Checkpointed layers whose checkpoints wait in host memory."""
        if self.sequence_chunk_size is not None:
            return self.num_checkpointed
        if not self.activation_offloading:
            return 0
        return self.num_checkpointed if self.offloaded_layers is None else self.offloaded_layers

    @property
    def num_selective_offloaded(self) -> int:
        """Layers whose output of attention waits in host memory."""
        offloaded = self.num_offloaded
        if self.sequence_chunk_size is not None and self.offloaded_layers is not None:
            offloaded = self.offloaded_layers  # all layers' inputs wait there
        return np.maximum(0, self.num_selective + offloaded - self.num_checkpointed)

    @property
    def ulysses(self) -> int:
        """Ranks that exchange tokens for heads."""
        return self.sp // self.ring

    @property
    def element_size(self) -> int:
        """Bytes of an activation's element, b."""
        return 2 if self.bf16 else 4

    @property
    def stream_size(self) -> int:
        """Bytes of an element of the residual stream. Without an engine, autocast leaves it in the embeddings' fp32."""
        return 4 if self.engine == "none" and self.weight_bytes == 4 else self.element_size

    def local_tokens(self, length: int) -> float:
        """Return the tokens of a rank, for rows of this many tokens."""
        return length * self.num_rows / self.sp


@functools.cache
def _backends_with(sp: int, ring: int, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the backends, of these names, that can arrange sp > 1 ranks with such a ring."""
    return tuple(name for name in names if any(how.ring == ring for how in BACKENDS[name].arrangements(sp)))


def _reduce_bytes(asked: str | None, engine: str, bf16: bool) -> int:
    """Return the bytes of a gradient's element while it is reduced.

    By default FSDP2 reduces in fp32, and DeepSpeed in the training precision.
    """
    return 2 if asked == "bf16" or (asked != "fp32" and engine == "deepspeed" and bf16) else 4


def _quantized_weight_bytes(settings: Mapping[str, Any]) -> float | None:
    """Return the bytes of a 4-bit weight, its scale included; None where weights are not quantised."""
    if not settings.get("load_in_4bit"):
        return None
    scale = NESTED_SCALE_BYTES if settings.get("use_bnb_nested_quant") else FP32
    return NF4_BYTES + scale / NF4_BLOCK
