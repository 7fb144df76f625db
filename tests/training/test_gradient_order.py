"""The order in which gradients come does not depend on the data.

ZeRO-1 and ZeRO-2 reduce gradients in that order, in buckets of several parameters. Data-parallel ranks have sequences
of different lengths, so that a path which a short sequence takes alone would add up gradients of different parameters.
"""

from __future__ import annotations

import pytest
import torch

from longctx import parallelize
from longctx.layers import tiled_mlp
from longctx.layers.tiled_mlp import install_tiled_mlp
from tests.model.test_models import make_model

TILE = 32
SEQUENCES = {
    "one token that is predicted": [2],
    "one tile": [20, 12],
    "more than one tile": [33],
    "several tiles": [60, 1, 39],
    "a single label": [9, 30, 22],
}
SETTINGS = ["plain", "checkpointing", "automatic tiles", "3 tiles", "1 tile", "chunks"]


@pytest.mark.long
@pytest.mark.parametrize(
    "family", ["qwen3", "gpt_oss, sinks and windows", "qwen3_moe", "qwen3_next", "gemma3_text, windows", "glm4"]
)
def test_gradients_come_in_the_same_order_for_every_sequence(family, monkeypatch):
    monkeypatch.setattr(tiled_mlp, "tile_tokens", lambda width: TILE)  # which are longer in models as narrow as these
    for setting in SETTINGS:
        if setting == "chunks" and family == "qwen3_next":  # is refused: a state goes through all tokens
            continue
        orders = {name: order_of_gradients(family, setting, name) for name in SEQUENCES}
        first = orders.pop("several tiles")
        assert len(first) > 10
        for name, order in orders.items():
            assert order == first, (setting, name)


def order_of_gradients(family, setting, name):
    """The names of the parameters, in the order in which their gradients are complete."""
    model = make_model(family)
    if setting == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if "tile" in setting:
        install_tiled_mlp(model, {"automatic tiles": 0, "3 tiles": 3, "1 tile": 1}[setting])
    model, sequence = parallelize(model, 1, **({"sequence_chunk_size": 16} if setting == "chunks" else {}))
    order = []
    for parameter_name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=parameter_name: order.append(name))
    lengths = SEQUENCES[name]
    input_ids = torch.arange(sum(lengths))[None] % 61 + 3
    labels = torch.full_like(input_ids, -100) if name == "a single label" else input_ids.clone()
    labels[0, 5:6] = input_ids[0, 5:6]
    position_ids = torch.cat([torch.arange(length) for length in lengths])[None]
    shard = sequence.shard({"input_ids": input_ids, "labels": labels, "position_ids": position_ids})
    losses = model(**shard.inputs, shift_labels=shard.shift_labels, token_outputs=True).losses
    sequence.reduce(losses, 7).backward()
    return order
