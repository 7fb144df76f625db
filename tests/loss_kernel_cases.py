"""The kernel of the loss in Triton's interpreter, for tests/layers/test_loss_kernel.py. Call these in own processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests import triton_on_cpu

BLOCK = 4096
VOCABULARIES = {"one block": 300, "a whole block": BLOCK, "three blocks": 8500}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1},
    "scaled": {"factor": 0.25},
    "smoothed and scaled": {"label_smoothing": 0.3, "factor": 3.0},
    "capped": {"softcap": 5.0},
    "capped and all else": {"label_smoothing": 0.2, "factor": 1.7, "softcap": 9.0, "temperature": 0.6},
}
TOKENS = 6


def computed(
    products: torch.Tensor, targets: torch.Tensor, *, label_smoothing: float = 0.0, with_logs: bool = True, **scaling
) -> tuple[Any, torch.Tensor]:
    """`TokenOutputs` with or without what only logs read, and the gradient, by the kernel with options of KINDS."""
    from longctx.layers.loss_tile import LogitScaling, TileLoss, _by_kernel

    logs = {"is_top1": with_logs, "mean_logits": with_logs}
    of = TileLoss(label_smoothing, LogitScaling(**scaling), products.dtype, **logs)
    return _by_kernel(of, products, targets, with_logs)


def errors() -> dict[tuple[str, str, str], dict[str, float]]:
    """{(vocabulary, kind, dtype): relative errors against fp64 from the same products}. Top-1 tokens are equal.

    An entropy is the difference of the log-sum-exp and a mean of logits, so that its error is one of the log-sum-exp.
    """
    triton_on_cpu.install()
    found = {}
    for of, vocabulary in VOCABULARIES.items():
        for kind, options in KINDS.items():
            for dtype in (torch.float16, torch.bfloat16):
                products, targets = problem(vocabulary, dtype)
                expected = exact(products.double(), targets, **options)
                before = products.clone()
                outputs, gradient = computed(products, targets, **options)
                if vocabulary > BLOCK:  # no bit depends on what else is asked for
                    fewer, _ = computed(before, targets, with_logs=False, **options)
                    assert fewer[3:] == (None, None)
                    assert all(map(torch.equal, fewer[:3], outputs[:3]))
                assert gradient is products
                assert torch.equal(outputs.is_top1, expected["guesses"] == targets)
                lse = expected["lse"]
                pairs = {
                    "losses": (outputs.losses, expected["losses"]),
                    "log_probs": (outputs.log_probs, expected["log_probs"]),
                    "entropies": (outputs.entropy + lse, expected["entropies"] + lse),
                    "means": (outputs.mean_logits, expected["means"]),
                    "gradient": (gradient, expected["gradient"]),
                }
                found[of, kind, str(dtype)] = {name: relative(*pair) for name, pair in pairs.items()}
    return found


def problem(vocabulary: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Products whose largest is in the first block, in the last, or there twice; targets at both ends and between.

    A target is the largest alone, the first of two, the second of them, or another. Some logits are -inf, as of a part
    of the vocabulary that is left out: one, or all of the first block.
    """
    generator = torch.Generator().manual_seed(vocabulary)
    products = 4 * torch.randn(TOKENS, vocabulary, generator=generator)
    products[0, 5] = products[1, -2] = products[2, 7] = products[2, -3] = products[5, 1] = products[5, -1] = 30.0
    products[3, 11] = float("-inf")
    if vocabulary > BLOCK:
        products[4, :BLOCK] = float("-inf")
    return products.to(dtype), torch.tensor([0, vocabulary - 2, 7, 5, vocabulary // 2, vocabulary - 1])


def exact(
    products: torch.Tensor,
    targets: torch.Tensor,
    *,
    label_smoothing: float = 0.0,
    factor: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> dict[str, torch.Tensor]:
    """The same in fp64, by autograd."""
    products.requires_grad_()
    logits = products * factor
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
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
    products = torch.zeros(2, 8, dtype=torch.bfloat16)
    try:
        computed(products, torch.tensor([9, 0]))
    except (IndexError, RuntimeError) as error:
        return str(error)
    return ""


def agreements() -> dict[str, tuple[bool, bool]]:
    """What `kernel_agrees` finds, without and with a soft cap, of the kernel and of some that are wrong or fail."""
    triton_on_cpu.install()
    from longctx.layers import loss_kernel, loss_tile

    sound, device = loss_kernel.fused_losses, torch.device("cpu")

    def without_cap(*args, scaling, **kwargs):
        return sound(*args, scaling=scaling._replace(softcap=None), **kwargs)

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
        "without the cap": without_cap,
        "with a rounded gradient": with_rounded_gradient,
        "with neighbours in odd vocabularies": with_neighbours_in_odd_vocabularies,
        "failing": failing,
    }.items():
        loss_kernel.fused_losses = kernel
        loss_tile.kernel_agrees.cache_clear()
        agrees = (loss_tile.kernel_agrees(device, torch.bfloat16, softcap) for softcap in (None, 30.0))
        found[name] = tuple(agrees)
    return found


def compiled() -> dict[tuple[str, int, bool], list[str]]:
    """{(kernel, compute capability, whether capped): the kinds of code that Triton's compiler makes}."""
    from longctx.layers import loss_kernel

    pointers = {"products": "*bf16", "targets": "*i64", "of_targets": "*bf16", "are_top1": "*i1"}
    pointers |= dict.fromkeys(("losses", "log_probs", "entropies", "means", "lses"), "*fp32")
    scalars = {"vocabulary": "i32", "inner": "fp32", "outer": "fp32", "smoothing": "fp32"}
    made = {}
    for kernel in (loss_kernel._losses_of_a_token, loss_kernel._gradient_of_a_block):
        for capability in (80, 90, 100):
            for capped in (False, True):
                constants = {"CAPPED": capped, "WITH_MEANS": True, "WITH_TOP1": True, "BLOCK": loss_kernel.BLOCK}
                constants = {name: constants[name] for name in kernel.arg_names if name in constants}
                of_names = pointers | scalars | dict.fromkeys(constants, "constexpr")
                signature = {name: of_names[name] for name in kernel.arg_names}
                options = {"num_warps": loss_kernel.NUM_WARPS}
                made[kernel.__name__, capability, capped] = compile_for(
                    capability, kernel, signature, constants, options
                )
    return made


def compile_for(capability: int, kernel, signature: dict, constants: dict, options: dict) -> list[str]:
    """The kinds of code that Triton's compiler makes of a kernel for GPUs of this compute capability."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    code = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert f".target sm_{capability}" in code.asm["ptx"]
    return sorted(code.asm)


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
