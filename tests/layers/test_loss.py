"""The fused head against the whole table of logits: values, gradients of every kind, memory, work."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING

import longctx.layers.loss
from longctx.layers.loss import TILE_BYTES, UNSCALED, LogitScaling, TokenOutputs, fuse_head, fused_token_outputs
from tests.few import few
from tests.model.test_models import (
    FAMILIES,
    LENGTHS,
    make_batch,
    make_model,
    step_errors,
    stock_step,
    tolerance,
)
from tests.reference import train_reference
from tests.small_model import save_small_model
from tests.training.test_training import COMMON, LEARNING_RATE, STEPS, check, make_documents, write_jsonl
from tests.workers import run_ranks

HIDDEN, VOCABULARY, TOKENS = 6, 37, 23
"""37 and 23 are multiples of nothing."""

SCALINGS = {
    "plain": UNSCALED,
    "factor": LogitScaling(0.3),
    "cap": LogitScaling(1.0, 2.0),
    "both": LogitScaling(1.7, 3.0),
}
SCALINGS |= {"temperature": LogitScaling(1.7, 3.0, temperature=0.6)}
LABELS = {
    "some learnt": lambda labels: labels[:, ::3].fill_(-100),
    "all learnt": lambda labels: None,
    "none learnt": lambda labels: labels.fill_(-100),
    "one learnt": lambda labels: labels[:, 1:].fill_(-100),
}


def make_inputs(dtype=torch.float64, *, bias=True, learnt="some learnt", tokens=TOKENS, vocabulary=VOCABULARY):
    """hidden, weight, bias or None, and targets."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, tokens, HIDDEN), (vocabulary, HIDDEN), (vocabulary,))
    hidden, weight, b = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    targets = torch.randint(0, vocabulary, (1, tokens), generator=generator)
    LABELS[learnt](targets)
    leaves = [x.requires_grad_() for x in (hidden, weight, *([b] if bias else []))]
    return *leaves, *([] if bias else [None]), targets


def dense(hidden, weight, bias, targets, *, label_smoothing=0.0, scaling=UNSCALED, mean_logits=False):
    """The same from all logits at once, in torch's own words."""
    logits = F.linear(hidden, weight, bias) * scaling.factor
    if scaling.softcap:
        logits = scaling.softcap * torch.tanh(logits / scaling.softcap)
    logits = logits / scaling.temperature
    logits = logits if logits.dtype == torch.float64 else logits.float()
    learnt, flat = targets != -100, targets.flatten()
    losses, nll = (
        F.cross_entropy(logits[0], flat, reduction="none", ignore_index=-100, label_smoothing=smoothing)[None]
        for smoothing in (label_smoothing, 0.0)
    )
    entropy = torch.distributions.Categorical(logits=logits.detach()).entropy() * learnt
    is_top1 = (logits.argmax(-1) == targets) & learnt
    means = logits.detach().mean(-1) * learnt if mean_logits else None
    return TokenOutputs(losses, -nll.detach(), entropy, is_top1, means)


def upstream(kind, losses):
    """A loss of token losses: their sum, as in training, or each with a weight of its own."""
    weights = torch.linspace(-1, 2, losses.numel(), dtype=losses.dtype).view_as(losses)
    return losses.sum() * 0.7 if kind == "summed" else (losses * weights).sum()


@pytest.mark.parametrize("kind", ["summed", "weighted"])
@pytest.mark.parametrize("learnt", LABELS)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("tile", [1, 5, 1000])
def test_outputs_and_gradients_are_those_of_all_logits(tile, bias, learnt, kind):
    """In fp64, so that only a wrong formula can differ by more than 1e-12."""
    *leaves, targets = make_inputs(bias=bias, learnt=learnt)
    for (_, scaling), smoothing in itertools.product(SCALINGS.items(), (0.0, 0.3)):
        settings = {"label_smoothing": smoothing, "scaling": scaling, "mean_logits": True}
        expected = dense(*leaves, targets, **settings)
        actual = fused_token_outputs(*leaves, targets, **settings, tile_bytes=tile * VOCABULARY * 4)
        for name, a, e in zip(TokenOutputs._fields, actual, expected, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
        found, right = (
            torch.autograd.grad(upstream(kind, outputs.losses), [x for x in leaves if x is not None])
            for outputs in (actual, expected)
        )
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["summed", "weighted"])
def test_what_nobody_reads_is_none_and_changes_no_bit(kind):
    *leaves, targets = make_inputs(torch.float32)
    runs = [fused_token_outputs(*leaves, targets, is_top1=logs, mean_logits=logs) for logs in (True, False)]
    assert runs[1][3:] == (None, None)
    assert all(map(torch.equal, runs[0][:3], runs[1][:3]))
    assert all(map(torch.equal, *(torch.autograd.grad(upstream(kind, run.losses), leaves) for run in runs)))


