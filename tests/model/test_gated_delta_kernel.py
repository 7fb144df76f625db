"""The delta rules' kernels on GPUs, flash-linear-attention's: with numbers in Triton's interpreter, or refused.

The interpreter (tests/triton_on_cpu) has a GPU's arithmetic and checks every address; what only a GPU and a compiler
do, it does not show. The package is no dependency: its wheel is downloaded for these tests, and is not installed.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
import zipfile
from functools import partial

import pytest
import torch
import transformers
from packaging.version import Version
from transformers.models.qwen3_next import modeling_qwen3_next

from longctx import parallelize
from longctx.recurrent import gated_delta, layers
from longctx.recurrent.gated_delta import KERNEL_BOUND, DeltaHeads, check_delta_rule, takes_kernel
from longctx.recurrent.layers import delta_rule_layers
from tests.model.test_models import TOLERANCE, make_batch, make_model
from tests.workers import run_ranks

CASES = "tests.fla_cases"
RELEASE = "0.6.0"
SHARED = 2 if Version(transformers.__version__) >= Version("5.23") else 1
"""Value heads that share a key head in the small models, as their rule is called. Older layers repeat the key heads."""
GPU = torch.device("cuda")
STATES = ("chunk_gated_delta_rule_fwd_kernel_h_blockdim64", "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64")
SCALAR = "chunk_local_cumsum_scalar_kernel"
CHANNELS = "chunk_local_cumsum_vector_kernel"
MIXING = {"qwen3_next": {SCALAR, *STATES}, "qwen3_5_text": {SCALAR, *STATES}, "kimi_linear": {CHANNELS, *STATES}}
"""Of a model's kernels, those that are told where documents begin and carry the state from chunk to chunk."""


# ------------------------------------------------------------------------------------------------
# flash-linear-attention
# ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The folder of the package's wheel, downloaded as pip does."""
    folder = tmp_path_factory.mktemp("fla")
    command = [sys.executable, "-m", "pip", "download", f"fla-core=={RELEASE}", "--no-deps", "--dest", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"fla-core {RELEASE} cannot be downloaded: {done.stderr.strip().splitlines()[-1]}")
    [path] = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder)
    return str(folder)


@pytest.mark.long
def test_kernels_equal_the_recurrence_in_fp64(wheel):
    """Outputs and all gradients of packed documents, as the layers call the kernel: fp32 to 1e-5, bf16 as on a GPU."""
    found = run_ranks(1, f"{CASES}:kernels", wheel, backend=None, timeout=900)[0]
    assert len(found) == 2 * (8 + 6)
    bounds = {"torch.float32": 1e-5, "torch.bfloat16": KERNEL_BOUND / 2}
    wrong = {case: errors for case, errors in found.items() if not max(errors) <= bounds[case[-1]]}
    assert not wrong


@pytest.mark.long
def test_the_check_of_a_runs_start_accepts_them(wheel):
    found = run_ranks(1, f"{CASES}:checked", wheel, backend=None, timeout=900)[0]
    for name, kernels in MIXING.items():
        # the strength's gradient of one token alone is a difference of larger numbers: 1.4e-2
        assert max(found[name]) <= 0.75 * KERNEL_BOUND, found
        assert kernels <= found[f"{name} ran"]


@pytest.mark.long
@pytest.mark.parametrize("sp", [1, 2])
def test_models_equal_stock_transformers(wheel, sp):
    """In fp32, which a GPU would round to TF32 in these kernels."""
    for found in run_ranks(sp, f"{CASES}:models", wheel, backend="gloo" if sp > 1 else None, timeout=900):
        for errors in found.values():
            assert errors.pop("kernels") >= 3
            assert max(errors.values()) <= TOLERANCE, found


# ------------------------------------------------------------------------------------------------
# Which operators compute the rule
# ------------------------------------------------------------------------------------------------


def on_gpu(dtype):
    class OnGpu(torch.Tensor):
        is_cuda = True

    return torch.zeros(1, dtype=dtype).as_subclass(OnGpu)


@pytest.mark.parametrize("is_installed", [True, False])
def test_the_kernel_is_for_half_precision_on_gpus(is_installed, monkeypatch):
    monkeypatch.setattr(gated_delta, "is_flash_linear_attention_available", lambda: is_installed)
    assert takes_kernel(on_gpu(torch.bfloat16)) == takes_kernel(on_gpu(torch.float16)) == is_installed
    assert not takes_kernel(on_gpu(torch.float32))
    assert not takes_kernel(on_gpu(torch.float64))
    assert not takes_kernel(torch.zeros(1, dtype=torch.bfloat16))


@pytest.fixture
def layer():
    return delta_rule_layers(make_model("qwen3_next"))[0]


@pytest.fixture
def installed(monkeypatch, layer):
    """Puts a rule in the place of the package's kernel, on a GPU that is the CPU."""

    def install(rule):
        own = inspect.unwrap(modeling_qwen3_next.torch_chunk_gated_delta_rule)
        rule.__wrapped__ = own
        monkeypatch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", rule)
        monkeypatch.setattr(gated_delta, "is_flash_linear_attention_available", lambda: True)
        errors = gated_delta.kernel_errors
        on_cpu = partial(errors, device=CPU)
        monkeypatch.setattr(gated_delta, "kernel_errors", lambda *given, **kwargs: on_cpu(*given[:2], **kwargs))
        return own

    return install


