"""The modelled cost of recurrent layers: which way a batch takes, and what forecasts say of their seconds and bytes."""

from __future__ import annotations

from dataclasses import replace

from transformers import CONFIG_MAPPING

from benchmarks.shapes import shape_of
from longctx.attention.cost import Arrangement, Setup
from longctx.forecast.memory import device_moments
from longctx.forecast.model_sizes import ModelSizes
from longctx.forecast.seconds import step_seconds
from longctx.forecast.shape import RunShape
from longctx.machine.here import Machine
from longctx.model.recurrent import recurrent_sizes
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
