"""Sequence parallelism in a plain PyTorch loop with a DataLoader and FSDP2.

torchrun --nproc_per_node 2 examples/torch_loop.py
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

import longctx
from longctx.collate import SequenceCollator
from longctx.data import load_records, tokenize_records
from longctx.model.tiny import tiny_model, tiny_tokenizer

SP, STEPS, BATCH_SIZE = 2, 4, 4


def load_documents(tokenizer):
    """Return tokenised documents with `input_ids`. Here these are short files of Python's standard library."""
    documents = tokenize_records(load_records("stdlib").select(range(160)), tokenizer)
    return documents.filter(lambda document: len(document["input_ids"]) <= 1500)


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()

    tokenizer = tiny_tokenizer()  # AutoTokenizer.from_pretrained(...)
    model = tiny_model().to(device)  # AutoModelForCausalLM.from_pretrained(...)
    model, sequence = longctx.parallelize(model, sp=SP)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)

    documents = load_documents(tokenizer)
    # One data-parallel rank is a group of SP processes, which all read the same documents.
    dims = sequence.dims
    sampler = DistributedSampler(documents, dims.dp, dims.dp_rank(dist.get_rank()), shuffle=False, drop_last=True)
    collator = SequenceCollator(tokenizer.pad_token_id, dims.multiple, padding_free=True)
    loader = DataLoader(documents, BATCH_SIZE, sampler=sampler, collate_fn=collator)

    for step, batch in zip(range(STEPS), loader, strict=False):
        num_label_tokens = sequence.count_label_tokens([batch])
        shard = sequence.shard(batch)
        logits = model(**shard.inputs).logits
        loss = sequence.loss(logits, shard.shift_labels, num_label_tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss, op=dist.ReduceOp.SUM)  # every rank holds its share of the mean
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item() / dims.world_size:.7f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
