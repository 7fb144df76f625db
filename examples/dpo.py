"""Direct preference optimization with sequence parallelism: exact log-probabilities of long answers over ranks.

torchrun --nproc_per_node 2 examples/dpo.py

This is sigmoid DPO (https://arxiv.org/abs/2305.18290), TRL's default. The chosen and rejected answers of a micro-batch
are packed into one sequence, which SP processes share. The reference model is the model before training. Its
log-probabilities are computed once, before the first step.
"""

import os
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from datasets import Dataset
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

import longctx
from longctx.collate import SequenceCollator
from longctx.data import load_records, tokenize_records
from longctx.model.tiny import tiny_model, tiny_tokenizer

SP, STEPS, BATCH_SIZE = 2, 4, 2
BETA, LEARNING_RATE = 0.1, 3e-5


def load_preferences():
    """Return records for DPOTrainer. Here the second half of Python sources is preferred to its upper-case copy."""
    texts = load_records("stdlib").select(range(300)).filter(lambda record: 200 < len(record["text"]) < 1500)["text"]
    prompts, answers = zip(*((text[: len(text) // 2], text[len(text) // 2 :]) for text in texts), strict=True)
    return Dataset.from_dict({"prompt": prompts, "chosen": answers, "rejected": [text.upper() for text in answers]})


def tokenize(preferences, tokenizer):
    """Return pairs of documents, `chosen` and `rejected`, whose labels cover only the answers."""
    answers = {
        name: tokenize_records(
            preferences.select_columns(["prompt", name]).rename_column(name, "completion"), tokenizer
        )
        for name in ("chosen", "rejected")
    }
    return [dict(zip(answers, pair, strict=True)) for pair in zip(*answers.values(), strict=True)]


def preference_loss(policy, reference):
    """From log-probabilities of documents [2 n], chosen ones first; and the share of pairs it ranks right."""
    chosen, rejected = (policy - reference).chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean(), (chosen > rejected).double().mean()


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
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)

    # One data-parallel rank is a group of SP processes, which all read the same pairs.
    pairs = tokenize(load_preferences(), tokenizer)
    dims = sequence.dims
    sampler = DistributedSampler(pairs, dims.dp, dims.dp_rank(dist.get_rank()), shuffle=False, drop_last=True)
    packed = SequenceCollator(tokenizer.pad_token_id, dims.multiple, padding_free=True)

    def collate(batch):
        return packed([pair["chosen"] for pair in batch] + [pair["rejected"] for pair in batch])

    loader = DataLoader(pairs, BATCH_SIZE, sampler=sampler, collate_fn=collate, drop_last=True)
    batches = list(islice(loader, STEPS))
    with torch.no_grad():  # padding counts as one more document, after the others
        references = [sequence.document_log_probs(model, batch)[: 2 * BATCH_SIZE] for batch in batches]

    for step, (batch, reference) in enumerate(zip(batches, references, strict=True)):
        policy = sequence.document_log_probs(model, batch)[: 2 * BATCH_SIZE]
        loss, accuracy = preference_loss(policy, reference)
        loss.backward()  # the engine averages over all ranks; SP does not appear
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        logged = torch.stack([loss.detach(), accuracy])
        dist.all_reduce(logged, op=dist.ReduceOp.SUM)
        if dist.get_rank() == 0:
            loss, accuracy = (logged / dims.world_size).tolist()
            print(f"step {step + 1}: loss {loss:.7f}, {accuracy:.0%} ranked right", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