def test_a_gradient_in_half_precision_is_rounded_after_it_is_multiplied():
    """And the one factor of a sum, 1/37, is not rounded itself."""
    *leaves, targets = make_inputs(torch.float32)
    low = [x.detach().bfloat16().requires_grad_() for x in leaves]
    made = {}
    for factor in (1, 1 / 37):
        loss = fused_token_outputs(*low, targets, tile_bytes=4 * VOCABULARY * 100).losses.sum() * factor
        made[factor] = torch.autograd.grad(loss, low)
    (hidden, *_), (scaled, *_) = made.values()
    assert torch.equal(scaled, (hidden.float() * torch.tensor(1 / 37)).bfloat16())
    assert not torch.equal(scaled, hidden * torch.tensor(1 / 37).bfloat16())


def test_backward_can_run_again():
    *leaves, targets = make_inputs()
    loss = upstream("summed", fused_token_outputs(*leaves, targets).losses)
    first = [grad.clone() for grad in torch.autograd.grad(loss, leaves, retain_graph=True)]
    torch.testing.assert_close(list(torch.autograd.grad(loss, leaves)), first)


def test_bf16_is_as_near_as_all_logits_in_bf16():
    """Against fp64 from the same inputs. Both round products to bf16, 3 digits; sums over tiles must not add to it:
    the weight's run in fp32. 1.5 because roundings are random.
    """
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.rand(1, 512, 64, generator=generator), torch.randn(1000, 64, generator=generator) / 20
    inputs = [hidden.bfloat16(), weight.bfloat16()]
    targets = torch.randint(0, 1000, (1, 512), generator=generator)
    runs = {"fp64": (dense, torch.float64), "dense": (dense, torch.bfloat16)}
    runs |= {"fused": (lambda *inputs: fused_token_outputs(*inputs, tile_bytes=4000), torch.bfloat16)}
    results = {}
    for name, (run, dtype) in runs.items():
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        losses = run(*leaves, None, targets).losses
        assert losses.dtype == (dtype if dtype is torch.float64 else torch.float32)
        grads = torch.autograd.grad(losses.sum() * 0.0123, leaves)
        assert [grad.dtype for grad in grads] == [dtype, dtype]
        results[name] = [x.detach().double() for x in (losses, *grads)]
    for exact, all_logits, fused in zip(results["fp64"], results["dense"], results["fused"], strict=True):
        assert (fused - exact).norm() <= 1.5 * (all_logits - exact).norm()


