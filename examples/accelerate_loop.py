"""Sequence parallelism in an Accelerate loop.

torchrun --nproc_per_node 2 examples/accelerate_loop.py

This script replicates the model (DDP). To shard it on GPUs, start it with a profile that has an engine, but not
accelerate's own sequence parallelism: accelerate launch --config_file configs/fsdp2.yaml examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
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
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    tokenizer = tiny_tokenizer()  # AutoTokenizer.from_pretrained(...)
    model = tiny_model()  # AutoModelForCausalLM.from_pretrained(...)
    model, sequence = longctx.parallelize(model, sp=SP, device=accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)

    with accelerator.main_process_first():
        documents = load_documents(tokenizer)
    # One data-parallel rank is a group of SP processes, which all read the same documents. Do not pass the loader to
    # accelerator.prepare, which would give each process different batches.
    dims = sequence.dims
    dp_rank = dims.dp_rank(accelerator.process_index)
    sampler = DistributedSampler(documents, dims.dp, dp_rank, shuffle=False, drop_last=True)
    collator = SequenceCollator(tokenizer.pad_token_id, dims.multiple, padding_free=True)
    loader = DataLoader(documents, BATCH_SIZE, sampler=sampler, collate_fn=collator)

    for step, batch in zip(range(STEPS), loader, strict=False):
        num_label_tokens = sequence.count_label_tokens([batch])
        shard = sequence.shard(batch)
        logits = model(**shard.inputs).logits
        loss = sequence.loss(logits, shard.shift_labels, num_label_tokens)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean")  # every rank holds its share
        accelerator.print(f"step {step + 1}: loss {mean.item():.7f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
