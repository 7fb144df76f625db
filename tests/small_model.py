"""The small Qwen3 that training tests start from."""

from __future__ import annotations

from typing import Any

HEADS = {"GQA 4:2": (4, 2), "MQA 4:1": (4, 1), "3 heads": (3, 3)}
"""Query and key/value heads of the folders in the fixture `models`."""


def save_small_model(folder, heads: int = 4, key_value_heads: int = 2, **settings: Any) -> str:
    """Write two layers of random weights, always the same, and tiny's tokenizer to a folder; returns its path.

    Args:
        settings: other keys of the configuration.
    """
    import torch
    from transformers import Qwen3ForCausalLM

    from longctx.model.tiny import tiny_config, tiny_tokenizer

    config = tiny_config()
    config.update({"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16})
    config.update({"num_attention_heads": heads, "num_key_value_heads": key_value_heads, **settings})
    config.layer_types = config.layer_types[: config.num_hidden_layers]
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def save_with_tokenizer(model: Any, folder: Any) -> None:
    """Save a model or a configuration, together with the tokenizer of `tiny`."""
    from longctx.model.tiny import tiny_tokenizer

    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
