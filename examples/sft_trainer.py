"""Sequence parallelism in a subclass of TRL's SFTTrainer.

torchrun --nproc_per_node 2 examples/sft_trainer.py

This script replicates the model (DDP). To shard it on GPUs, start it with a profile that has an engine, but not
accelerate's own sequence parallelism: accelerate launch --config_file configs/fsdp2.yaml examples/sft_trainer.py
"""

import math

import torch
from trl import SFTConfig, SFTTrainer

import longctx
from longctx.data import load_records, tokenize_records
from longctx.model.tiny import tiny_model, tiny_tokenizer
from longctx.training.trainer import SequenceMixin

SP = 2


class MyTrainer(SequenceMixin, SFTTrainer):
    """The loss, the data and the checkpoints are SequenceMixin's; what is overridden here stays one's own."""

    def log(self, logs, start_time=None):
        if "loss" in logs:
            logs["perplexity"] = math.exp(logs["loss"])
        super().log(logs, start_time)


def load_documents(tokenizer):
    """Return tokenised documents with `input_ids`. Here these are short files of Python's standard library."""
    documents = tokenize_records(load_records("stdlib").select(range(160)), tokenizer)
    return documents.filter(lambda document: len(document["input_ids"]) <= 1500)


def arguments():
    return SFTConfig(
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        max_length=None,  # of the documents, which a micro-batch packs
        train_sampling_strategy="sequential",
        ddp_find_unused_parameters=False,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
    )


def main():
    args = arguments()
    tokenizer = tiny_tokenizer()  # AutoTokenizer.from_pretrained(...)
    model, sequence = longctx.parallelize(tiny_model(), sp=SP, device=args.device)  # or AutoModelForCausalLM
    with args.main_process_first():
        documents = load_documents(tokenizer)
    trainer = MyTrainer(model, args, train_dataset=documents, processing_class=tokenizer, sequence=sequence)
    trainer.train()
    for entry in trainer.state.log_history[:-1] if trainer.is_world_process_zero() else ():
        print(f"step {entry['step']}: loss {entry['loss']:.7f}, perplexity {entry['perplexity']:.1f}")


if __name__ == "__main__":
    main()
