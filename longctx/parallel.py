"""`longctx.parallelize`: sequence parallelism for any training loop, and for the trainer."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from longctx.attention.backend import AttentionOfBatch, ScheduleOfBatch
from longctx.attention.backends import BACKENDS
from longctx.attention.choice import choose_backend, documents_given, exchange_overlaps
from longctx.attention.cost import Setup
from longctx.attention.interface import install
from longctx.attention.modelled import plan_time
from longctx.data import IGNORE_INDEX
from longctx.layers.checkpoints import LayerCheckpoints, install_checkpoints
from longctx.layers.chunked.layer import install_chunked
from longctx.layers.loss import TokenOutputs, fuse_head, step_loss, token_losses
from longctx.layers.routers import Routers, install_routers
from longctx.layers.tiled_mlp import install_tiled_mlp
from longctx.machine.here import Machine, devices_per_node
from longctx.model.allow_list import check_model
from longctx.model.branches import AUXILIARY_LOSS_OBSTACLE, branch_obstacle
from longctx.model.modules import check_modules, say_whether_tied
from longctx.policy import count_policy_step, policy_loss
from longctx.ranks.agreement import broadcast_object, host_group
from longctx.recurrent.cost import prefers_heads
from longctx.recurrent.layers import check_recurrent
from longctx.regions import region
from longctx.ring.planner import TimeOfPlan
from longctx.sequence.batch import AttentionContext, ShardedBatch
from longctx.sequence.checks import StepCounts, check_same_batch, check_world_size
from longctx.sequence.gather import all_reduce, gather
from longctx.sequence.host_tensors import send
from longctx.sequence.layout import Layout, padding_documents
from longctx.sequence.mesh import ParallelDims, SequenceGroups, select_device, sequence_groups
from longctx.sequence.shard import Shard, cut, shard_tokens, unshard_tokens
from longctx.ulysses.exchange import ulysses_remedy
from longctx.ulysses.stages import check_stride


class SequenceParallel:
    """Cuts batches over a sequence group and reduces the loss over everything. Made by `parallelize`."""

    def __init__(
        self,
        dims: ParallelDims,
        attention: AttentionOfBatch,
        schedule: ScheduleOfBatch | None,
        groups: SequenceGroups,
        device: torch.device,
        time_of_plan: TimeOfPlan | None = None,
        routers: Routers | None = None,
        branch_obstacle: str | None = None,
    ):
        self.routers = routers
        """The routers of a mixture of experts, or None."""
        self.branch_obstacle = branch_obstacle
        """Why batches cannot have documents with branches; None if they can."""
        self.dims, self.groups, self.device, self.time_of_plan = dims, groups, device, time_of_plan
        self._attention, self._schedule = attention, schedule
        self._batches_agree = False
        self.rank = dist.get_rank() if dist.is_initialized() else 0

    def shard(self, batch: Mapping[str, Any]) -> ShardedBatch:
        """Return this rank's part of a batch, on its device.

        Every rank of a sequence group passes the same batch. The first one is compared between the ranks, and those
        that `count_label_tokens` has counted; without a count, later ones are not.

        Args:
            batch: `input_ids` and `labels` (not shifted) int64 [B, S], and `position_ids` [B, S] or a right-padded
                `attention_mask` [B, S] or `cu_seq_lens_q`; as `SequenceCollator` makes it. B·S is a multiple of
                `dims.multiple`. `layout` is optional: the result of `layout_of`. For the auxiliary loss of
                a mixture of experts it says which tokens are padding: by `attention_mask`, or by `lengths`, the tokens
                of each row.

        Raises:
            ValueError: if the batch cannot be cut exactly, with the remedy.
        """
        with region("shard"):
            return self.place(cut(batch, self.layout_of(batch), self.dims.sp_rank(self.rank)))

    def layout_of(self, batch: Mapping[str, Any]) -> Layout:
        """Return where the batch's documents lie and which rank holds which token, as `shard` cuts it."""
        return Layout.of_batch(batch).spread(self.dims, self.time_of_plan)

    def place(self, shard: Shard) -> ShardedBatch:
        """Return what the model is given of this rank's part of a batch, on its device."""
        layout = shard.layout
        obstacle = AUXILIARY_LOSS_OBSTACLE if self.routers and self.routers.coefficient else self.branch_obstacle
        if layout.segments is not None and obstacle:
            raise ValueError(f"branch_starts: documents cannot share their beginnings here, {obstacle}.")
        schedule = self._schedule and partial(self._schedule, layout, self.groups)
        attention = partial(self._attention, layout, self.groups)
        context = AttentionContext(layout, self.groups.ulysses, attention, schedule, self.groups.sequence)
        if not self._batches_agree and self.groups.sequence is not None:
            context.before_first_pass = partial(self._check_same_batch, layout.digest)
        if self.routers is not None:
            if self.routers.coefficient and layout.lengths is None:
                raise ValueError(
                    "the routers' auxiliary loss leaves padding out, and the batch does not say which tokens are "
                    "padding. Add lengths, the tokens of each row without padding, as in batch | {'lengths': [8192]}, "
                    "or set model.config.output_router_logits = False to train without that loss."
                )
            context.real_tokens = send(shard.real, self.device)
        context.position_ids = send(shard.position_ids, self.device)
        inputs = {
            "input_ids": send(shard.input_ids, self.device),
            "position_ids": context.position_ids,
            "use_cache": False,
            "sequence": context,
        }
        targets = send(shard.labels, self.device)
        context.know_learnt(targets, send(shard.learnt, self.device))
        return ShardedBatch(inputs=inputs, shift_labels=targets, layout=layout, context=context)

    def _check_same_batch(self, digest: int) -> None:
        """Check the first batch of a loop that does not count its steps: a loader that deals out batches shows."""
        check_same_batch(digest, self.groups.sequence)
        self._batches_agree = True

    def begin_step(self, layouts: Sequence[Layout], *counts: int, error: Exception | None = None) -> StepCounts:
        """Begin an optimizer step: send what its denominators are summed from, and a digest of its micro-batches.

        Called by all ranks together. The result's `read` waits for the sums over all sequence groups, and raises
        DataError on all ranks if those of any group do not have the same micro-batches.

        Args:
            layouts: of this rank's micro-batches of the step.
            counts: what this rank has counted in them, as every rank of its sequence group has.
            error: what went wrong in reading them, which `read` raises; on all ranks if it is a DataError.
        """
        group = None
        if dist.is_initialized():
            check_world_size(self.dims)
            group = host_group(dist.group.WORLD)
        self._batches_agree = True  # or `read` raises an error
        return StepCounts(layouts, counts, self.dims, self.rank, group, error)

    def count_label_tokens(self, batches: Sequence[Mapping[str, Tensor]]) -> int:
        """Return the denominator of the loss: the label tokens of one optimizer step, over all ranks.

        Each rank counts in its micro-batches of the step, before they are cut. The ranks of a sequence group hold the
        same micro-batches.

        Raises:
            DataError: on all ranks, if those of any sequence group do not have the same batches.
        """
        if self.routers is not None:
            self.routers.expect(len(batches))
        layouts = list(map(Layout.of_batch, batches))
        return self.begin_step(layouts, sum(layout.num_targets for layout in layouts)).read()[0]

    def loss(self, logits: Tensor, shift_labels: Tensor, num_label_tokens: int) -> Tensor:
        """Return this rank's share of the step's mean loss, to call backward on.

        Averaging the gradients over all ranks, as DDP, FSDP and ZeRO do, and adding up micro-batches gives the gradient
        of the mean over all label tokens of the step.

        The routers' auxiliary loss of a mixture of experts is added where model.config.output_router_logits is set,
        times `router_aux_loss_coef`: that of all tokens of the step, without padding.

        Args:
            logits: [1, T/P, V] of the sharded batch, whose forward pass was the model's last one.
            shift_labels: [1, T/P] of the sharded batch.
            num_label_tokens: label tokens of the whole optimizer step, from `count_label_tokens`.

        Raises:
            ValueError: if the auxiliary loss needs `count_experts`, which was not called for this step, or the last
                forward pass was not that of the loss.
        """
        return self.reduce(token_losses(logits, shift_labels), num_label_tokens)

    def reduce(self, losses: Tensor, num_label_tokens: int) -> Tensor:
        """Return the same as `loss` from per-token losses [1, T/P] that are 0 where nothing is learnt."""
        return self.with_auxiliary_loss(self.label_loss(losses, num_label_tokens))

    def with_auxiliary_loss(self, loss: Tensor) -> Tensor:
        """Add the routers' auxiliary loss to this rank's share of the loss, if the model trains with one."""
        return self.routers.add_loss(loss) if self.routers is not None and self.routers.coefficient else loss

    def label_loss(self, losses: Tensor, num_label_tokens: int) -> Tensor:
        """Return this rank's share of the step's loss from per-token losses [1, T/P], without the auxiliary loss."""
        return step_loss(losses, num_label_tokens, self.dims.world_size)

    def count_experts(self, model: nn.Module, batches: Sequence[Mapping[str, Any] | Shard]) -> None:
        """Count how often each expert is chosen in an optimizer step of several micro-batches.

        The routers' auxiliary loss covers all tokens of the step, and its gradient needs these counts. So where the
        model has that loss, and a step more than one micro-batch, call this between `count_label_tokens` and the
        step's first micro-batch: it runs the model on each of them, without gradients. It does nothing otherwise.
        Called by all ranks together.

        Args:
            model: the first result of `parallelize`, wrapped or not.
            batches: this rank's micro-batches of the step, as for `shard`, or what `cut` made of them.
        """
        if self.routers is None or not self.routers.coefficient or len(batches) < 2:
            return
        was_training = model.training
        model.eval()  # nothing is kept for a backward pass, so that no layer is checkpointed
        with torch.no_grad(), region("count experts"):
            self.routers.count_step(map(partial(self._route, model), batches))
        model.train(was_training)

    def _route(self, model: nn.Module, batch: Mapping[str, Any] | Shard) -> None:
        """Run a model on a batch up to its head, which has no labels."""
        shard = self.place(batch) if isinstance(batch, Shard) else self.shard(batch)
        unlearnt = torch.full_like(shard.shift_labels, IGNORE_INDEX)
        shard.context.know_learnt(unlearnt, unlearnt[0, :0])
        model(**shard.inputs, shift_labels=unlearnt, token_outputs=True)

    def log_probs(
        self, model: nn.Module, batch: Mapping[str, Any], *, gather: bool = True, temperature: float = 1.0
    ) -> Tensor:
        """Return the log-probability of every label given the tokens before it in its document; 0 for labels of −100.

        The model is run on this rank's part of the batch, and its logits exist for a tile of tokens at a time. Under
        `torch.no_grad()` nothing is kept for a backward pass. Every rank of a sequence group passes the same batch.

        The routers' auxiliary loss of a mixture of experts has no part in it.

        A loss made from the result is that of a data-parallel rank: every rank of a sequence group computes the same
        loss, and averaging the gradients over all ranks, as DDP, FSDP and ZeRO do, gives the gradient of its mean over
        the data-parallel ranks. Do not scale the loss by sp.

        Args:
            model: the first result of `parallelize`, wrapped or not.
            batch: as for `shard`.
            gather: whether every rank gets all tokens, not only its own.
            temperature: what logits are divided by, as in sampling.

        Returns:
            fp32 or wider. If gathered, [B, S] at the labels' positions; otherwise [1, T/P] in the order of
            `shard(batch).shift_labels`, one position earlier. A sum over the latter is a part of the sum over all
            tokens; `reduce` scales such a part for the average over ranks.

        Raises:
            ValueError: if the batch cannot be cut exactly, the model is wrapped so that it returns half precision, or
                the temperature is not above 0.
        """
        shard = self.shard(batch)
        log_probs = -self.token_outputs(model, shard, temperature).losses
        return self.gather_at_labels(log_probs, shard.layout) if gather else log_probs

    def token_outputs(self, model: nn.Module, shard: ShardedBatch, temperature: float = 1.0) -> TokenOutputs:
        """Return the `TokenOutputs` of this rank's tokens, whose losses may be weighted; `is_top1` is None."""
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature {temperature} is not above 0. Use the one that answers were sampled at.")
        options = {"token_outputs": True, "summed": False, "is_top1": False, "temperature": temperature}
        outputs = model(**shard.inputs, shift_labels=shard.shift_labels, **options)
        if outputs.losses.dtype.itemsize < 4:
            raise ValueError(
                f"the model's wrapper casts what it returns to {outputs.losses.dtype}, which would round "
                "log-probabilities. Leave output_dtype out of FSDP2's MixedPrecisionPolicy."
            )
        return outputs

    def gather_at_labels(self, tokens: Tensor, layout: Layout) -> Tensor:
        """[1, T/P, ...] in the order of `shift_labels` -> [B, S, ...] at the labels' positions, on every rank."""
        whole = self.unshard(tokens, layout)
        flat = whole.flatten(0, 1)
        return torch.cat([torch.zeros_like(flat[:1]), flat[:-1]]).view(whole.shape)

    def shard_at_labels(self, tokens: Tensor, shard: ShardedBatch) -> Tensor:
        """[B, S] at the labels' positions -> [1, T/P], those of this rank in the order of `shift_labels`."""
        moved = F.pad(tokens.flatten()[1:], (0, 1)).view(shard.layout.shape)
        return send(shard_tokens(moved, shard.layout, self.dims.sp_rank(self.rank)), self.device)

    def document_log_probs(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """Return the sum of `log_probs` over each document, float64 [documents], on every rank of the sequence group.

        Documents are in the order of the batch. The padded end of a packed row counts as one, with the sum 0; padding
        that an `attention_mask` marks does not. float64 is needed because a long document's sum is large compared with
        differences between models.
        """
        shard = self.shard(batch)
        sums = self.sum_over_documents(-self.token_outputs(model, shard).losses, shard.layout)
        counted = np.flatnonzero(~padding_documents(batch, shard.layout))
        return sums[send(torch.from_numpy(counted), sums.device)]

    def sum_over_documents(self, values: Tensor, layout: Layout) -> Tensor:
        """Return the sum of per-token values over each document or branch, float64, on every rank of the group.

        Differentiable: the gradient of a sum is added up over the ranks of the group.

        Args:
            values: [1, T/P] or [1, T/P, n], of this rank's tokens.
            layout: of the whole batch.

        Returns:
            [documents] or [documents, n], padding included as documents.
        """
        number = int(layout.answer_of_token[-1]) + 1
        sums = values.new_zeros(number, *values.shape[2:], dtype=torch.float64)
        sums = sums.index_add(0, self.documents_of_tokens(layout).to(values.device), values[0].double())
        return sums if self.groups.sequence is None else all_reduce(sums, self.groups.sequence)

    def documents_of_tokens(self, layout: Layout) -> Tensor:
        """Return int64 [T/P]: for each token of this rank, the index of its document, as `Layout` counts them."""
        document = torch.from_numpy(layout.answer_of_token)[None]
        return send(shard_tokens(document, layout, self.dims.sp_rank(self.rank))[0], self.device)

    count_policy_step = count_policy_step
    policy_loss = policy_loss

    def unshard(self, tokens: Tensor, layout: Layout) -> Tensor:
        """Gather per-token results [1, T/P, ...] of all ranks to [B, S, ...] in the batch's order, on every rank.

        Differentiable: a token's gradient is the sum of those from all ranks of the group.
        """
        if self.groups.sequence is None:
            return unshard_tokens(tokens, layout)
        return unshard_tokens(gather(tokens[0], self.groups.sequence), layout)


def parallelize(
    model: PreTrainedModel,
    sp: int,
    *,
    sp_backend: str = "auto",
    ring_size: int | None = None,
    dp_replicate: int = 1,
    device: torch.device | None = None,
    document_lengths: Sequence[int] | None = None,
    selective_checkpointing: bool | int | None = None,
    whole_layers: int = 0,
    offloaded_layers: int | None = None,
    heads_k_stride: int | None = None,
    overlap_exchange: bool | None = None,
    tiled_mlp_num_shards: int | None = None,
    sequence_chunk_size: int | None = None,
) -> tuple[PreTrainedModel, SequenceParallel]:
    """Put sequence-parallel attention into a model. Called by all ranks together, before the model is wrapped.

    The ranks of a sequence group must hold the same weights, which is not checked: seed models that are not loaded.

    Args:
        model: a causal language model of an allowed type; wrap it (FSDP2, DeepSpeed, DDP) and compile it afterwards.
            FSDP2, which wraps in place, may come before.
        sp: devices that share one sequence, of consecutive ranks. Above 1 it needs an initialised process group.
        sp_backend: auto, ulysses, ring, gather or hybrid. `auto` takes the one with the least
            modelled time, see `longctx.attention.choice`.
        ring_size: ring ranks of `hybrid`; the rest are Ulysses ranks.
        dp_replicate: copies of the sharded model.
        device: device of batches. If None, this rank's GPU if the process group runs on GPUs, else the model's. A GPU
            first becomes this process's current one; without an index it is that of LOCAL_RANK.
        document_lengths: tokens of each document in a typical row, for `auto` and for `overlap_exchange`, the same on
            every rank; if None, one document as long as the model's context.
        selective_checkpointing: if True, checkpointed layers save attention's output, [1, T/P, H·D] each, instead of
            recomputing it; if a number, only the last so many of them do. If None, True for a ring, whose messages
            would be sent again.
        whole_layers: how many layers, from the last, are not checkpointed.
        offloaded_layers: how many checkpointed layers, from the first, keep their checkpoints in host memory under
            hooks such as TRL's `OffloadActivations`; all of them if None. With
            `sequence_chunk_size`, the first layers that keep attention's output in host memory and not on the device.
        heads_k_stride: number of a rank's key/value heads that are sent and attended to at a time; fewer save memory
            but cost messages. If None, all, or a quarter of them for gather.
        overlap_exchange: whether Ulysses and hybrid exchange some heads while they attend to others. If None, they do
            so where it is modelled to be faster, as over slow links.
        tiled_mlp_num_shards: tiles of tokens that every MLP works on one after the other, forward and backward, see
            `longctx.layers.tiled_mlp`; 0 for tiles that suit the model's width, None for all tokens at once.
        sequence_chunk_size: tokens of this rank that a layer works on at a time, while others wait in host memory; see
            `longctx.layers.chunked`. This thread's backward passes then stay in one thread, so call backward in the
            thread that calls this.

    Returns:
        The model, and the object that shards batches and reduces the loss.

    Raises:
        ValueError: if the model is wrapped, its attention is not known to be exact, its head is not linear, or its
            heads do not fit the backend; if sp does not divide the processes, or this rank has no GPU of its own; for a
            chunk size that the model or the backend does not support.
    """
    check_modules(model)
    check_model(model.config)
    say_whether_tied(model)
    if heads_k_stride is not None:
        check_stride(heads_k_stride)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    device = select_device(device or _device_of_this_rank(model))
    is_cuda = device.type == "cuda"
    # Rank 0's, so that all ranks plan and choose alike where nodes differ.
    device_name, per_node = broadcast_object(
        (
            torch.cuda.get_device_name(device) if is_cuda else "CPU",
            devices_per_node(world_size, os.environ, torch.cuda.device_count() if is_cuda else 0),
        )
    )
    setup = Setup.of_model(
        model.config, sp, element_size=model.dtype.itemsize, machine=Machine.of(device_name, per_node)
    )
    documents = documents_given(model.config, document_lengths)
    choice = choose_backend(sp_backend, setup, documents if sp_backend == "auto" else None, ring_size=ring_size)
    backend, degrees = BACKENDS[choice.name], choice.arrangement
    dims = ParallelDims.arrange(world_size, ring=degrees.ring, ulysses=degrees.ulysses, dp_replicate=dp_replicate)
    if selective_checkpointing is None:
        selective_checkpointing = backend.keeps_output
    install(model, partial(prefers_heads, setup, degrees))
    selective = None if selective_checkpointing is True else int(selective_checkpointing)
    checkpoints = LayerCheckpoints(whole=whole_layers, selective=selective, offloaded=offloaded_layers)
    install_checkpoints(model, checkpoints)
    check_recurrent(model, device, with_states=sp > 1)
    if tiled_mlp_num_shards is not None:
        install_tiled_mlp(model, tiled_mlp_num_shards)
    fuse_head(model, hidden_on_host=sequence_chunk_size is not None)
    if sequence_chunk_size is not None:
        if not backend.can_chunk:
            raise ValueError(
                f"sequence_chunk_size {sequence_chunk_size} with sp_backend {choice.name}, which does not support the "
                f"sequence-chunked step. {ulysses_remedy(setup.num_heads, sp).replace('--', '')}"
            )
        install_chunked(model, sequence_chunk_size, device, checkpoints)
    routers = install_routers(model)
    if overlap_exchange is None:
        overlap_exchange = heads_k_stride is None and (
            choice.overlaps_exchange if sp_backend == "auto" else exchange_overlaps(setup, degrees, documents)
        )
    attention = partial(backend.attention, heads_k_stride=heads_k_stride, overlap_exchange=overlap_exchange)
    time_of_plan = partial(plan_time, setup, degrees) if dims.ring > 1 else None
    groups = sequence_groups(dims, device)
    is_chunked, can_branch = sequence_chunk_size is not None, backend.has_branches
    obstacle = branch_obstacle(model.config, backend_has_branches=can_branch, is_chunked=is_chunked)
    return model, SequenceParallel(dims, attention, backend.schedule, groups, device, time_of_plan, routers, obstacle)


def _device_of_this_rank(model: PreTrainedModel) -> torch.device:
    """Return the GPU if the process group runs on GPUs, where FSDP2 and DeepSpeed move the model later."""
    if dist.is_initialized() and "nccl" in dist.get_backend_config():
        return torch.device("cuda")
    return next(model.parameters()).device