CPU = torch.device("cpu")


def check(layer, device=GPU, *, with_states=False):
    rule = modeling_qwen3_next.torch_chunk_gated_delta_rule
    check_delta_rule(rule, DeltaHeads.of(layer), device, with_states=with_states)


def by_document(rule, q, k, v, *, g, beta, cu_seqlens, initial_state=None, output_final_state=False, **kwargs):
    lengths = cu_seqlens.diff().tolist()
    documents = zip(*(x.split(lengths, dim=1) for x in (q, k, v, g, beta)), strict=True)
    states = [None] * len(lengths) if initial_state is None else initial_state.split(1)
    kwargs["output_final_state"] = output_final_state
    results = [
        rule(q, k, v, g=g, beta=beta, initial_state=state, **kwargs)
        for (q, k, v, g, beta), state in zip(documents, states, strict=True)
    ]
    out = torch.cat([of_tokens for of_tokens, _ in results], dim=1)
    return out, torch.cat([state for _, state in results]) if output_final_state else None


@pytest.mark.parametrize("with_states", [False, True])
def test_an_exact_kernel_is_accepted(installed, layer, with_states):
    def kernel(*args, **kwargs):
        return by_document(own, *args, **kwargs)

    own = installed(kernel)
    check(layer, with_states=with_states)


@pytest.mark.parametrize("forgets", ["first states", "gradients of last states"])
def test_a_kernel_that_loses_states_is_refused_where_they_pass_between_ranks(installed, layer, forgets):
    def kernel(*args, initial_state=None, **kwargs):
        if forgets == "first states" and initial_state is not None:
            initial_state = 0 * initial_state
        out, last = by_document(own, *args, initial_state=initial_state, **kwargs)
        return out, last if forgets == "first states" or last is None else last.detach() + 0 * last

    own = installed(kernel)
    check(layer)
    with pytest.raises(ValueError, match="rule is off by"):
        check(layer, with_states=True)


def test_a_kernel_that_does_not_know_shared_keys_is_refused(installed, layer):
    """As releases before 0.5 read them: as many value heads as key heads, from the first numbers of a longer row."""
    if SHARED == 1:
        pytest.skip("layers of this transformers repeat their key heads, and no kernel sees shared ones")

    def kernel(q, k, v, *, g, beta, **kwargs):
        read = (x.flatten()[: x[:, :, : k.shape[2]].numel()].view_as(x[:, :, : k.shape[2]]) for x in (v, g, beta))
        v_read, g_read, beta_read = read
        out, _ = by_document(own, q, k, v_read, g=g_read, beta=beta_read, **kwargs)
        return torch.cat([out.flatten(), out.new_zeros(v.numel() - out.numel())]).view_as(v), None

    own = installed(kernel)
    with pytest.raises(
        ValueError, match=r"is off by .* Run `pip install --upgrade flash-linear-attention`, or uninsta"
    ):
        check(layer)


def test_a_kernel_that_fails_is_refused(installed, layer):
    def kernel(*args, **kwargs):
        raise RuntimeError("no kernel image\nis available")

    installed(kernel)
    with pytest.raises(
        ValueError, match=r"rule fails on this machine in bf16: RuntimeError: no kernel image\. Run `pip"
    ):
        check(layer)


def test_other_operators_are_transformers_own(installed, layer):
    """On the CPU, whatever is installed: the kernel would fail there."""

    def kernel(*args, **kwargs):
        pytest.fail("the kernel ran on the CPU")

    installed(kernel)
    check(layer, CPU)
    model, sequence = parallelize(make_model("qwen3_next"), 1)
    model(**sequence.shard(make_batch()).inputs)


def test_without_the_package_a_gpu_is_told_of_it(monkeypatch, layer, caplog):
    monkeypatch.setattr(gated_delta, "is_flash_linear_attention_available", lambda: False)
    monkeypatch.setattr(gated_delta.logger, "disabled", False)  # whatever libraries of other tests have set
    with caplog.at_level("WARNING", logger=gated_delta.logger.name):
        check(layer)
    assert "pip install flash-linear-attention" in caplog.text


def of_shared_keys(self, q, k):
    return q, k


def of_repeated_keys(self, q, k):
    return q.repeat_interleave(2, dim=2), k.repeat_interleave(2, dim=2)


@pytest.mark.parametrize(("forward", "shared"), [(of_shared_keys, 2), (of_repeated_keys, 1)])
def test_keys_that_a_layer_repeats_are_not_shared(forward, shared):
    """As layers before transformers 5.23 do, whose operators know no shared keys."""
    sizes = {"num_v_heads": 4, "num_k_heads": 2, "head_k_dim": 8, "head_v_dim": 6}
    layer = type("Layer", (), sizes | {"forward": forward})()
    assert DeltaHeads.of(layer).values_per_key == shared


def test_both_rules_of_a_model_are_checked(monkeypatch):
    checked = []
    monkeypatch.setattr(layers, "check_delta_rule", lambda rule, heads, *_, **__: checked.append(heads))
    layers.check_recurrent(make_model("kimi_linear"), GPU, with_states=False)
    layers.check_recurrent(make_model("qwen3_next"), GPU, with_states=False)
    assert [(heads.rule, heads.values_per_key) for heads in checked] == [
        ("Kimi Delta Attention", 1),
        ("the gated delta rule", SHARED),
    ]
