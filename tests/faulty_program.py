"""Programs with a bug in their attention kernel that only a GPU has: BUGS names it, and a watch has to see it.

python -m tests.faulty_program              # a loop of one's own, on one GPU
torchrun … -m tests.faulty_program FLAGS    # longctx.train
"""

from __future__ import annotations

import functools
import os
import sys
import time

import torch
from torch import Tensor

from longctx import parallelize
from longctx.attention.kernels.varlen import AtenFlashKernel
from longctx.collate import SequenceCollator
from longctx.model.tiny import tiny_model
from longctx.train import main


def read_on_the_host(q: Tensor) -> None:
    int(q.sum())


def use_on_another_stream(q: Tensor) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):  # its wait_stream(torch.cuda.current_stream()) is missing
        q.sum()


def change_under_a_copy(q: Tensor) -> None:
    host = torch.ones(4, pin_memory=True)
    host.to(q.device, non_blocking=True)
    host.fill_(2)


BUGS = {bug.__name__: bug for bug in (read_on_the_host, use_on_another_stream, change_under_a_copy)}


def plant(names: list[str]) -> None:
    """Have the attention kernel of GPUs do this, too, before each call."""
    forward = AtenFlashKernel._forward

    @functools.wraps(forward)
    def faulty(self, q, *arguments):
        for name in names:
            BUGS[name](q)
        return forward(self, q, *arguments)

    AtenFlashKernel._forward = faulty


def loop() -> None:
    """Four steps without an optimizer, of which the first two may wait."""
    model, sequence = parallelize(tiny_model(), 1, device=torch.device("cuda", 0))
    model.to(sequence.device)
    batch = SequenceCollator(pad_token_id=0, padding_free=True)([{"input_ids": torch.arange(3, 40)}])
    for _ in range(4):
        count = sequence.count_label_tokens([batch])
        shard = sequence.shard(batch)
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(**shard.inputs).logits
        sequence.loss(logits, shard.shift_labels, count).backward()
    time.sleep(0.5)  # torch's backward threads still free Python objects, and abort a process that is at its end


if __name__ == "__main__":
    plant(os.environ["BUGS"].split())
    sys.exit(main() if sys.argv[1:] else loop())
