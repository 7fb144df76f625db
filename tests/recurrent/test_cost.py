"""The modelled cost of recurrent layers: which way a batch takes, and what forecasts say of their seconds and bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import CONFIG_MAPPING

from benchmarks.shapes import shape_of
from longctx.attention.cost import Arrangement, Setup
from longctx.forecast.memory import device_moments
from longctx.forecast.model_sizes import ModelSizes
from longctx.forecast.seconds import step_seconds
from longctx.forecast.shape import RunShape
from longctx.machine.here import Machine
from longctx.model.recurrent import num_mixing_layers, recurrent_sizes
from longctx.recurrent.cost import recurrent_time
from longctx.recurrent.pieces import Pieces
from tests.recurrent.cases import layout_of

NEXT = CONFIG_MAPPING["qwen3_next"]()  # 16 key heads of 128, 32 value heads of 128
ULYSSES, RING = (Arrangement(name=name, ring=ring, ulysses=8 // ring) for name, ring in (("ulysses", 1), ("ring", 8)))
TOKENS = 8 * 16_384


H100S = Machine.of("H100", 8, "flash-attn 3")


def in_attention(shape: RunShape, tokens: int) -> dict[str, float]:
    return device_moments(shape, tokens, is_cpu=False)["attention"]


def setup_of(per_node: int) -> Setup:
    return Setup.of_model(NEXT, 8, element_size=2, machine=Machine.of("H100", per_node))


def test_sizes_of_a_known_model():
    sizes = recurrent_sizes(NEXT)
    assert sizes.heads == 16
    assert sizes.exchanged == 2 * 2048 + 2 * 4096 + 2 * 32
    assert sizes.given == 32 * 128 * 256
    kimi = CONFIG_MAPPING["kimi_linear"]()  # 32 heads of 128
    assert recurrent_sizes(kimi).heads == 32
    assert recurrent_sizes(kimi).exchanged == 6 * 4096 + 32  # q, k, v, the output, and decays of key channels in fp32
    assert recurrent_sizes(kimi).given == 32 * 128 * 256
    assert num_mixing_layers(NEXT) == NEXT.num_hidden_layers
    assert num_mixing_layers(CONFIG_MAPPING["falcon_h1"](num_hidden_layers=3)) == 6
    assert recurrent_sizes(CONFIG_MAPPING["llama"]()) is None


def test_bytes_decide_between_nodes():
    """By heads, a rank sends 7/8 of its tokens' elements four times; between nodes that takes longer than the maps."""
    time = recurrent_time(setup_of(per_node=1), ULYSSES, TOKENS)
    sent = 2 * recurrent_sizes(NEXT).exchanged * 16_384 * 2 * 7 / 8
    assert time.by_heads >= sent / setup_of(1).machine.speeds.across.exchange
    assert not time.prefers_heads
    assert recurrent_time(setup_of(per_node=8), ULYSSES, TOKENS).by_heads < time.by_heads / 3


def test_a_ring_gives_two_maps_for_each_rank():
    less, more = (recurrent_time(setup_of(1), way, TOKENS).by_states for way in (ULYSSES, RING))
    gathered = 4 * recurrent_sizes(NEXT).given * 8
    assert more - less >= 2 * gathered * 7 / 8 / setup_of(1).machine.speeds.across.exchange


def test_forecasts_count_what_kimi_delta_attention_writes():
    """Beside products: 64 numbers for each key channel, of at most a segment at a time, but over all tokens."""
    sizes = recurrent_sizes(CONFIG_MAPPING["kimi_linear"]())
    assert sizes.written == 64 * 4096
    llama = replace(ModelSizes.of_config(CONFIG_MAPPING["llama"](num_hidden_layers=4)), num_recurrent_layers=3)
    shapes = [shape_of(replace(llama, recurrent=of)) for of in (sizes, replace(sizes, written=0))]
    scans = [[in_attention(shape, tokens)["scan"] for tokens in (512, 1024, TOKENS)] for shape in shapes]
    assert scans == [[6 * 4 * sizes.written * tokens for tokens in (512, 1024, 1024)], [0, 0, 0]]
    more, none = (step_seconds(shape, H100S, TOKENS, [TOKENS])["recurrent"] for shape in shapes)
    assert more - none >= 3 * 5 * 15 * 4 * sizes.written * TOKENS / H100S.speeds.memory * 0.99
    kimi = replace(setup_of(8), recurrent=sizes)
    apart = replace(kimi, recurrent=shapes[1].model.recurrent)
    assert recurrent_time(kimi, RING, TOKENS).by_states > 2 * recurrent_time(apart, RING, TOKENS).by_states
    assert recurrent_time(kimi, RING, TOKENS).prefers_heads


def test_documents_that_no_rank_shares_pass_no_states():
    layout = layout_of([8] * 8, 1, 8)
    time = recurrent_time(setup_of(8), ULYSSES, layout.num_tokens, Pieces.of(layout, 0))
    assert time.by_states == 0
    assert not time.prefers_heads


def test_heads_that_ranks_cannot_share_pass_states():
    setup = replace(setup_of(8), recurrent=replace(recurrent_sizes(NEXT), heads=12))
    time = recurrent_time(setup, ULYSSES, TOKENS)
    assert time.by_heads is None
    assert not time.prefers_heads
    assert "cannot share their heads" in time.describe()


@pytest.mark.parametrize(("sp", "ring", "slots"), [(1, 1, 0), (8, 1, 1), (8, 8, 2)])
def test_forecasts_count_scans_and_maps(sp, ring, slots):
    """The forecast adds both to that of the same model without recurrent layers.

    The gathered maps are counted among what attention's backward pass makes.
    """
    model = replace(ModelSizes.of_config(CONFIG_MAPPING["llama"](num_hidden_layers=4)), recurrent=recurrent_sizes(NEXT))
    mixed = replace(model, num_recurrent_layers=3, num_attended=1)
    shape = shape_of(mixed, world_size=8, sp=sp, ring=ring, engine="fsdp2")
    parts = step_seconds(shape, H100S, TOKENS, [TOKENS])
    whole = step_seconds(replace(shape, model=model), H100S, TOKENS, [TOKENS])
    scan = recurrent_sizes(NEXT).flops * TOKENS / sp / H100S.speeds.attention_forward
    assert parts["recurrent"] >= 3 * 4 * scan
    assert parts["attention"] == pytest.approx(whole["attention"] / 4)
    plain = replace(shape, model=replace(model, recurrent=None))
    more, none = (in_attention(each, TOKENS)["exchange"] for each in (shape, plain))
    assert more - none == pytest.approx(2 * 4 * recurrent_sizes(NEXT).given * sp * slots)
