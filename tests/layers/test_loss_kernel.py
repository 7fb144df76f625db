"""The Triton kernel of the loss: its numbers in the interpreter, its check, and its compilation for GPUs.

Bounds are those of longctx.layers.loss_tile: in between, the kernel computes in fp32, and it rounds the gradient once
to half precision, which changes a number by 2^-8 or 2^-11 of it at most.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from longctx.layers import loss
from longctx.layers.loss_tile import BOUND_OF_OUTPUTS, UNSCALED, TileLoss
from tests.loss_kernel_cases import KINDS, VOCABULARIES
from tests.workers import run_ranks

CASES = "tests.loss_kernel_cases"
ROUNDED = {str(torch.float16): 2**-11, str(torch.bfloat16): 2**-8}


def alone(function):
    return run_ranks(1, f"{CASES}:{function}", backend=None)[0]


@pytest.fixture(scope="module")
def errors():
    return alone("errors")


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_it_equals_fp64(errors, vocabulary, kind, dtype):
    found = errors[vocabulary, kind, dtype]
    assert len(found) == 5
    assert found.pop("gradient") <= ROUNDED[dtype]
    assert max(found.values()) <= BOUND_OF_OUTPUTS, found


def test_a_target_beyond_the_vocabulary_is_refused():
    assert "out of bounds" in alone("refusal_of_a_target_beyond_the_vocabulary")


def test_a_step_with_it_equals_one_with_torchs_operators():
    losses, gradients, launched = alone("step")
    assert launched == 2 * ["_losses_of_a_token", "_gradient_of_a_block"]  # tiles of four times 7 tokens, of 34
    assert losses <= BOUND_OF_OUTPUTS
    assert gradients <= 1e-4  # both round to bf16 from fp32, and few numbers lie between two of its


def test_a_kernel_that_is_off_or_fails_is_passed_over():
    assert alone("agreements") == {
        "sound": (True, True),
        "without smoothing": (False, False),
        "without the cap": (True, False),
        "without top-1 tokens": (False, False),
        "with a rounded gradient": (False, False),
        "with neighbours in odd vocabularies": (False, False),
        "failing": (False, False),
    }


def test_it_compiles_for_each_kind_of_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # else a second run compiles nothing
    made = alone("compiled")
    kernels = ("_losses_of_a_token", "_gradient_of_a_block")
    assert made.keys() == set(itertools.product(kernels, (80, 90, 100), (False, True)))
    assert all({"ptx", "cubin"} <= set(kinds) for kinds in made.values())


TILES = {151_936: 1792, 128_256: 2048, 262_144: 1024, 32_000: 8448, 2_000_000: 132}


def test_a_tile_of_it_is_whole_blocks_of_matrix_products(monkeypatch):
    """Of Qwen3, Llama 3, Gemma 3 and Llama 2; a vocabulary that leaves no room for a block has what fits."""
    weights = {vocabulary: torch.empty(vocabulary, 1, device="meta") for vocabulary in TILES}
    monkeypatch.setattr(loss, "takes_kernel", lambda of, weight: True)
    of = TileLoss(0.0, UNSCALED, torch.bfloat16)
    assert {v: loss._tile_of(of, weight, None, loss.TILE_BYTES) for v, weight in weights.items()} == TILES
    with_bias = {v: loss._tile_of(of, weight, weight[:, 0], loss.TILE_BYTES) for v, weight in weights.items()}
    assert with_bias == {vocabulary: loss.TILE_BYTES // 4 // vocabulary for vocabulary in TILES}
