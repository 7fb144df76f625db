"""4-bit weights of bitsandbytes as plain bytes, which FSDP2 shards like any other parameter.

bitsandbytes keeps a weight in a subclass of a parameter, which loses its scales when FSDP2 cuts it. Here a layer's
packed weights and their scales are one uint8 parameter. FSDP2 gathers it before the layer's forward and backward pass
and frees it afterwards. It never casts bytes, so a gathered weight is the one that was loaded, bit by bit, and it is
frozen, so no gradient is reduced for it. A rank keeps only its own piece from the moment that a weight is loaded.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from longctx.upstream.transformers_internals import quantized_weights_changed

ALIGNMENT = 16
"""Bytes. Kernels read packed weights and scales in vectors of this size."""


@dataclass(frozen=True, kw_only=True)
class ByteLayout:
    """Where a layer's bytes lie: packed weights, a gap up to ALIGNMENT, and scales."""

    weight_dtype: torch.dtype
    num_weight_bytes: int
    scale_dtype: torch.dtype
    num_scale_bytes: int

    @property
    def first_scale(self) -> int:
        return -(-self.num_weight_bytes // ALIGNMENT) * ALIGNMENT

    @property
    def num_bytes(self) -> int:
        return self.first_scale + self.num_scale_bytes

    @classmethod
    def pack(cls, weight: Any) -> tuple[ByteLayout, Tensor]:
        """Return the layout and the bytes, uint8 [num_bytes], of a `bitsandbytes.nn.Params4bit`."""
        packed, scales = _as_bytes(weight.data), _as_bytes(weight.quant_state.absmax)
        layout = cls(
            weight_dtype=weight.dtype,
            num_weight_bytes=len(packed),
            scale_dtype=weight.quant_state.absmax.dtype,
            num_scale_bytes=len(scales),
        )
        return layout, torch.cat([packed, packed.new_zeros(layout.first_scale - len(packed)), scales])

    def unpack(self, whole: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the packed weights [n, 1] and of their scales [m]."""
        scales = whole[self.first_scale :].view(self.scale_dtype)
        return whole[: self.num_weight_bytes].view(self.weight_dtype).view(-1, 1), scales


class ShardableLinear4bit(nn.Module):
    """A frozen linear layer with the 4-bit weights of a `bitsandbytes.nn.Linear4bit`, and with the same results.

    Its `weight` is uint8 [num_bytes] of a ByteLayout.

    Args:
        layer: the layer to take weights from, which has them whole, or a piece that `loading_pieces` left.
    """

    def __init__(self, layer: Any):
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.compute_dtype, self.bias = layer.compute_dtype, layer.bias
        state = layer.weight.quant_state
        self.num_weights: int = state.shape.numel()
        self.piece: Tensor | None = None
        if hasattr(state, "layout_of_piece"):
            self.layout, self.piece_start, self.piece = state.layout_of_piece, state.start_of_piece, layer.weight.data
            whole = torch.empty(self.layout.num_bytes, dtype=torch.uint8, device="meta")
        else:
            self.layout, whole = ByteLayout.pack(layer.weight)
        self.weight = nn.Parameter(whole, requires_grad=False)
        self._state = copy.copy(state)
        self._state.absmax = None

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., in_features] times the weights, [..., out_features], in the dtype of x."""
        from bitsandbytes import matmul_4bit

        state = copy.copy(self._state)
        # Views of the parameter's storage, which FSDP2 fills again before the backward pass reads them.
        packed, state.absmax = self.layout.unpack(self.weight)
        computed = x if self.compute_dtype is None else x.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(computed.dtype)
        return matmul_4bit(computed, packed, bias=bias, quant_state=state).to(x.dtype)

    def place_piece(self) -> None:
        """Put the rank's piece into the parameter once FSDP2 has sharded it."""
        if self.piece is None:
            return
        sharded: Any = self.weight
        mesh, placements = sharded.device_mesh, sharded.placements
        shape, offset = compute_local_shape_and_global_offset(sharded.shape, mesh, placements)
        found = (*shape, *offset)
        assert found == (len(self.piece), self.piece_start), f"FSDP2's piece has (bytes, start) {found}"
        local = self.piece.to(mesh.device_type)
        placed = DTensor.from_local(local, mesh, placements, run_check=False, shape=sharded.shape, stride=(1,))
        self.load_state_dict({"weight": placed}, assign=True, strict=False)
        self.piece = None

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Leave the weights out of state dicts, which are for adapters: else all would be gathered to be dropped."""

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def loading_pieces(index: int, number: int) -> AbstractContextManager[None]:
    """Let transformers keep only one of `number` pieces of every weight that it quantises in the context.

    Pieces are those of torch.chunk, as FSDP2 makes them. Only `make_shardable` can use such a model.

    Args:
        index: the piece to keep.
    """

    def cut(weight: Any) -> None:
        layout, whole = ByteLayout.pack(weight)
        size = -(-len(whole) // number)
        weight.quant_state.layout_of_piece, weight.quant_state.start_of_piece = layout, index * size
        weight.quant_state.absmax = whole.new_empty(0)
        weight.data = whole[index * size : (index + 1) * size].clone()

    return quantized_weights_changed(cut)


def make_shardable(model: nn.Module) -> None:
    """Replace every layer of 4-bit weights by a `ShardableLinear4bit`. Call it before FSDP2 wraps the model."""
    from bitsandbytes.nn import Linear4bit

    for parent in [*model.modules()]:
        for name, layer in [*parent.named_children()]:
            if isinstance(layer, Linear4bit):
                setattr(parent, name, ShardableLinear4bit(layer))
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # what loading took and freed, which NCCL cannot take


@contextmanager
def pieces_placed(model: nn.Module) -> Iterator[None]:
    """Put every rank's pieces of 4-bit weights in place after FSDP2 has wrapped the model in the context."""
    yield
    for layer in model.modules():
        if isinstance(layer, ShardableLinear4bit):
            layer.place_piece()


def parameter_sizes(model: nn.Module) -> Iterator[tuple[nn.Parameter, int]]:
    """Yield each parameter of the model once, with its weights, also where these are packed or sharded."""
    packed = {
        id(layer.weight): layer.num_weights for layer in model.modules() if isinstance(layer, ShardableLinear4bit)
    }
    for parameter in model.parameters():
        yield parameter, packed.get(id(parameter)) or _num_elements(parameter)


def _num_elements(parameter: nn.Parameter) -> int:
    """Return the weights of the whole parameter; bitsandbytes packs 4-bit ones, and ZeRO-3 may hold a part."""
    if (quantized := getattr(parameter, "quant_state", None)) is not None:
        return int(quantized.shape.numel())
    return getattr(parameter, "ds_numel", parameter.numel())


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)
