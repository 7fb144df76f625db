"""`longctx.verify` with one thing of longctx broken on purpose."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from types import SimpleNamespace

import longctx.attention.operator
import longctx.parallel
import longctx.run.model
import longctx.training.data_order
from longctx.sequence.layout import Layout
from longctx.sequence.shard import shard_tokens
from longctx.verify import __main__ as verify


def break_documents():
    """All documents of a batch are attended to as one."""
    spread = Layout.spread

    def one_document(layout, *args):
        return spread(replace(layout, bounds=layout.bounds[[0, -1]], kind=layout.kind[:1]), *args)

    Layout.spread = one_document


def break_labels():
    """Each token predicts itself."""
    cut = longctx.parallel.cut

    def unshifted(batch, layout, sp_rank, *args):
        labels = shard_tokens(batch["labels"], layout, sp_rank)
        return replace(cut(batch, layout, sp_rank, *args), labels=labels, learnt=(labels[0] != -100).nonzero()[:, 0])

    longctx.parallel.cut = longctx.training.data_order.cut = unshifted


def break_loss():
    """Each rank and micro-batch takes the mean over its own tokens."""
    longctx.parallel.step_loss = lambda losses, num_label_tokens, world_size: losses.mean()


def break_count():
    """Each rank counts the label tokens of its own micro-batches only."""
    longctx.parallel.SequenceParallel.begin_step = lambda self, layouts, *counts, error=None: SimpleNamespace(
        read=lambda: [layouts[0].num_targets]
    )


def break_cut():
    """Ranks that should share a sequence train on sequences of their own."""
    parallelize = longctx.run.model.parallelize

    def alone(model, sp, **kwargs):
        return parallelize(model, 1, dp_replicate=kwargs["dp_replicate"], device=kwargs["device"])

    longctx.run.model.parallelize = alone


def break_gradients():
    """Gradients of values come out twice as large, while the loss is right."""
    backward = longctx.attention.operator.LocalSchedule.backward

    def twice(self, *args):
        dq, dk, dv = backward(self, *args)
        return dq, dk, 2 * dv

    longctx.attention.operator.LocalSchedule.backward = twice


def break_bits():
    """A document's outputs follow the tokens of others by less than rounding lets the loss show."""
    unshard = longctx.parallel.SequenceParallel.unshard

    def drifted(self, values, layout):
        whole = unshard(self, values, layout)
        break_bits.calls = getattr(break_bits, "calls", 0) + 1
        return whole * (1 + 1e-6 * break_bits.calls) if whole.is_floating_point() else whole

    longctx.parallel.SequenceParallel.unshard = drifted


def verify_broken(broken, arguments):
    """(exit code, what rank 0 prints) on a rank of a group that runs already."""
    globals()[f"break_{broken}"]()
    sys.__stdout__ = io.StringIO()
    return verify.main(arguments), sys.__stdout__.getvalue()
