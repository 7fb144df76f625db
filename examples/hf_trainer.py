"""Sequence parallelism in the Hugging Face Trainer.

torchrun --nproc_per_node 2 examples/hf_trainer.py

This script replicates the model (DDP). To shard it on GPUs, start it with a profile that has an engine, but not
accelerate's own sequence parallelism: accelerate launch --config_file configs/fsdp2.yaml examples/hf_trainer.py
"""

import torch
from torch.utils.data import DataLoader, DistributedSampler
from transformers import Trainer, TrainingArguments

import longctx
from longctx.collate import SequenceCollator
from longctx.data import load_records, tokenize_records
from longctx.model.tiny import tiny_model, tiny_tokenizer

SP = 2


class SequenceTrainer(Trainer):
    def __init__(self, *args, sequence, **kwargs):
        self.sequence = sequence
        super().__init__(*args, **kwargs)

    def get_train_dataloader(self):
        # The SP processes of a data-parallel rank read the same documents. accelerate would give each different ones.
        dims, data = self.sequence.dims, self.train_dataset
        dp_rank = dims.dp_rank(self.args.process_index)
        sampler = DistributedSampler(data, dims.dp, dp_rank, shuffle=False, drop_last=True)
        return DataLoader(data, self.args.train_batch_size, sampler=sampler, collate_fn=self.data_collator)

    def _get_num_items_in_batch(self, batch_samples, device):
        return self.sequence.count_label_tokens(batch_samples)  # over all micro-batches of the step, each token once

    def _prepare_inputs(self, inputs):
        return inputs  # cut on the CPU, so that only this rank's part goes to the device

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        shard = self.sequence.shard(inputs)
        outputs = model(**shard.inputs)
        loss = self.sequence.loss(outputs.logits, shard.shift_labels, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


def load_documents(tokenizer):
    """Return tokenised documents with `input_ids`. Here these are short files of Python's standard library."""
    documents = tokenize_records(load_records("stdlib").select(range(160)), tokenizer)
    return documents.filter(lambda document: len(document["input_ids"]) <= 1500)


def main():
    args = TrainingArguments(
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        ddp_find_unused_parameters=False,
        remove_unused_columns=False,
        use_cpu=not torch.cuda.is_available(),
    )
    tokenizer = tiny_tokenizer()  # AutoTokenizer.from_pretrained(...)
    model = tiny_model()  # AutoModelForCausalLM.from_pretrained(...)
    model, sequence = longctx.parallelize(model, sp=SP, device=args.device)
    with args.main_process_first():
        documents = load_documents(tokenizer)
    collator = SequenceCollator(tokenizer.pad_token_id, sequence.dims.multiple, padding_free=True)
    trainer = SequenceTrainer(model, args, collator, documents, sequence=sequence)
    trainer.train()
    for entry in trainer.state.log_history[:-1]:
        if trainer.is_world_process_zero():
            print(f"step {entry['step']}: loss {entry['loss']:.7f}")


if __name__ == "__main__":
    main()
