"""A step's peak memory in closed form, by category: what it depends on, where it peaks, how long it lets a run go.

Memory peaks in one of four moments, of which a prediction names the largest: the loss, or in a layer the backward pass
of the MLP, of the norm before it, or of attention. What a layer saves and what its backward pass adds are counted,
tensor by tensor, from the code of transformers' decoder layers and of longctx's attention; four constants stand for
what no code says and are fitted on published runs (`FITTED`). All a closed form gives is predicted, never measured:
`benchmarks.closed_form` holds it against the published lengths, and tests hold it against traces.

Layers of linear attention are counted as attention, sliding windows as full attention, and a ring as if one document
filled the row, which sends most.

Sizes are bytes; b is the size of an activation's element (2 in bf16, 4 in fp32), h the hidden size, I the width of the
MLP, q = H·D the width of all query heads and kv = K·D that of all key/value heads.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, cast

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from longctx.attention.backend import KeyValues
from longctx.attention.backends import BACKENDS
from longctx.layers.liger import fuses_layers
from longctx.layers.loss import TILE_BYTES
from longctx.model.allow_list import head_size, num_heads
from longctx.model.files import without_weights
from longctx.model.load import num_elements
from longctx.sequence.mesh import ParallelDims
from longctx.ulysses.exchange import key_value_copies

GB = 1e9

CONTEXT_BYTES = 2.0 * GB
"""Of a GPU: CUDA's context, cuBLAS's and cuDNN's workspaces."""
COMMUNICATOR_BYTES = 3.5 * GB
"""Of a GPU: NCCL's buffers for each process group, the world and, beside it, a sequence group."""
FRAGMENTATION = 0.10
"""Reserved by the caching allocator beyond what is allocated, as a part of the activations."""
COPIES_IN_FLIGHT = 4
"""Layers' inputs that the allocator cannot reuse yet while offloaded ones are copied to the host and back."""
FITTED = ("CONTEXT_BYTES", "COMMUNICATOR_BYTES", "FRAGMENTATION", "COPIES_IN_FLIGHT")
"""All constants that are fitted, on ALST's rows of the published lengths; `benchmarks.closed_form` repeats it."""

LOGIT_BYTES = 14
"""Of each element of the logits in bf16: themselves (2), in fp32 the log-probabilities and the gradients of these and
of the logits (12)."""
HOST_BUFFERS = 0.5
"""Of ZeRO's states in host memory, what their buffers take besides: DeepSpeed's own allowance in
`estimate_zero3_model_states_mem_needs`."""
TOKEN_BYTES = 40
"""Of each of a rank's tokens: its number, position and label (int64), and what became of it in fp32."""

Engine = Literal["none", "fsdp2", "zero1", "zero2", "zero3"]
Place = Literal["none", "cpu", "nvme"]


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """What memory depends on in a decoder, and nothing else of it."""

    num_parameters: int
    num_trained_parameters: int
    layer_parameters: int
    """Of the largest decoder layer."""
    num_layers: int
    hidden_size: int
    vocab_size: int
    intermediate_size: int
    """I; of a mixture of experts, of all experts that one token uses."""
    num_experts_per_token: int
    """0 without experts."""
    num_heads: int
    num_key_value_heads: int
    head_size: int
    has_qk_norm: bool

    @property
    def query_size(self) -> int:
        """q"""
        return self.num_heads * self.head_size

    @property
    def key_value_size(self) -> int:
        """kv"""
        return self.num_key_value_heads * self.head_size

    @classmethod
    def of_config(cls, config: PretrainedConfig) -> ModelSizes:
        """From a model on the meta device, which takes no memory and has all parameters."""
        config = copy.deepcopy(config)
        config.get_text_config().pad_token_id = None  # an embedding refuses one that it does not have
        return cls.of_model(without_weights(config))

    @classmethod
    def of_model(cls, model: PreTrainedModel | nn.Module) -> ModelSizes:
        """From a causal language model, before or after an engine or an adapter has wrapped it."""
        config: Any = model.config
        text = config.get_text_config()
        layers: Any = next(
            module
            for module in model.modules()
            if isinstance(module, nn.ModuleList) and len(module) == text.num_hidden_layers
        )
        heads, key_value_heads = num_heads(config)
        width, experts = _mlp_width(text)
        return cls(
            num_parameters=sum(map(num_elements, model.parameters())),
            num_trained_parameters=sum(num_elements(x) for x in model.parameters() if x.requires_grad),
            layer_parameters=max(sum(map(num_elements, layer.parameters())) for layer in layers),
            num_layers=text.num_hidden_layers,
            hidden_size=text.hidden_size,
            vocab_size=text.vocab_size,
            intermediate_size=width,
            num_experts_per_token=experts,
            num_heads=heads,
            num_key_value_heads=key_value_heads,
            head_size=head_size(config),
            has_qk_norm=any(name.endswith("q_norm") for name, _ in layers[0].named_modules()),
        )


