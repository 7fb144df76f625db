"""Expert parallelism of transformers below `parallelize`, in a loop of one's own, against one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from longctx import parallelize
from tests.model.test_models import (
    LENGTHS,
    TOLERANCE,
    documents_of_batch,
    documents_pass,
    largest_error,
    make_batch,
    make_model,
    stock_step,
)
from tests.reference import adamw_steps
from tests.workers import run_ranks

if not hasattr(DistributedConfig, "efsdp_size"):
    pytest.skip("this transformers does not combine expert parallelism with FSDP2", allow_module_level=True)

FAMILIES = ("mixtral", "qwen3_moe")
RATES = [1e-3, 1e-3, 1e-3]


def reference_losses(family: str) -> list[float]:
    """Losses of AdamW steps on one process, with gradients clipped to a norm of 1."""
    model = make_model(family)
    return adamw_steps(model, RATES, lambda step: documents_pass(model, documents_of_batch())[1])[0]


def train_experts_in_parallel(folder: str, family: str, sp: int, ep_size: int, backend: str) -> dict[str, float]:
    """Relative errors on this rank of the first step's logits and gradients, and of the losses of all steps."""
    expected_logits, _, expected_gradients = stock_step(make_model(family))
    how = DistributedConfig(fsdp_size=dist.get_world_size(), ep_size=ep_size)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=how).train()
    assert model.model.layers[0].mlp.experts.down_proj.to_local().shape[0] == 4 // dist.get_world_size()
    model, sequence = parallelize(model, sp, sp_backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    batch, errors, losses = make_batch(), {}, []
    for rate in RATES:
        shard = sequence.shard(batch)
        logits = model(**shard.inputs).logits
        loss = sequence.loss(logits, shard.shift_labels, sequence.count_label_tokens([batch]))
        loss.backward()
        gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
        if not errors:
            whole = sequence.unshard(logits.detach(), shard.layout)
            assert logits.shape[1] == sum(LENGTHS) // sp
            errors["logits"] = float((whole - expected_logits).norm() / expected_logits.norm())
            errors["gradients"] = largest_error(gradients, expected_gradients)
            with pytest.raises(RuntimeError, match="must have the same mesh"):  # why `longctx train` refuses it
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm = torch.nn.utils.get_total_norm(gradients.values())
        for parameter in model.parameters():
            parameter.grad.mul_(1 / norm.clamp(min=1))
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        losses.append(loss.item())
    wanted = reference_losses(family)
    errors["losses"] = max(abs(loss / expected - 1) for loss, expected in zip(losses, wanted, strict=True))
    return errors


def runs(folders: dict[str, str], sp: int, ep_size: int, backends: list[str]) -> dict[tuple[str, str], dict]:
    return {
        (family, backend): train_experts_in_parallel(folder, family, sp, ep_size, backend)
        for family, folder in folders.items()
        for backend in backends
    }


@pytest.mark.parametrize(
    ("world_size", "sp", "ep_size", "backends"),
    [
        (2, 2, 2, ["ring", "ulysses"]),
        pytest.param(4, 2, 4, ["ring", "ulysses"], marks=pytest.mark.long),  # over two sequence groups
        pytest.param(4, 4, 4, ["ring", "gather", "ulysses", "hybrid"], marks=pytest.mark.long),
        pytest.param(4, 4, 2, ["ring", "gather", "ulysses", "hybrid"], marks=pytest.mark.long),
    ],
)
def test_experts_on_several_ranks_equal_one_process(world_size, sp, ep_size, backends, tmp_path):
    """FSDP2 shards all else, and experts over the ranks that hold the same ones."""
    folders = {}
    for family in FAMILIES:
        make_model(family).save_pretrained(tmp_path / family)
        folders[family] = str(tmp_path / family)
    for results in run_ranks(world_size, f"{__name__}:runs", folders, sp, ep_size, backends):
        assert len(results) == len(FAMILIES) * len(backends)
        assert not {case: errors for case, errors in results.items() if not max(errors.values()) <= TOLERANCE}