def test_autocast_projects_in_its_dtype():
    hidden, weight, bias, targets = make_inputs(torch.float32)
    low = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight, bias)]
    expected = fused_token_outputs(*low, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = fused_token_outputs(hidden, weight, bias, targets)
    torch.testing.assert_close(actual, expected)
    grads = torch.autograd.grad(actual.losses.sum(), (hidden, weight, bias))
    assert {grad.dtype for grad in grads} == {torch.float32}
    for grad, from_low in zip(grads, torch.autograd.grad(expected.losses.sum(), low), strict=True):
        torch.testing.assert_close(grad.bfloat16(), from_low)


class _Sizes(TorchDispatchMode):
    """Elements of the largest tensor that any operator returns, by what it is made of."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.largest = max([self.largest, *sizes])
        return out


@pytest.mark.parametrize("kind", ["summed", "weighted"])
@pytest.mark.parametrize(("tokens", "vocabulary", "hidden"), [(4096, 151_936, 64), (30_000, 32_001, 16)])
def test_no_tensor_is_larger_than_a_tile(tokens, vocabulary, hidden, kind):
    """Forward and backward, traced at real sizes; [S, V] would be 9 and 14 tiles."""
    with FakeTensorMode():
        leaves = [torch.empty(1, tokens, hidden), torch.empty(vocabulary, hidden)]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        targets = torch.zeros(1, tokens, dtype=torch.long)
        with _Sizes() as sizes:
            upstream(kind, fused_token_outputs(*leaves, None, targets, label_smoothing=0.1).losses).backward()
    assert sizes.largest <= max(TILE_BYTES // 4, vocabulary * hidden)
    assert sizes.largest >= TILE_BYTES // 4 - vocabulary  # and tiles are as large as they may be


@pytest.mark.parametrize("learnt", LABELS)
def test_only_learnt_tokens_are_projected(learnt):
    """Two products of h · V a token that torch counts: logits, and the gradient of hidden from them."""
    hidden, weight, _, targets = make_inputs(bias=False, learnt=learnt)
    with FlopCounterMode(display=False) as flops:
        fused_token_outputs(hidden, weight, None, targets).losses.sum().backward()
    assert flops.get_total_flops() == int((targets != -100).sum()) * 2 * 2 * VOCABULARY * HIDDEN


def compare_with_stock(family, **memory_options):
    model = make_model(family)
    expected = stock_step(model)
    errors = step_errors(*longctx.parallelize(model, 1, **memory_options), expected, fused_head=True)
    assert max(errors.values()) <= tolerance(family), errors


@pytest.mark.parametrize("family", few(FAMILIES))
def test_head_of_every_family_equals_stock_transformers(family):
    """Which scales its logits in its own way."""
    compare_with_stock(family)


@pytest.mark.parametrize("family", ["llama", "gemma"])  # a head of its own, and one tied to the embeddings
def test_head_after_layers_that_leave_their_output_in_host_memory(family, monkeypatch):
    real, shapes = longctx.layers.loss.host_empty, []

    def host_empty(*shape, **kwargs):
        shapes.append(shape)
        return real(*shape, **kwargs)

    monkeypatch.setattr(longctx.layers.loss, "host_empty", host_empty)
    compare_with_stock(family, sequence_chunk_size=8)
    assert shapes == [(1, sum(LENGTHS), make_model(family).config.hidden_size)]  # the gradient of its input


@pytest.mark.parametrize("labels", ["as cut", "changed in place", "others", "changed in inference mode"])
def test_labels_that_change_after_the_cut_count(labels):
    """The positions of labels are worked out when a batch is cut; a loop may put other labels in their place."""
    model, sequence = longctx.parallelize(make_model("llama"), 1)
    with torch.inference_mode(labels == "changed in inference mode"):
        shard = sequence.shard(make_batch())
        targets = shard.shift_labels
        assert (targets == -100).any()
        if labels == "others":
            targets = torch.where(targets == -100, 5, targets)
        elif labels != "as cut":
            targets[targets == -100] = 5
            targets[:, :4] = -100
        outputs = model(**shard.inputs, shift_labels=targets, token_outputs=True)
        expected = longctx.layers.loss.token_losses(model(**shard.inputs).logits, targets)
    assert torch.equal(outputs.losses != 0, targets != -100)
    torch.testing.assert_close(outputs.losses, expected)  # fp32, sums in another order


@pytest.mark.parametrize(
    ("model_type", "settings", "expected"),
    [
        ("llama", {}, (1.0, None)),
        ("cohere", {"logit_scale": 0.25}, (0.25, None)),
        ("granite", {"logits_scaling": 4.0}, (0.25, None)),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, (1.0, 30.0)),
        ("falcon_h1", {"lm_head_multiplier": 0.5}, (0.5, None)),
    ],
)
def test_scaling_of_the_logits_by_their_names_in_configurations(model_type, settings, expected):
    assert LogitScaling.of_model(CONFIG_MAPPING[model_type](**settings))[:2] == expected


IDS = torch.arange(3, 20)[None]
TARGETS = IDS.roll(-1, 1)


def test_the_model_is_otherwise_what_it_was():
    plain, model = make_model("qwen3"), make_model("qwen3")
    fuse_head(model)
    expected = plain(input_ids=IDS, labels=IDS, use_cache=False)
    actual = model(input_ids=IDS, labels=IDS, use_cache=False)
    assert torch.equal(actual.logits, expected.logits)
    assert torch.equal(actual.loss, expected.loss)
    shifted = model(input_ids=IDS, labels=IDS, shift_labels=TARGETS).loss
    assert torch.equal(shifted, plain(input_ids=IDS, labels=IDS, shift_labels=TARGETS).loss)
    kwargs = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(IDS, **kwargs), plain.generate(IDS, **kwargs))


@pytest.mark.long
def test_a_head_that_engines_shard(tmp_path, parity_table):
    """ZeRO-3 shards weights of 100,000 elements and more, of which other tests' models have none. Not a larger one:
    torch's fp32 norm of it would be off by 3e-5.
    """
    vocabulary, hidden, documents = 272, 384, make_documents([90, 7, 41, 60])
    common = [*COMMON, "--packing", "True", "--dataset_name", write_jsonl(tmp_path / "data.jsonl", documents)]
    common += ["--sp", "2", "--sp_backend", "ulysses"]
    cases, references = {}, {}
    for tied in (True, False):
        model = save_small_model(
            tmp_path / f"{tied}", vocab_size=vocabulary, hidden_size=hidden, tie_word_embeddings=tied
        )
        reference = train_reference(model, documents, steps=STEPS, learning_rate=LEARNING_RATE)
        for engine in ("deepspeed", "fsdp2"):
            case = f"{'tied' if tied else 'untied'} head, {engine}"
            cases[case] = [*common, "--engine", engine, "--model_name_or_path", model]
            cases[case] += ["--output_dir", str(tmp_path / case)]
            references[case] = reference
    for case, results in run_ranks(2, "tests.training.test_training:run_cases", cases)[0].items():
        check(results, references[case], case, "torchrun", parity_table)