def _adapter_rows(model: ModelSizes) -> int:
    """Parameters of an adapter of rank 1 on every matrix of every layer, the most that one has."""
    h, width = model.hidden_size, model.intermediate_size
    return model.num_layers * (7 * h + 2 * model.query_size + 2 * model.key_value_size + 3 * width)


def _mlp_width(text: PretrainedConfig) -> tuple[int, int]:
    """Elements between the MLP's matrices for one token, and the experts they lie in."""
    used = getattr(text, "num_experts_per_tok", None) or getattr(text, "moe_k", None) or 0
    if not used:
        return text.intermediate_size, 0
    of_expert = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    shared = getattr(text, "shared_expert_intermediate_size", None) or (
        of_expert * (getattr(text, "n_shared_experts", None) or 0)
    )
    return used * of_expert + shared, used


@dataclass(frozen=True, kw_only=True)
class MemorySetup:
    """Everything but the length that a step's memory depends on."""

    model: ModelSizes
    world_size: int = 1
    dp_replicate: int = 1
    sp: int = 1
    ring: int = 1
    """Ranks that pass keys and values around; sp / ring exchange tokens for heads."""
    sp_backend: str | None = None
    """As --sp_backend has it; None means the first registered backend that has these degrees."""
    passes_gradients_on: bool = False
    """Whether a gather passes the gradients on from rank to rank, as torch's context parallelism does."""
    ranks_per_node: int = 1
    engine: Engine = "none"
    bf16: bool = True
    """Whether activations are bf16, else fp32."""
    weight_bytes: int = 4
    """Of a parameter as it was loaded, which FSDP2 and one process train."""
    num_rows: int = 1
    """Rows of a micro-batch on a rank."""
    fused_loss: bool = True
    """Whether logits exist for a few tokens at a time only."""
    fused_layers: bool = False
    """Whether norms and the MLP's activation are single kernels that keep their inputs alone (Liger)."""
    gradient_checkpointing: bool = True
    every_n_layers: int = 1
    selective_checkpointing: bool = False
    """Whether every layer keeps attention's output, too."""
    activation_offloading: bool = False
    """Whether checkpoints wait in host memory."""
    tiled_mlp_num_shards: int | None = None
    """0 for one for each h tokens of a rank; None for all tokens at once."""
    heads_k_stride: int | None = None
    """Key/value heads of a rank at a time; None for all, and for a gather a quarter of them."""
    projects_by_stage: bool = False
    """Whether the heads in hand are projected only then, too (UPipe, arXiv 2602.21196), which longctx does not do."""
    sequence_chunk_size: int | None = None
    """Tokens of a rank at a time, the others waiting in host memory."""
    offload_optimizer: Place = "none"
    offload_param: Place = "none"
    pins_host_memory: bool = True
    """Whether what is offloaded lies in pinned memory, which devices copy to and from by themselves."""
    reduce_bytes: int = 4
    """Of a gradient's element while it is reduced; ZeRO adds up in it."""
    bucket_size: int | None = None
    """Elements that DeepSpeed reduces at a time; a layer's where None."""
    live_parameters: int = 1_000_000_000
    """That ZeRO-3 keeps gathered; DeepSpeed's default."""
    kernel: Literal["flash-attn 2", "flash-attn 3", "sdpa"] = "flash-attn 2"
    """Of attention; sdpa as stock transformers calls it, with a flash kernel behind it."""
    accumulates_gradients: bool = False
    """Whether gradients of an earlier micro-batch are there throughout."""
    is_cpu: bool = False
    """Whether the devices are the host's own CPU, so that all memory is the host's."""
    quantized_weight_bytes: float | None = None
    """Of a 4-bit weight in a layer, its scale included, which every rank has; None where weights are not quantised."""
    layer_factor: float = 1.0
    """Of what a layer saves and makes, as traces of the model at hand found it (`longctx.forecast.calibrate`)."""

    def __post_init__(self) -> None:
        if self.sp % self.ring or self.model.num_heads % self.ulysses:
            raise ValueError(
                f"sp {self.sp} with ring {self.ring} has {self.sp / self.ring:g} ranks share {self.model.num_heads} "
                "heads. Use a ring that divides sp and leaves a divisor of the heads."
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
        """Of a run, from its flags' final values."""
        get = settings.get
        kwargs = get("activation_checkpointing_kwargs") or get("gradient_checkpointing_kwargs") or {}
        small: dict[str, Any] = {"bucket_size": min(model.layer_parameters, model.hidden_size**2)}
        small["live_parameters"] = 2 * model.layer_parameters
        checkpoints = bool(get("activation_checkpointing") or get("gradient_checkpointing"))
        if get("use_peft"):
            model = replace(model, num_trained_parameters=settings["lora_r"] * _adapter_rows(model))
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
            fused_layers=bool(get("use_liger_kernel")) and fuses_layers(get("liger_kernel_config")),
            gradient_checkpointing=checkpoints,
            every_n_layers=kwargs.get("every_n_layers") or 1,
            selective_checkpointing=checkpoints and bool(kwargs.get("selective", BACKENDS[backend].keeps_output)),
            activation_offloading=checkpoints and bool(get("activation_offloading") or kwargs.get("offload")),
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
        """As --sp_backend has it, or `local`.

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
    def ulysses(self) -> int:
        """Ranks that exchange tokens for heads."""
        return self.sp // self.ring

    @property
    def element_size(self) -> int:
        """b"""
        return 2 if self.bf16 else 4

    @property
    def stream_size(self) -> int:
        """Bytes of an element of the residual stream: autocast leaves it in the embeddings' fp32."""
        return 4 if self.engine == "none" and self.weight_bytes == 4 else self.element_size

    def local_tokens(self, length: int) -> float:
        """Of a rank, where rows have this many tokens."""
        return length * self.num_rows / self.sp


@functools.cache
def _backends_with(sp: int, ring: int, names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the backends that can arrange sp > 1 ranks in such a ring."""
    return tuple(name for name in names if any(how.ring == ring for how in BACKENDS[name].arrangements(sp)))


def _reduce_bytes(asked: str | None, engine: str, bf16: bool) -> int:
    """Of a gradient's element; FSDP2 reduces in fp32 where nobody asks, DeepSpeed in the training precision."""
    return 2 if asked == "bf16" or (asked != "fp32" and engine == "deepspeed" and bf16) else 4


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """The peak of one rank's device and the host memory of its whole node, by category, in bytes."""

    device: Mapping[str, float]
    host: Mapping[str, float]
    moment: str
    """When the device's peak is: loss, MLP, norm or attention."""

    NOT_ALLOCATED = ("copies in flight", "fragmentation", "fixed")
    """Categories of the device that `torch.cuda.max_memory_allocated` does not count."""

    @property
    def device_bytes(self) -> float:
        """All that a GPU has to have."""
        return sum(self.device.values())

    @property
    def allocated_bytes(self) -> float:
        """Of these, what tensors take."""
        return sum(size for name, size in self.device.items() if name not in self.NOT_ALLOCATED)

    @property
    def host_bytes(self) -> float:
        return sum(self.host.values())


class Reach(NamedTuple):
    """How long rows can be."""

    length: int
    binds: Literal["device", "host"]
    """Which memory is full then."""


def predict(setup: MemorySetup, length: int) -> Breakdown:
    """The peak of a step whose rows have `length` tokens each, before they are cut."""
    moments = _moments(setup, setup.local_tokens(length))
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    device = _with_gradients(setup, _states(setup) | {"unsharded parameters": _unsharded(setup)} | moments[moment])
    host = _host(setup, setup.local_tokens(length))
    if setup.is_cpu:
        host |= {name: host.get(name, 0.0) + size * setup.ranks_per_node for name, size in device.items()}
        device = {}
    else:
        device["copies in flight"] = _copies_in_flight(setup, length)
        device["fragmentation"] = FRAGMENTATION * (sum(moments[moment].values()) + device["copies in flight"])
        device["fixed"] = CONTEXT_BYTES + COMMUNICATOR_BYTES * ((setup.world_size > 1) + (setup.sp > 1))
    return Breakdown(device=_present(device), host=_present(host), moment=moment)


def max_length(setup: MemorySetup, device_bytes: float, host_bytes: float) -> int:
    """The longest rows that fit: 0 where none do.

    Args:
        device_bytes: of one GPU.
        host_bytes: of one node.
    """
    return reach(setup, device_bytes, host_bytes).length


def reach(
    setup: MemorySetup,
    device_bytes: float,
    host_bytes: float,
    *,
    beside_device: float = 0.0,
    beside_host: float = 0.0,
) -> Reach:
    """The same, and which memory binds.

    Args:
        beside_device, beside_host: bytes that the prediction leaves out at any length, such as the difference to a
            measured peak.
    """

    def full(length: int) -> Literal["device", "host"] | None:
        peak = predict(setup, length)
        if peak.device_bytes + beside_device > device_bytes and not setup.is_cpu:
            return "device"
        return "host" if peak.host_bytes + beside_host > host_bytes else None

    fits, too_long = 0, setup.sp
    while (binds := full(too_long)) is None:
        fits, too_long = too_long, 2 * too_long
        if too_long > 2**48:
            raise ValueError(f"limits of {device_bytes:.3g} device and {host_bytes:.3g} host bytes are no limits")
    while too_long - fits > max(setup.sp, fits // 4096):
        middle = (fits + too_long) // 2
        found = full(middle)
        fits, too_long, binds = (middle, too_long, binds) if found is None else (fits, middle, found)
    return Reach(fits, binds)


def _present(sizes: Mapping[str, float]) -> Mapping[str, float]:
    return MappingProxyType({name: size for name, size in sizes.items() if size})


def _states(setup: MemorySetup) -> dict[str, float]:
    """On the device, throughout."""
    placed = _placed_states(setup)
    on_device = {
        "parameters": setup.offload_param == "none",
        "gradients": not _gradients_on_host(setup),
        "optimizer states": setup.offload_optimizer == "none",
    }
    return {name: size if on_device[name] else 0.0 for name, size in placed.items()}


def _placed_states(setup: MemorySetup) -> dict[str, float]:
    """Of one rank, wherever they are."""
    model, shards = setup.model, setup.world_size / setup.dp_replicate
    parameters, trained = model.num_parameters, model.num_trained_parameters
    if not setup.engine.startswith("zero"):
        each = setup.weight_bytes / (shards if setup.engine == "fsdp2" else 1)
        weights = each * parameters
        if setup.quantized_weight_bytes is not None:
            weights += (setup.quantized_weight_bytes - each) * model.num_layers * model.layer_parameters
        return {"parameters": weights, "gradients": each * trained, "optimizer states": 2 * each * trained}
    stage = int(setup.engine.removeprefix("zero"))
    return {
        "parameters": setup.element_size * parameters / (shards if stage == 3 else 1),
        "gradients": setup.reduce_bytes * trained / (shards if stage >= 2 else 1),
        "optimizer states": 12 * trained / shards,  # an fp32 copy of the parameters, and AdamW's two moments
    }


def _quantized_weight_bytes(settings: Mapping[str, Any]) -> float | None:
    """Half a byte, and a scale of 64 weights: fp32, or a byte where scales are quantised too."""
    if not settings.get("load_in_4bit"):
        return None
    return 0.5 + (1 if settings.get("use_bnb_nested_quant") else 4) / 64


def _gradients_on_host(setup: MemorySetup) -> bool:
    """ZeRO-2 and 3 add gradients up where the optimizer is; FSDP2 offloads all or nothing."""
    if setup.engine == "fsdp2":
        return setup.offload_param != "none"
    return setup.engine in ("zero2", "zero3") and setup.offload_optimizer != "none"


def _with_gradients(setup: MemorySetup, sizes: dict[str, float]) -> dict[str, float]:
    """The first layer's backward pass finds all other gradients, the last one's all checkpoints: the larger of them.

    ZeRO, and whoever accumulates, has all gradients throughout.
    """
    if setup.engine.startswith("zero") or setup.accumulates_gradients:
        return sizes
    model, gradients = setup.model, sizes["gradients"]
    of_head = gradients * model.vocab_size * model.hidden_size / model.num_parameters
    others = sizes["checkpoints"] * (1 - 1 / model.num_layers)
    if others > gradients - of_head:
        return sizes | {"gradients": of_head}
    return sizes | {"checkpoints": sizes["checkpoints"] - others}


def _unsharded(setup: MemorySetup) -> float:
    """Parameters that are whole for a layer's sake, their gradients, and the buffers of collectives."""
    model, b = setup.model, setup.element_size
    layer, head = model.layer_parameters, model.vocab_size * model.hidden_size
    trains_all = model.num_trained_parameters == model.num_parameters
    gradients = b * layer if trains_all else 0
    if setup.engine == "none":
        return gradients + b * layer if setup.stream_size > b else 0.0  # autocast's copies
    if setup.engine == "fsdp2":  # this layer and the next; the head's gradient is reduced meanwhile
        return 2 * b * layer + gradients + (setup.reduce_bytes * max(layer, head) if trains_all else 0)
    bucket = setup.reduce_bytes * min(setup.bucket_size or layer, model.num_trained_parameters)
    gathered = b * min(setup.live_parameters, model.num_parameters) if setup.engine == "zero3" else 0
    return bucket + gathered


class _Layer(NamedTuple):
    """Bytes a token of one layer, beside its checkpoint."""

    norm_before_attention: float
    """Saved of it and by the matrices after it; of the norms of queries and keys too."""
    norm_before_mlp: float
    norm_backward: float
    """Made by the backward pass of the norm before the MLP, which finds its input."""
    attention: float
    """Saved for attention's backward pass."""
    attention_backward: float
    """Made by it."""
    exchange: float
    """Messages, on both sides, where attention goes backward."""
    mlp: float
    """Saved for the MLP's backward pass."""
    mlp_backward: float
    """Made by it."""

    @property
    def saved(self) -> float:
        """By the forward pass."""
        return self.norm_before_attention + self.norm_before_mlp + self.attention + self.mlp


def saved_by_layer(setup: MemorySetup) -> float:
    """Bytes a token that the forward pass of one layer saves for the backward pass, where nothing is checkpointed."""
    return _layer(setup).saved


def _layer(setup: MemorySetup) -> _Layer:
    model, b, stream = setup.model, setup.element_size, setup.stream_size
    h, q, kv, width = model.hidden_size, model.query_size, model.key_value_size, model.intermediate_size
    saved_heads, made, exchange = _attention(setup)
    norms_lean = setup.fused_layers or setup.tiled_mlp_num_shards is not None  # tiles go for norms too
    if setup.fused_layers:
        norms, qk_norms = (b * h, (stream + b) * h), b * (q + kv)
    elif norms_lean:
        casts = (1, 1) if stream == b else (3, 2)  # autocast makes one for q, k and v each, for gate and up
        norms, qk_norms = (casts[0] * b * h, (stream + casts[1] * b) * h), b * (q + kv)
    else:
        norms, qk_norms = _norms(h, b, stream), (4 + b) * (q + kv)
    tensors, tensors_backward = (3, 1) if setup.fused_layers else (4, 2)  # gate, up, (activation,) product
    layer = _Layer(
        norm_before_attention=norms[0] + qk_norms * model.has_qk_norm,
        norm_before_mlp=norms[1],
        norm_backward=2 * stream * h if norms_lean else (stream + 5 * 4) * h,  # five fp32 steps
        attention=saved_heads + 4 * model.num_heads,  # and the fp32 log-sum-exp of every query
        attention_backward=made,
        exchange=exchange,
        mlp=tensors * b * width + 2 * b * h * model.num_experts_per_token,
        mlp_backward=tensors_backward * b * width + stream * h,
    )
    return _Layer(*(setup.layer_factor * size for size in layer))


def _norms(h: int, b: int, stream: int) -> tuple[int, int]:
    """Saved of the norms before attention and before the MLP: inputs and normalised outputs, and what matrices read.

    The input of the first is the layer's.
    """
    if stream == b == 2:
        return (4 + 2 + 2) * h, (4 + 2 + 2) * h  # an fp32 copy of the input
    if stream == b:
        return (4 + 4) * h, (4 + 4 + 4) * h
    return (4 + 3 * b) * h, (4 + 4 + 2 * b) * h  # autocast casts for q, k and v, for gate and up


def _attention(setup: MemorySetup) -> tuple[float, float, float]:
    """Saved, made in the backward pass, and exchanged: bytes a token."""
    model, b = setup.model, setup.element_size
    q, kv = model.query_size, model.key_value_size
    copies = key_value_copies(model.num_heads, model.num_key_value_heads, setup.ulysses) if setup.ulysses > 1 else 1
    if setup.kernel == "sdpa":
        copies = model.num_heads // model.num_key_value_heads  # transformers repeats what query heads share
    heads = q + 2 * kv * copies
    # The gradients of the kernel's inputs; FlashAttention's fp32 sum of dq and, where query heads of this rank share
    # them, of dk and dv: in version 2 of every query head, in its precision.
    shares = model.num_heads > model.num_key_value_heads * copies
    shared = (8 * kv * copies if setup.kernel == "flash-attn 3" else 2 * b * q) if shares else 0
    kernel = b * heads + (4 * q if setup.bf16 else 0) + shared
    if setup.ring > 1:
        made = b * q + 8 * q + kernel - (4 * q if setup.bf16 else 0)
        held, grads = BACKENDS[setup.backend].held(
            KeyValues(
                elements=kv * copies,
                element_size=b,
                num_heads=model.num_key_value_heads,
                ring=setup.ring,
                heads_k_stride=setup.heads_k_stride,
            )
        )
        exchange = 2 * b * kv * copies + held + (32 * kv * copies if setup.passes_gradients_on else grads)
    else:
        made, exchange = b * q + kernel, 0.0
    in_stages = setup.heads_k_stride is not None and BACKENDS[setup.backend].has_stages
    if setup.ulysses == 1:
        if in_stages:  # the gradients of all heads, and what a stage makes
            part = _stage(setup, copies)
            return b * heads + b * q, b * heads + part * made, part * exchange
        return b * heads + b * q, made, exchange
    if in_stages:
        part = _stage(setup, copies)
        own = b * q if setup.projects_by_stage else b * (2 * q + 2 * kv)
        return own, own + part * (3 * b * heads + made), part * (3 * b * heads + exchange)
    # The output in both layouts; the gradient of the one takes the place of the other, which its projection has read.
    return b * heads + 2 * b * q, made - b * q, exchange


def _stage(setup: MemorySetup, copies: int) -> float:
    """The part of a rank's heads that are in hand at a time; without a ring, one of the query heads that share one."""
    per_rank = setup.model.num_key_value_heads * copies / setup.ulysses
    sharing = setup.model.num_heads / (setup.model.num_key_value_heads * copies) if setup.ring == 1 else 1
    return min(1.0, (setup.heads_k_stride or per_rank) / per_rank / sharing)


def _moments(setup: MemorySetup, tokens: float) -> dict[str, dict[str, float]]:
    """What each moment adds to the states, by category."""
    model, b, stream, layer = setup.model, setup.element_size, setup.stream_size, _layer(setup)
    checkpoints = _checkpoints(setup, layer)
    if not setup.gradient_checkpointing:
        checkpoints -= layer.saved  # the layer in hand is one of them
    at_once = min(tokens, setup.sequence_chunk_size or tokens)
    in_tiles = at_once
    if setup.tiled_mlp_num_shards is not None:
        in_tiles = at_once / (setup.tiled_mlp_num_shards or max(1, math.ceil(at_once / model.hidden_size)))
    fetched = stream * model.hidden_size * (setup.activation_offloading or setup.sequence_chunk_size is not None)
    always = {"checkpoints": checkpoints * tokens + fetched * at_once, "tokens": TOKEN_BYTES * tokens}
    last = (stream + 2 * b + (0 if setup.fused_layers else 4)) * model.hidden_size
    tiled = 3 * b * model.hidden_size if in_tiles < at_once else 0  # its inputs, outputs and gradients, whole
    return {
        "loss": always | {"hidden states": last * at_once, "logits and loss": _logits(setup, tokens)},
        "attention": always
        | {
            "hidden states": (layer.norm_before_attention + stream * model.hidden_size) * at_once,
            "attention": (layer.attention + layer.attention_backward) * at_once,
            "exchange": layer.exchange * at_once,
        },
        "norm": always
        | {
            "hidden states": (layer.norm_before_attention + 4 * model.hidden_size + layer.norm_backward) * at_once,
            "attention": layer.attention * at_once,
        },
        "MLP": always
        | {
            "hidden states": (layer.norm_before_attention + layer.norm_before_mlp) * at_once,
            "attention": layer.attention * at_once,
            "MLP": (layer.mlp + layer.mlp_backward) * in_tiles + tiled * at_once,
        },
    }


def _checkpoints(setup: MemorySetup, layer: _Layer) -> float:
    """Bytes a token that all layers keep on the device for their backward pass."""
    model, b = setup.model, setup.element_size
    if not setup.gradient_checkpointing:
        return layer.saved * model.num_layers
    checkpointed = math.ceil(model.num_layers / setup.every_n_layers)
    whole = (model.num_layers - checkpointed) * layer.saved
    if setup.activation_offloading or setup.sequence_chunk_size is not None:
        return whole
    kept = b * model.query_size + 4 * model.num_heads if setup.selective_checkpointing else 0
    return whole + checkpointed * (setup.stream_size * model.hidden_size + kept)


def _logits(setup: MemorySetup, tokens: float) -> float:
    vocab = setup.model.vocab_size
    if not setup.fused_loss:
        return (LOGIT_BYTES if setup.bf16 else 16) * vocab * tokens
    tile = min(4 * vocab * tokens, max(TILE_BYTES, 4 * vocab))
    return 3 * tile + 4 * vocab * setup.model.hidden_size  # and the fp32 sum of the head's gradient


def _host(setup: MemorySetup, tokens: float) -> dict[str, float]:
    """Of a whole node, what is there on its devices' behalf."""
    model, b = setup.model, setup.element_size
    placed = _placed_states(setup)
    is_zero = setup.engine.startswith("zero")
    gradients = 4 / setup.reduce_bytes if is_zero else 1  # the optimizer on the host has its own, in fp32
    states = {
        "parameters": placed["parameters"] if setup.offload_param == "cpu" else 0.0,
        "gradients": gradients * placed["gradients"] if _gradients_on_host(setup) else 0.0,
        "optimizer states": placed["optimizer states"] if setup.offload_optimizer == "cpu" else 0.0,
    }
    states["buffers"] = HOST_BUFFERS * sum(states.values()) if is_zero else 0.0
    chunked = setup.sequence_chunk_size is not None
    kept = b * model.query_size + 4 * model.num_heads if setup.selective_checkpointing else 0
    checkpoints = math.ceil(model.num_layers / setup.every_n_layers) * (setup.stream_size * model.hidden_size + kept)
    offloads = setup.gradient_checkpointing and (setup.activation_offloading or chunked)
    of_rank = states | {
        "checkpoints": checkpoints * tokens if offloads else 0.0,
        "sequence chunks": _chunked_layer(setup) * tokens if chunked else 0.0,
    }
    return {name: size * setup.ranks_per_node for name, size in of_rank.items()}


def _copies_in_flight(setup: MemorySetup, length: int) -> float:
    tokens = setup.local_tokens(length)
    if setup.sequence_chunk_size is not None:
        tokens = min(tokens, setup.sequence_chunk_size)
    elif not (setup.activation_offloading and setup.gradient_checkpointing):
        return 0.0
    return COPIES_IN_FLIGHT * setup.stream_size * setup.model.hidden_size * tokens


def _chunked_layer(setup: MemorySetup) -> float:
    """Bytes a token in host memory of the one layer that a sequence-chunked step has in hand, in its backward pass."""
    model, b = setup.model, setup.element_size
    q, kv = model.query_size, model.key_value_size
    copies = key_value_copies(model.num_heads, model.num_key_value_heads, setup.ulysses) if setup.ulysses > 1 else 1
    heads = b * (q + 2 * kv * copies)  # whose gradients take their place
    attention = heads + 2 * b * q + 4 * model.num_heads + 8 * kv * copies
    return attention + 2 * b * model.hidden_size  # the gradients of its output and of its input
