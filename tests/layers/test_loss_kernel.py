"""The Triton kernel of the loss: its numbers in the interpreter, its check, and its compilation for GPUs.

Bounds are those of longctx.layers.loss_tile: in between, the kernel computes in fp32, and it rounds the gradient once
to half precision, which changes a number by 2^-8 or 2^-11 of it at most.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from longctx.layers.loss_tile import BOUND_OF_OUTPUTS
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
        "without the cap": (True, False),
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
