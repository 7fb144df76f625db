"""The sizes of a decoder that its memory and its speed depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from longctx.layers.tiled_mlp import find_mlps
from longctx.model.allow_list import head_size, is_latent, num_heads
from longctx.model.branches import chunk_obstacle
from longctx.model.files import without_weights
from longctx.model.load import count_parameters, count_trained_parameters
from longctx.model.quantized import ShardableLinear4bit, parameter_sizes
from longctx.model.recurrent import RecurrentSizes, num_mixing_layers, num_recurrent_layers, recurrent_sizes


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The sizes of a decoder, for forecasts."""

    num_parameters: int
    num_trained_parameters: int
    layer_parameters: int
    """Parameters of the largest decoder layer."""
    linear_parameters: int
    """Weights of the linear layers in all decoder layers, which --load_in_4bit quantises. Experts are none of them."""
    num_layers: int
    num_attended: int
    """Layers with attention."""
    hidden_size: int
    vocab_size: int
    intermediate_size: int
    """Width of the MLP, I; for a mixture of experts, that of all experts that one token uses."""
    num_experts_per_token: int
    """Experts that one token uses; 0 without experts."""
    num_heads: int
    num_key_value_heads: int
    head_size: int
    norm_width: int
    """Elements of hidden states that a layer's norms normalise for each token: 2·h with one norm before attention and
    one before the MLP."""
    head_norm_width: int
    """Elements of queries, keys and latents that they normalise."""
    projection_parameters: int | None = None
    """Parameters of a layer's projections of multi-head latent attention; None for plain heads."""
    recurrent: RecurrentSizes | None = None
    """The sizes of a recurrent layer, or None for a model without such layers."""
    chunk_obstacle: str | None = None
    """What `longctx.model.branches.chunk_obstacle` says of the model."""
    has_mlps: bool = True
    """Whether any layer has an MLP, which `tiled_mlp` needs."""
    num_recurrent_layers: int = 0

    @property
    def query_size(self) -> int:
        """Width of all query heads, q."""
        return self.num_heads * self.head_size

    @property
    def key_value_size(self) -> int:
        """Width of all key/value heads, kv."""
        return self.num_key_value_heads * self.head_size

    @classmethod
    def of_config(cls, config: PretrainedConfig) -> ModelSizes:
        """Return the sizes by a model on the meta device, which takes no memory and has all parameters.

        They are remembered, since a model is made in a process of its own first, and a run asks for them often.
        """
        key = (type(config), config.to_json_string(use_diff=False))
        if key not in _KNOWN:
            _KNOWN[key] = cls.of_model(without_weights(config))
        return _KNOWN[key]

    @classmethod
    def of_model(cls, model: PreTrainedModel | nn.Module) -> ModelSizes:
        """Return the sizes of a causal language model, before or after an engine or an adapter has wrapped it."""
        config: Any = model.config
        text = config.get_text_config()
        layers: Any = next(
            module
            for module in model.modules()
            if isinstance(module, nn.ModuleList) and len(module) == text.num_hidden_layers
        )
        heads, key_value_heads = num_heads(config)
        width, experts = _mlp_width(text)
        recurrent = num_recurrent_layers(config)
        attention = [layer.self_attn for layer in layers if hasattr(layer, "self_attn")]
        latent = [module for module in attention if hasattr(module, "kv_b_proj")] or attention
        norms = [_norm_widths(layer, text.hidden_size, heads, key_value_heads, head_size(config)) for layer in layers]
        return cls(
            num_parameters=count_parameters(model),
            num_trained_parameters=count_trained_parameters(model),
            layer_parameters=max(map(count_parameters, layers)),
            linear_parameters=_linear_parameters(layers),
            num_layers=text.num_hidden_layers,
            hidden_size=text.hidden_size,
            vocab_size=text.vocab_size,
            intermediate_size=width,
            num_experts_per_token=experts,
            num_heads=heads,
            num_key_value_heads=key_value_heads,
            head_size=head_size(config),
            recurrent=recurrent_sizes(config),
            chunk_obstacle=chunk_obstacle(config),
            has_mlps=any(True for _ in find_mlps(model)),
            num_recurrent_layers=recurrent,
            num_attended=num_mixing_layers(config) - recurrent,
            norm_width=max(width for width, _ in norms),
            head_norm_width=max(width for _, width in norms),
            projection_parameters=_linear_parameters(latent[0]) if is_latent(config) else None,
        )


_KNOWN: dict[tuple[type[PretrainedConfig], str], ModelSizes] = {}
"""Sizes by the class and the text of the configuration."""


def _norm_widths(
    layer: nn.Module, hidden_size: int, num_heads: int, num_key_value_heads: int, head_size: int
) -> tuple[int, int]:
    """Return `norm_width` and `head_norm_width` of one layer; norms of recurrent states are left out."""
    of_hidden = of_heads = 0
    for name, norm in layer.named_modules():
        module, _, kind = name.rpartition(".")
        if "norm" not in type(norm).__name__.lower() or module not in ("", "mlp", "self_attn"):
            continue
        size = 0 if getattr(norm, "weight", None) is None else norm.weight.numel()
        if module != "self_attn":
            of_hidden += hidden_size
        elif size in (0, head_size):
            of_heads += head_size * (num_heads if kind.startswith("q") else num_key_value_heads)
        else:
            of_heads += size
    return of_hidden, of_heads


def _linear_parameters(layers: nn.Module) -> int:
    sizes = {id(parameter): size for parameter, size in parameter_sizes(layers)}
    linear = (layer for layer in layers.modules() if isinstance(layer, nn.Linear | ShardableLinear4bit))
    return sum(sizes[id(layer.weight)] for layer in linear)


def adapter_rows(model: ModelSizes) -> int:
    """Return the parameters of a rank-1 adapter on every matrix of every layer, the most that an adapter has."""
    h, width = model.hidden_size, model.intermediate_size
    return model.num_layers * (7 * h + 2 * model.query_size + 2 * model.key_value_size + 3 * width)


def _mlp_width(text: PretrainedConfig) -> tuple[int, int]:
    """Return the elements between the MLP's matrices for one token, and the number of experts that have them."""
    of_names = (getattr(text, name, None) for name in ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"))
    used = next((number for number in of_names if isinstance(number, int) and number), 0)
    if not used:
        return text.intermediate_size, 0
    of_expert = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    shared = getattr(text, "shared_expert_intermediate_size", None) or (
        of_expert * (getattr(text, "n_shared_experts", None) or getattr(text, "moe_num_shared_experts", None) or 0)
    )
    return used * of_expert + shared, used
