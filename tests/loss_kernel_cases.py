"""The kernel of the loss in Triton's interpreter, for tests/layers/test_loss_kernel.py. Call these in own processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests import triton_on_cpu

VOCABULARIES = {"one block": 300, "a whole block": 8192, "three blocks": 16_500}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1},
    "scaled": {"factor": 0.25},
    "smoothed and scaled": {"label_smoothing": 0.3, "factor": 3.0},
}
TOKENS = 6


def errors() -> dict[tuple[str, str, str], dict[str, float]]:
    """{(vocabulary, kind, dtype): relative errors against fp64 from the same products}. Guesses are equal.

    An entropy is the difference of the log-sum-exp and a mean of logits, so that its error is one of the log-sum-exp.
    """
    triton_on_cpu.install()
    from longctx.layers.loss_kernel import fused_losses

    found = {}
    for of, vocabulary in VOCABULARIES.items():
        for kind, options in KINDS.items():
            for dtype in (torch.float16, torch.bfloat16):
                products, targets = problem(vocabulary, dtype)
                expected = exact(products.double(), targets, **options)
                options = {"factor": 1.0, "label_smoothing": 0.0} | options
                read = fused_losses(products.clone(), targets, **options, with_grad=False)
                results = fused_losses(products, targets, **options, with_grad=True)
                assert all(torch.equal(x, y) for x, y in zip(read, results, strict=True))
                losses, log_probs, entropies, guesses, means = results
                assert torch.equal(guesses, expected["guesses"])
                lse = expected["lse"]
                pairs = {
                    "losses": (losses, expected["losses"]),
                    "log_probs": (log_probs, expected["log_probs"]),
                    "entropies": (entropies + lse, expected["entropies"] + lse),
                    "means": (means, expected["means"]),
                    "gradient": (products, expected["gradient"]),
                }
                found[of, kind, str(dtype)] = {name: relative(*pair) for name, pair in pairs.items()}
    return found


def problem(vocabulary: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Products whose largest is in the first block, in the last, or there twice; targets at both ends and between.

    Some logits are -inf, as of a part of the vocabulary that is left out: one, or all of the first block.
    """
    generator = torch.Generator().manual_seed(vocabulary)
    products = 4 * torch.randn(TOKENS, vocabulary, generator=generator)
    products[0, 5] = products[1, -2] = products[2, 7] = products[2, -3] = 30.0
    products[3, 11] = float("-inf")
    if vocabulary > 8192:
        products[4, :8192] = float("-inf")
    return products.to(dtype), torch.tensor([0, vocabulary - 1, 7, 5, vocabulary // 2, 1])


def exact(
    products: torch.Tensor, targets: torch.Tensor, factor: float = 1.0, label_smoothing: float = 0.0
) -> dict[str, torch.Tensor]:
    """The same in fp64, by autograd."""
    products.requires_grad_()
    logits = products * factor
    log_probs = logits.log_softmax(-1)
    of_targets = log_probs.gather(-1, targets[:, None])[:, 0]
    losses = -(1 - label_smoothing) * of_targets
    if label_smoothing:
        losses = losses - label_smoothing * log_probs.mean(-1)
    finite = log_probs.masked_fill(log_probs.isinf(), 0.0)
    (grad,) = torch.autograd.grad(losses.sum(), products)
    found = {
        "losses": losses,
        "log_probs": of_targets,
        "entropies": -(log_probs.exp() * finite).sum(-1),
        "guesses": logits.argmax(-1),
        "lse": logits.logsumexp(-1),
        "means": logits.mean(-1),
        "gradient": grad,
    }
    return {name: x.detach() for name, x in found.items()}


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative error of what is finite; infinite losses and means of a token are equal."""
    actual, expected = actual.detach().double(), expected.detach()
    infinite = expected.isinf() | expected.isnan()
    assert torch.equal(actual[infinite].nan_to_num(), expected[infinite].nan_to_num()), (actual, expected)
    actual, expected = actual[~infinite], expected[~infinite]
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))


def refusal_of_a_target_beyond_the_vocabulary() -> str:
    """The message, for a target that is a product of the next token."""
    triton_on_cpu.install()
    from longctx.layers.loss_kernel import fused_losses

    products = torch.zeros(2, 8, dtype=torch.bfloat16)
    try:
        fused_losses(products, torch.tensor([9, 0]), factor=1.0, label_smoothing=0.0, with_grad=False)
    except (IndexError, RuntimeError) as error:
        return str(error)
    return ""


def agreements() -> dict[str, bool]:
    """What `kernel_agrees` finds of the kernel, and of kernels that are wrong or fail, on the CPU."""
    triton_on_cpu.install()
    from longctx.layers import loss_kernel, loss_tile

    sound, device = loss_kernel.fused_losses, torch.device("cpu")

    def without_smoothing(*args, label_smoothing, **kwargs):
        return sound(*args, label_smoothing=0.0, **kwargs)

    def with_rounded_gradient(products, *args, **kwargs):
        results = sound(products, *args, **kwargs)
        products.copy_((products.float() * 256).round() / 256)
        return results

    def with_neighbours_in_odd_vocabularies(products, targets, **kwargs):
        return sound(products, targets - products.shape[1] % 2 * (targets > 0), **kwargs)

    def failing(*args, **kwargs):
        raise RuntimeError("no such GPU")

    found = {}
    for name, kernel in {
        "sound": sound,
        "without smoothing": without_smoothing,
        "with a rounded gradient": with_rounded_gradient,
        "with neighbours in odd vocabularies": with_neighbours_in_odd_vocabularies,
        "failing": failing,
    }.items():
        loss_kernel.fused_losses = kernel
        loss_tile.kernel_agrees.cache_clear()
        found[name] = loss_tile.kernel_agrees(device, torch.bfloat16)
    return found


def compiled() -> dict[tuple[int, bool], list[str]]:
    """{(compute capability, whether with a gradient): the kinds of code that Triton's compiler makes}."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from longctx.layers import loss_kernel

    pointers = {"products": "*bf16", "targets": "*i64", "of_targets": "*bf16", "guesses": "*i64"}
    pointers |= dict.fromkeys(("losses", "log_probs", "entropies", "means"), "*fp32")
    scalars = {"vocabulary": "i32", "factor": "fp32", "smoothing": "fp32"}
    made = {}
    for capability in (80, 90, 100):
        for with_grad in (False, True):
            constants = {"WITH_GRAD": with_grad, "BLOCK": loss_kernel.BLOCK}
            of_names = pointers | scalars | dict.fromkeys(constants, "constexpr")
            kernel = loss_kernel._losses_of_a_token
            signature = {name: of_names[name] for name in kernel.arg_names}
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
            options = {"num_warps": loss_kernel.NUM_WARPS}
            code = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            assert f".target sm_{capability}" in code.asm["ptx"]
            made[capability, with_grad] = sorted(code.asm)
    return made


def step() -> tuple[float, float, list[str]]:
    """Loss and gradient errors of the head in bf16 with the kernel, beside torch's operators, and what was launched."""
    triton_on_cpu.install()
    from longctx.layers import loss, loss_tile

    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(1, 40, 16, generator=generator), torch.randn(500, 16, generator=generator)
    labels = torch.randint(0, 500, (1, 40), generator=generator)
    labels[0, 3:9] = -100
    found = []
    for takes in (False, True):
        loss_tile.takes_kernel = loss.takes_kernel = lambda of, x, takes=takes: takes
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        triton_on_cpu.launched().clear()
        with torch.autocast("cpu", torch.bfloat16):
            outputs = loss.fused_token_outputs(*leaves, None, labels, tile_bytes=4 * 500 * 7)
        outputs.losses.sum().backward()
        found.append((outputs.losses.detach(), torch.cat([F.normalize(x.grad.flatten(), dim=0) for x in leaves])))
    launched = list(triton_on_cpu.launched())
    return *(relative(x, y.double()) for x, y in zip(found[1], found[0], strict=True)), launched
