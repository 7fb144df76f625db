"""Log-probabilities of pairs under the reference model, which is the model before its training.

They are computed once, before the first step, in the micro-batches that training will take, so that the rewards of a
model that is not trained yet are exactly 0. They are kept on disk under all that decides them, to the last bit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from longctx.data.contents import cache_folder, cache_key
from longctx.launch.console import Line, show
from longctx.packing import PairedDataset
from longctx.ranks import hang
from longctx.ranks.agreement import broadcast_object, host_group
from longctx.sequence.shard import Shard
from longctx.settings.dpo import uses_reference
from longctx.training.data_order import StepSampler
from longctx.training.engines import reshard
from longctx.training.fingerprint import column_arrays, digest
from longctx.training.nonfinite import NonFiniteError
from longctx.training.preference import PreferenceLoss
from longctx.untrusted.files import written_whole


class ReferencedPreferenceLoss(PreferenceLoss):
    """A `PreferenceLoss` that finds or computes the log-probabilities of the reference model before training.

    Args:
        identity: what identifies the reference model and the arithmetic of its forward pass, by name.
        batch_size: packs that a data-parallel rank computes at a time, in the order of the data set. If None, the
            micro-batches are those of the first epoch, or of an evaluation.
    """

    def __init__(self, *args: Any, identity: Mapping[str, Any], batch_size: int | None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.identity, self.batch_size = identity, batch_size

    def prepare(self, trainer: Any, model: nn.Module) -> None:
        if not uses_reference(self.flags):
            return
        for name, rows in {"training": trainer.train_dataset, "evaluation": trainer.eval_dataset}.items():
            if isinstance(rows, PairedDataset):
                rows.reference = self._reference(trainer, model, rows, name)

    def _reference(self, trainer: Any, model: nn.Module, rows: PairedDataset, name: str) -> NDArray[np.float64]:
        """Return float64 [pairs, 2], the same on every rank. Called by all ranks together.

        Raises:
            NonFiniteError: on every rank, if the model gives a pair no finite log-probability.
        """
        is_first = trainer.sequence.rank == 0
        path = broadcast_object(self._path(trainer, rows) if is_first else None)
        assert path is not None, "rank 0 names it"
        found = broadcast_object(_read(path, len(rows.kept)) if is_first else None)
        start = time.perf_counter()
        if found is not None:
            if is_first:
                show([Line("reference", f"log-probabilities of the {name} pairs are read from {path}")])
            return found
        computed = self._compute(trainer, model, rows)
        placed = np.unique(rows.packing.indices)
        wrong = placed[~np.isfinite(computed[placed]).all(1)]
        if len(wrong):
            raise NonFiniteError(
                f"the reference model gives pair {wrong[0]} of the {name} data a log-probability of "
                f"{computed[wrong[0]].tolist()}: it is NaN or infinite. Look at the model's weights and its dtype."
            )
        if is_first:
            kept = _write(path, computed)
            seconds = time.perf_counter() - start
            where = f"kept in {path}" if kept else "not kept for later runs"
            show(
                [Line("reference", f"log-probabilities of {len(placed):,} {name} pairs took {seconds:.1f} s, {where}")]
            )
        return computed

    def _order(self, trainer: Any, rows: PairedDataset, dp_rank: int) -> StepSampler:
        """Return the packs of each micro-batch of a data-parallel rank; together they are all packs."""
        if rows is trainer.train_dataset and self.batch_size is None:
            order = trainer.step_sampler(dp_rank)
            order.drop_last = False
            return order
        return trainer.order_of(rows, self.batch_size or trainer.args.eval_batch_size, dp_rank)

    def _path(self, trainer: Any, rows: PairedDataset) -> Path:
        # Rounding depends on which tokens are computed together, and not on when they are.
        batches = sorted(tuple(b) for rank in range(self.sequence.dims.dp) for b in self._order(trainer, rows, rank))
        packs = [np.array([len(batch) for batch in batches]), np.fromiter(chain.from_iterable(batches), dtype=np.int64)]
        plan = [rows.kept, rows.shared, rows.packing.indices, rows.packing.offsets]
        tokens = digest([*column_arrays(rows._source), *plan, *packs])
        return cache_folder() / f"reference-{cache_key(dict(self.identity), tokens, self.flags['ld_alpha'])}.npy"

    def _compute(self, trainer: Any, model: nn.Module, rows: PairedDataset) -> NDArray[np.float64]:
        dims, rank = trainer.sequence.dims, trainer.sequence.rank
        order = self._order(trainer, rows, dims.dp_rank(rank))
        loader = trainer.loader_of(rows, order)
        was_training = model.training
        model.eval()
        with trainer.step_metrics.paused(), adapters_off(trainer.accelerator.unwrap_model(model)):
            sums = [self._batch_sums(trainer, model, batch) for batch in loader]
        model.train(was_training)
        reshard(model)
        result = np.zeros((len(rows.kept), 2))
        for of_batch, values in zip(order, sums, strict=True) if dims.sp_rank(rank) == 0 else ():
            pairs = [int(pair) for pack in of_batch for pair in rows.packing.documents(pack)]
            result[pairs] = values
        if dist.is_initialized():  # a pair is 0 on all ranks but one
            dist.all_reduce(torch.from_numpy(result), group=host_group(dist.group.WORLD))
        return result

    def _batch_sums(self, trainer: Any, model: nn.Module, batch: Shard) -> NDArray[np.float64]:
        """Return float64 [pairs of the batch, 2]."""
        hang.WATCH.go_on()
        with torch.no_grad(), trainer.compute_loss_context_manager():
            shard = self.sequence.place(batch)
            outputs = self.sequence.token_outputs(model, shard)  # without what the log of training reads
            return self.document_sums(shard, outputs, batch.extras["pairs"])[..., 0].cpu().numpy()


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Make the model what it was without adapters, for passes without gradients.

    Which weights are trained stays as it is. PEFT takes weights of --lora_modules_to_save out of training here, and
    FSDP2 would leave those out for good that are gathered for the first time meanwhile.
    """
    if not hasattr(model, "disable_adapter"):
        yield
        return
    is_trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    with cast(Any, model).disable_adapter():
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_trained[name])
        yield


def _read(path: Path, num_pairs: int) -> NDArray[np.float64] | None:
    """Return what `_write` has written, or None without a whole file of so many pairs."""
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return found if found.shape == (num_pairs, 2) and found.dtype == np.float64 and np.isfinite(found).all() else None


def _write(path: Path, values: NDArray[np.float64]) -> bool:
    """Write the values, which a reader sees whole or not at all, and return whether that was possible."""
    try:
        with written_whole(path) as unfinished, open(unfinished, "xb") as file:
            np.save(file, values)
    except OSError as error:
        logging.getLogger(__name__).warning("the reference's log-probabilities are not kept: %s", error)
        return False
    return True
