"""Metrics of each logging step, exact over all ranks and micro-batches since the one before."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from longctx.data import IGNORE_INDEX
from longctx.layers.loss import TokenOutputs
from longctx.layers.routers import Routers
from longctx.machine.speeds import PEAK_FLOPS
from longctx.model.allow_list import has_experts, has_windows, head_sizes
from longctx.model.recurrent import recurrent_sizes
from longctx.regions import PARTS, clock
from longctx.sequence.batch import ShardedBatch
from longctx.sequence.host_tensors import send
from longctx.sequence.shard import Shard
from longctx.training.peak_memory import GIB, PeakMemory, of_ranks


class StepMetrics:
    """Sums over this rank's micro-batches, reduced over all ranks when read."""

    _known: list[float]
    _sums: Tensor

    def __init__(
        self,
        *,
        sp: int,
        sp_rank: int,
        config: PretrainedConfig,
        flops_per_token: int,
        device: torch.device,
        routers: Routers | None = None,
        extra: Sequence[str] = (),
    ):
        """
        Args:
            extra: names of further sums, which `add` is given and `read` puts into `totals`.
        """
        names = ("tokens", "padded_tokens", "label_tokens", "correct", "entropy", "repeated_tokens")
        self._names = (*names, *extra, "work")
        self.totals: dict[str, float] = {}
        """All sums by name, over all ranks, between the last two readings."""
        self.experts = None if routers is None else ExpertLoad(routers, device)
        self.sp, self.sp_rank, self.device = sp, sp_rank, device
        self.peak_flops = _peak_flops(torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU", config)
        self.flops_per_token = flops_per_token
        text = config.get_text_config()
        self.flops_per_pair = 6 * text.num_hidden_layers * text.num_attention_heads * sum(head_sizes(config))
        self.total_tokens = 0
        """Tokens trained on. A shared prompt counts with each of its answers, as in TRL."""
        self.longest_row = 0
        """Tokens of the longest micro-batch so far, padding included; over all ranks after `read`."""
        self.peak_memory: PeakMemory | None = None
        """Peaks of all ranks at the last reading."""
        self.details: dict[str, Any] = {}
        """What the last reading found of ranks and of layers, as in trainer_state.json: `memory`, `seconds`,
        `experts`."""
        self.sums = torch.zeros(len(self._names), dtype=torch.float64)
        self.start()

    def start(self) -> None:
        """Start measuring time."""
        self._started = time.perf_counter()
        clock.start(self.device)

    def add(self, *, shard: Shard, correct: Tensor, entropy: Tensor, extra: Tensor | None = None) -> None:
        """Count one micro-batch. What the host knows costs the device nothing.

        Args:
            shard: this rank's part of the batch, as the data loader made it.
            correct, entropy: values of this rank's tokens, [1, T/P], 0 where nothing is learnt.
            extra: float64 [extra], this rank's part of the further sums.
        """
        layout = shard.layout
        self.longest_row = max(self.longest_row, layout.num_tokens)
        repeated = 0 if layout.segments is None else layout.num_repeated()
        of_group = sum(layout.lengths or ()), layout.num_tokens, repeated
        own = *(count / self.sp for count in of_group), len(shard.learnt), layout.work(self.sp_rank)
        self._known = [total + count for total, count in zip(self._known, own, strict=True)]
        of_tokens = correct.sum().double(), entropy.detach().sum().double()
        self._sums += torch.stack([*of_tokens, *(() if extra is None else extra)])
        if self.experts is not None:
            self.experts.add()

    @property
    def sums(self) -> Tensor:
        """float64 [sums] in the order of their names: of the host and of the device."""
        tokens, padded, repeated, labels, work = send(torch.tensor(self._known, dtype=torch.float64), self.device)
        correct, entropy, *extra = self._sums
        return torch.stack((tokens, padded, labels, correct, entropy, repeated, *extra, work))

    @sums.setter
    def sums(self, values: Tensor) -> None:
        tokens, padded, labels, _, _, repeated, *_, work = values.tolist()
        self._known = [tokens, padded, repeated, labels, work]
        self._sums = torch.cat((values[3:5], values[6:-1])).to(self.device)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's sums since the last `read`, and the run's totals."""
        return {
            "sums": self.sums.tolist(),
            "total_tokens": self.total_tokens,
            "longest_row": self.longest_row,
            "elapsed": time.perf_counter() - self._started,
            "seconds": clock.read(),
            **({} if self.experts is None else {"aux_loss": self.experts.shares.tolist()}),
        }

    def expert_load(self) -> list[list[float]]:
        """Return the sums of each router's tokens for each expert over all ranks, which call it together."""
        return [] if self.experts is None else _sum(self.experts.load).tolist()

    def load_state_dicts(
        self, states: Sequence[dict[str, Any]], expert_load: Sequence[Sequence[float]], *, rank: int
    ) -> None:
        """Restore what `state_dict` returned on every rank, and `expert_load`.

        With another number of ranks, rank 0 takes all sums; it always takes the experts', which are whole numbers.
        """
        same = len(states) == (dist.get_world_size() if dist.is_initialized() else 1)
        sums = torch.tensor([[*state["sums"], *state.get("aux_loss", ())] for state in states], dtype=torch.float64)
        own = sums[rank] if same else sums.sum(0) * (rank == 0)
        mine = states[rank if same else 0]
        self._started = time.perf_counter() - mine.get("elapsed", 0.0)
        clock.reset(mine.get("seconds"))
        self.sums = own[: len(self._names)]
        if self.experts is not None:
            self.experts.shares.copy_(own[len(self._names) :])
            self.experts.load.copy_(torch.tensor(expert_load, dtype=torch.float64) * (rank == 0))
        self.total_tokens = states[0]["total_tokens"]
        self.longest_row = max(state["longest_row"] for state in states)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the body from the time of training steps."""
        start = time.perf_counter()
        try:
            with clock.paused():
                yield
        finally:
            self._started += time.perf_counter() - start

    def tokens_so_far(self) -> int:
        """Return `num_tokens`, including those since the last `read`. Called by all ranks together."""
        sums = dict(zip(self._names, _gather(self.sums).sum(0).tolist(), strict=True))
        return self.total_tokens + round(sums["tokens"] + sums["repeated_tokens"])

    def read(self) -> dict[str, float | None]:
        """Return the log's values since the last call. Called by all ranks together."""
        seconds, parts = time.perf_counter() - self._started, clock.read()
        self._started += seconds
        clock.reset()
        own = send(torch.tensor([parts[part] for part in PARTS], dtype=torch.float64), self.device)
        values, memory = self._gather_with_memory(torch.cat((self.sums, own)))
        ranks, of_parts = values.tensor_split((len(self._names),), dim=1)
        times = of_parts.sum(0)
        shares = dict(zip(PARTS, (times / (times.sum() or 1.0)).tolist(), strict=True))
        experts = {} if self.experts is None else self.experts.read()
        self.details = {"memory": memory.to_dict(), "seconds": of_ranks(of_parts, PARTS)}
        if self.experts is not None:
            self.details["experts"] = self.experts.of_layers
        self.totals = total = dict(zip(self._names, ranks.sum(0).tolist(), strict=True))
        work = ranks[:, -1]
        self.total_tokens += round(total["tokens"] + total["repeated_tokens"])
        flops = self.flops_per_token * total["tokens"] + self.flops_per_pair * total["work"]
        labels = max(total["label_tokens"], 1)
        gib = [peak / GIB for peak in memory.allocated] if memory.has_devices else None
        self.sums = torch.zeros(len(self._names), dtype=torch.float64)
        return {
            "num_tokens": self.total_tokens,
            "tokens_per_second": total["tokens"] / seconds,
            "tokens_per_second_per_device": total["tokens"] / seconds / len(ranks),
            "mfu": flops / seconds / len(ranks) / self.peak_flops if self.peak_flops else None,
            "peak_memory_gib_max": max(gib) if gib else None,
            "peak_memory_gib_min": min(gib) if gib else None,
            "peak_host_memory_gib_max": max(memory.host) / GIB,
            "peak_host_memory_gib_min": min(memory.host) / GIB,
            "padding_fraction": 1 - total["tokens"] / total["padded_tokens"] if total["padded_tokens"] else 0.0,
            "attention_imbalance": float(work.max() / work.mean()) if work.sum() else 1.0,
            "mean_token_accuracy": total["correct"] / labels,
            "entropy": total["entropy"] / labels,
            "data_fraction": shares["data"],
            "attention_fraction": shares["attention"],
            "communication_fraction": shares["communication"],
            **experts,
        }

    def read_memory(self) -> PeakMemory:
        """Return only the peaks of memory. Called by all ranks together."""
        return self._gather_with_memory(self._sums[:0])[1]

    def _gather_with_memory(self, values: Tensor) -> tuple[Tensor, PeakMemory]:
        """Gather [n] of every rank to [world, n] on the host, and every rank's memory, in one message and one copy."""
        own = torch.tensor([self.longest_row, *PeakMemory.here(self.device)], dtype=torch.float64)
        ranks = _gather(torch.cat((values, send(own, self.device)))).cpu()
        values, rows, memory = ranks.tensor_split((len(values), len(values) + 1), dim=1)
        self.longest_row, self.peak_memory = int(rows.max()), PeakMemory.of_ranks(memory.tolist())
        return values, self.peak_memory


class ExpertLoad:
    """The tokens that routers have sent to each expert, and the auxiliary loss, in training steps.

    Sums over this rank's micro-batches, reduced over all ranks when read.
    """

    def __init__(self, routers: Routers, device: torch.device):
        self._routers = routers
        self.load = torch.zeros(routers.shape, dtype=torch.float64, device=device)
        """[L, E]: the tokens that each router has sent to each expert on this rank."""
        self.shares = torch.zeros(2, dtype=torch.float64, device=device)
        """This rank's part of the auxiliary loss and of the steps."""
        self.of_layers: dict[str, list[float]] = {}
        """By layer at the last reading: the load of its busiest expert over the mean, and the share of its experts that
        no token used."""

    def add(self) -> None:
        """Count the micro-batch of the model's last forward pass, whose loss has been made."""
        self.load += self._routers.latest.load
        if self._routers.shares is not None:
            self.shares += self._routers.shares

    def read(self) -> dict[str, float | None]:
        """Return the log's values since the last call: means over steps. Called by all ranks together."""
        load, shares = _sum(torch.cat((self.load.flatten(), self.shares))).cpu().split((self.load.numel(), 2))
        load, (aux_loss, steps) = load.view(self._routers.shape), shares.tolist()
        self.load.zero_()
        self.shares.zero_()
        sizes = torch.tensor(self._routers.num_experts, dtype=torch.float64)
        means = load.sum(1) / sizes
        over_mean = torch.where(means > 0, load.amax(1) / means, 1.0)
        used = (load > 0).sum(1) / sizes
        of_layers = {"max_over_mean": over_mean, "unused_fraction": 1 - used}
        self.of_layers = {name: [round(value, 4) for value in of.tolist()] for name, of in of_layers.items()}
        return {
            **({"aux_loss": aux_loss / steps if steps else 0.0} if self._routers.coefficient else {}),
            "expert_load_imbalance": float(over_mean.max()),
            "unused_experts_fraction": float(1 - (used * sizes).sum() / sizes.sum()),
        }


class TokenMeans:
    """Means over the label tokens of evaluation data: sums of this rank's tokens, reduced over all ranks when read.

    The routers' auxiliary loss is that of all tokens, times its coefficient a part of the loss, as in training.
    """

    def __init__(self, device: torch.device, routers: Routers | None = None, extra: Sequence[str] = ()):
        """
        Args:
            extra: names of further sums, which `add` is given and `read` puts into `totals`.
        """
        self._extra = extra
        self.totals: dict[str, float] = {}
        self._sums = torch.zeros(4 + len(extra), dtype=torch.float64, device=device)
        self._routers = routers if routers is not None and routers.coefficient else None
        num_experts = 0 if self._routers is None else self._routers.shape[1]
        self._experts = torch.zeros(2, num_experts, dtype=torch.float64, device=device)

    def add(self, shard: ShardedBatch, outputs: TokenOutputs, extra: Tensor | None = None) -> None:
        """Count one batch of this rank's tokens. The model's outputs are 0 where nothing is learnt."""
        assert outputs.is_top1 is not None, "the head returns it unless it is told not to"
        is_label = shard.shift_labels != IGNORE_INDEX
        sums = [of.double().sum() for of in (is_label, outputs.losses, outputs.is_top1, outputs.entropy)]
        self._sums += torch.stack([*sums, *(() if extra is None else extra)])
        if self._routers is not None:
            self._experts += torch.stack(self._routers.latest[1:])

    def read(self) -> dict[str, float]:
        """Return the means, NaN without label tokens. Called by all ranks together."""
        labels, *sums = _gather(self._sums).sum(0).tolist()
        self.totals = dict(zip(self._extra, sums[3:], strict=True))
        of_tokens = zip(("loss", "mean_token_accuracy", "entropy"), sums[:3], strict=True)
        means = {name: total / labels if labels else float("nan") for name, total in of_tokens}
        if self._routers is None:
            return means
        aux_loss = self._routers.loss_of(*_sum(self._experts))
        return means | {"loss": means["loss"] + self._routers.coefficient * aux_loss, "aux_loss": aux_loss}


def _gather(values: Tensor) -> Tensor:
    """Gather [n] of every rank to [world, n]."""
    if not dist.is_initialized():
        return values[None]
    ranks = values.new_empty(dist.get_world_size(), len(values))
    dist.all_gather([*ranks], values)
    return ranks


def _sum(values: Tensor) -> Tensor:
    """Return the sums of values of any shape over all ranks."""
    total = values.clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total


def _peak_flops(device_name: str, config: PretrainedConfig) -> float | None:
    """Return the device's peak; None if unknown, or if tokens do not use all parameters or see all tokens before."""
    if has_experts(config) or has_windows(config) or recurrent_sizes(config):
        return None
    return next((peak for key, peak in PEAK_FLOPS.items() if key in device_name), None)
