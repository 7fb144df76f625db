"""Group relative policy optimization with sequence parallelism, on a task whose answers can be verified.

python examples/retrieval/retrieval.py --max_length 4096 data --output retrieval-data
accelerate launch --num_processes 2 -m longctx.train --config examples/retrieval/train.yaml \\
    --max_length 4096 --sp 2 --max_steps 300
torchrun --nproc_per_node 2 examples/retrieval/grpo.py --model_name_or_path retrieval-model

A key of three digits is hidden in a long document, and the end of the document asks for it. The model samples answers,
and an answer's reward is the share of its digits that are right. Rank 0 of each sequence group samples them, with the
stock `generate` of transformers, on a copy of the weights that is gathered for it. All ranks of the group then share
the long documents of the policy step.
"""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from retrieval import DIGITS, Haystack, share_right
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

import longctx
from longctx.collate import SequenceCollator
from longctx.policy import PolicyLoss

POLICY = PolicyLoss(loss_type="dapo", epsilon=0.2, epsilon_high=0.28)


@torch.no_grad()
def sample(model, haystack, args):
    """Answers to a few questions as records with their rewards, and each answer's advantage within its group."""
    records = []
    for _ in range(args.prompts):
        question, key = haystack.document(args.length)
        prompt = torch.tensor([haystack.tokenizer(question)["input_ids"]], device=model.device)
        answers = model.generate(
            prompt,
            do_sample=True,
            num_return_sequences=args.num_generations,
            max_new_tokens=DIGITS,
            min_new_tokens=DIGITS,
            top_k=0,
        )
        for ids in answers.tolist():
            reward = share_right(haystack.tokenizer.decode(ids[-DIGITS:]), key)
            labels = [-100] * (len(ids) - DIGITS) + ids[-DIGITS:]
            records.append({"input_ids": ids, "labels": labels, "reward": reward})
    rewards = torch.tensor([record["reward"] for record in records]).view(args.prompts, args.num_generations)
    spread = rewards.std(1, keepdim=True)
    return records, ((rewards - rewards.mean(1, keepdim=True)) / (spread + 1e-4)).flatten()


def draw(rewards, args):
    """Mean rewards of the steps, and the mean over ten steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(rewards) + 1), rewards, ".", color="0.6", label="step")
    means = torch.tensor(rewards).unfold(0, min(10, len(rewards)), 1).mean(1).tolist()
    axes.plot(range(len(rewards) - len(means) + 1, len(rewards) + 1), means, label="mean of the last 10 steps")
    axes.axhline(0.1, color="0.6", linestyle=":", label="by chance")
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("optimizer step")
    axes.set_title(f"Mean reward in documents of {args.length:,} tokens, sp {args.sp}", fontsize=11)
    axes.grid(color="0.9")
    axes.legend(frameon=False)
    figure.savefig(args.output / "rewards.png", dpi=150)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--sp", type=int, default=2)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a document")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=3, help="of a sequence group in a step")
    parser.add_argument("--num_generations", type=int, default=8, help="answers to each prompt")
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--output", type=Path, help="folder for rewards.json and rewards.png, which needs matplotlib")
    args = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()

    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=torch.float32).to(device)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    model, sequence = longctx.parallelize(model, sp=args.sp)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)

    dims, groups = sequence.dims, sequence.groups
    first = dist.get_global_rank(groups.sequence, 0) if groups.sequence else dist.get_rank()
    samples_here = dist.get_rank() == first
    sampler = None
    if samples_here:
        sampler = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=torch.float32).to(device).eval()
    haystack = Haystack(seed=1000 + dims.dp_rank(dist.get_rank()))
    torch.manual_seed(dist.get_rank())
    collate = SequenceCollator(tokenizer.pad_token_id, dims.multiple, padding_free=True)

    rewards = []
    for step in range(args.steps):
        # All ranks gather the weights; those that sample load them.
        weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        weights = weights if samples_here else {}
        box = [None]
        if samples_here:
            sampler.load_state_dict(weights)
            box = [sample(sampler, haystack, args)]
        if groups.sequence:
            dist.broadcast_object_list(box, src=first, group=groups.sequence)
        records, advantages = box[0]

        # One micro-batch per prompt: its answers are packed into one sequence, which the group shares.
        batches = [
            collate(records[start : start + args.num_generations])
            for start in range(0, len(records), args.num_generations)
        ]
        counts = sequence.count_policy_step(batches)
        entropy = torch.zeros((), device=device)
        for batch, of_batch in zip(batches, advantages.split(args.num_generations), strict=True):
            outputs = sequence.policy_loss(model, batch, of_batch, counts=counts, policy=POLICY)
            outputs.loss.backward()
            entropy += outputs.entropy.sum() * dims.dp / counts.tokens  # averaged over data-parallel ranks below
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        logged = torch.stack([torch.tensor([record["reward"] for record in records], device=device).mean(), entropy])
        dist.all_reduce(logged, op=dist.ReduceOp.AVG)
        rewards.append(logged[0].item())
        if dist.get_rank() == 0:
            print(f"step {step + 1}: mean reward {logged[0]:.3f}, entropy {logged[1]:.5f}", flush=True)
    if args.output and dist.get_rank() == 0:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "rewards.json").write_text(json.dumps(rewards) + "\n")
        draw(rewards, args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
