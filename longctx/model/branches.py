"""What the layers of a model rule out: documents that share a beginning, and running over chunks of tokens."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from longctx.model.allow_list import auxiliary_loss_coefficient, has_windows
from longctx.model.recurrent import recurrent_sizes

AUXILIARY_LOSS_OBSTACLE = "since the routers' auxiliary loss counts every token of a document"
"""The obstacle for a mixture of experts while its configuration includes the auxiliary loss."""


def branch_obstacle(config: PretrainedConfig, *, backend_has_branches: bool, is_chunked: bool) -> str | None:
    """Return why a model does not compute branches as if each stood alone with its trunk; None if it does.

    Branches are documents that share a beginning, see `longctx.sequence.layout`.

    Full causal attention does. So do experts, which see each token by itself, without the loss over all tokens.

    Args:
        backend_has_branches: as in `longctx.attention.backend.Backend`.
        is_chunked: whether the step is sequence-chunked.
    """
    text: Any = config.get_text_config()
    if recurrent_sizes(config) is not None:
        return "since recurrent layers pass a state from token to token"
    if getattr(text, "attention_chunk_size", None):
        return "since layers attend within chunks of a document"
    if has_windows(config):
        return "since layers have a sliding window"
    if auxiliary_loss_coefficient(config):
        return AUXILIARY_LOSS_OBSTACLE
    if is_chunked:
        return "since the sequence-chunked step attends to whole documents"
    return None if backend_has_branches else "since the backend attends to whole documents"


def chunk_obstacle(config: PretrainedConfig) -> str | None:
    """Return why a model's layers cannot run over a chunk of tokens at a time; None if they can."""
    if recurrent_sizes(config) is not None:
        return "recurrent layers carry a state through all tokens, which is not cut into chunks"
    if hasattr(config.get_text_config(), "num_kv_shared_layers"):
        return "layers take inputs of their own for each token and share keys and values, which are not cut into chunks"
    return None
