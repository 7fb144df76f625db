"""The interpreter that other tests trust Triton kernels' numbers to: see tests/triton_on_cpu."""

from __future__ import annotations

import pytest
import torch

from tests.workers import run_ranks

pytest.importorskip("triton", reason="Triton, which liger-kernel brings, is not installed")


def _failure(kernel, *arguments, **constants) -> str:
    try:
        kernel[(1,)](*arguments, **constants)
    except Exception as error:
        return str(error)
    return ""


def interpreted() -> dict[str, object]:
    """What the probes compute, by name; run in a process of its own."""
    from tests import triton_on_cpu

    triton_on_cpu.install()
    from tests.triton_on_cpu import probes

    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(1000, generator=generator).bfloat16() for _ in range(2))
    found: dict[str, object] = {"x": x, "y": y}

    found["sum"] = torch.empty_like(x)
    probes.add_kernel[(8,)](x, y, found["sum"], len(x), BLOCK=128)
    few = x[:50].contiguous()
    for dtype in (torch.bfloat16, torch.float32):
        out = torch.empty(2, dtype=dtype)
        probes.divide_and_sum_kernel[(1,)](few.to(dtype), out, len(few), 3.0, BLOCK=64)
        found[f"quotients {dtype}"] = out
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20, float("inf"), float("nan")])
    ties = torch.cat((ties, torch.tensor([3.4e38, 1e-40])))
    found["ties"], found["rounded"] = ties, torch.empty(8, dtype=torch.bfloat16)
    probes.round_kernel[(1,)](ties, found["rounded"], BLOCK=8)
    a, b = (z[:256].view(16, 16).contiguous() for z in (x, y))
    found["product"] = torch.empty(16, 16)
    probes.product_kernel[(1,)](a, b, found["product"], SIZE=16)
    found["tanh"] = torch.empty(64)
    probes.tanh_kernel[(1,)](x[:64].float(), found["tanh"], BLOCK=64)

    found["loop"] = torch.empty(16)
    probes.loop_kernel[(1,)](x[:64].float(), found["loop"], torch.tensor([4]), BLOCK=16)
    found["tuned"] = torch.empty(1)
    probes.tuned_kernel[(1,)](found["tuned"], 1)

    found["careless"] = torch.empty(1)
    probes.careless_sum_kernel[(1,)](torch.ones(5), found["careless"], 5, BLOCK=8)
    found["unknown function"] = _failure(probes.unknown_function_kernel, torch.ones(4), torch.empty(4), BLOCK=4)
    found["atomic"] = torch.ones(4)
    probes.atomic_kernel[(1,)](torch.ones(4), found["atomic"], BLOCK=4)
    found["bf16 atomic"] = _failure(probes.atomic_kernel, few[:4].clone(), few[:4].clone(), BLOCK=4)

    # The rows behind and before belong to the same storage, which is what a load would find there.
    rows = torch.arange(30.0).view(3, 10)
    for shift in (0, 1, -1):
        found[f"shift {shift}"] = _failure(probes.shift_kernel, rows[1], torch.empty(10), 10, shift, BLOCK=16)
    found["short output"] = _failure(probes.shift_kernel, rows[1], torch.empty(20)[:9], 10, 0, BLOCK=16)
    found["short atomic"] = _failure(probes.atomic_kernel, torch.ones(4), torch.zeros(8)[:3], BLOCK=4)
    return found


@pytest.fixture(scope="module")
def found():
    return run_ranks(1, "tests.gpu.test_triton_on_cpu:interpreted", backend=None)[0]


def test_bf16_is_added_and_rounded_as_torch_does(found):
    assert torch.equal(found["sum"], found["x"] + found["y"])


def test_conversions_to_bf16_round_to_the_nearest_and_ties_to_even(found):
    assert torch.equal(found["rounded"].nan_to_num(7), found["ties"].bfloat16().nan_to_num(7))
    assert found["rounded"].isnan().sum() == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_floats_are_scalars_and_sums_are_rounded_once(found, dtype):
    x = found["x"][:50].to(dtype)
    wanted = torch.stack(((x / 3).float().sum(), x.float().exp().sum())).to(dtype)
    # fp32: sums of 50 numbers in another order. bf16: these may lie at a tie, and round to a neighbour.
    assert torch.allclose(found[f"quotients {dtype}"], wanted, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=0)


def test_products_of_bf16_are_added_up_in_fp32(found):
    a, b = (found[name][:256].view(16, 16).double() for name in "xy")
    assert torch.allclose(found["product"].double(), a @ b, rtol=0, atol=1e-5)  # 16 fp32 terms of about 1


def test_functions_of_libdevice(found):
    assert torch.allclose(found["tanh"], found["x"][:64].float().tanh(), rtol=1e-6, atol=1e-7)  # NumPy's last digit
    assert "libdevice's j0 has no counterpart" in found["unknown function"]


def test_loops_count_in_tensors(found):
    blocks = found["x"][:64].float().view(4, 16)
    assert torch.allclose(found["loop"], (blocks * torch.arange(4.0)[:, None]).sum(0) + 1, rtol=0, atol=1e-5)


def test_an_autotuned_kernel_has_its_first_configuration(found):
    assert found["tuned"] == 3


def test_what_a_load_leaves_out_is_not_zero(found):
    assert found["careless"].isnan().all()


def test_atomics(found):
    assert torch.equal(found["atomic"], torch.full((4,), 2.0))
    assert "bits of bf16" in found["bf16 atomic"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("shift 1", "load out of bounds in shift_kernel, program (0, 0, 0): 1 of 10 lanes; the first is +40 bytes"),
        ("shift -1", "load out of bounds in shift_kernel, program (0, 0, 0): 1 of 10 lanes; the first is -4 bytes"),
        ("short output", "store out of bounds in shift_kernel, program (0, 0, 0): 1 of 10 lanes; the first is +36"),
        ("short atomic", "atomic out of bounds in atomic_kernel, program (0, 0, 0): 1 of 4 lanes; the first is +12"),
    ],
)
def test_what_lies_outside_a_tensor_is_not_reached(found, name, message):
    assert message in found[name]
    assert found["shift 0"] == ""
