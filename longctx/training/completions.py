"""`--eval_generate`: greedy answers to prompts of the evaluation data, sampled at each evaluation.

There is no cache of keys and values: each new token takes a forward pass of the whole sequences, cut over the ranks as
in training. Room for the answers is left from the start, which causal attention does not see, so that the cut is
planned once.

prompts [1 2 3] and [4 5], room for 2 tokens:  1 2 3 . . | 4 5 . .  ->  1 2 3 6 . | 4 5 7 .  ->  1 2 3 6 8 | 4 5 7 9
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from rich.text import Text
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState
from trl import SFTConfig

from longctx.collate import SequenceCollator
from longctx.data import IGNORE_INDEX
from longctx.launch.console import say, show_for_now, show_row
from longctx.launch.terminal import printable
from longctx.packing import pack
from longctx.ranks import hang
from longctx.ranks.agreement import broadcast_object, host_group
from longctx.regions import region
from longctx.sequence.shard import cut, shard_tokens
from longctx.training.progress import duration
from longctx.untrusted.files import written_whole

logger = logging.getLogger(__name__)

COMPLETIONS_FILE = "completions.jsonl"
"""The name of the file in output_dir, with a line for each answer: step, prompt, completion and finish_reason."""
MAX_NEW_TOKENS = 256
SHOWN = 300
"""Characters of a prompt's end that are printed."""
SHOWN_LINES = 12
"""Lines of an answer that are printed."""


class LogCompletions(TrainerCallback):
    """Samples answers at each evaluation, prints them, and keeps them in the run's folder.

    Args:
        trainer: a `SequenceTrainer`, whose model answers.
        prompts: tokens of each, of which rank 0's are taken.
        max_length: tokens of a prompt with its answer at most. Prompts that leave no room are passed over.
    """

    def __init__(self, trainer: Trainer, prompts: Sequence[NDArray[np.integer]], max_length: int):
        self.trainer: Any = trainer
        given = broadcast_object(list(prompts))
        self.prompts = [prompt for prompt in given if len(prompt) < max_length]
        self.num_too_long = len(given) - len(self.prompts)
        self._room = [min(MAX_NEW_TOKENS, max_length - len(prompt)) for prompt in self.prompts]
        self._lengths = [len(prompt) + room for prompt, room in zip(self.prompts, self._room, strict=True)]
        packs, dp = [indices.tolist() for indices in pack(self._lengths, max_length).bins], trainer.sequence.dims.dp
        self._rounds = [packs[first : first + dp] for first in range(0, len(packs), dp)]
        """Packs [round][data-parallel rank] of prompts that are answered at once."""
        self.entries: list[dict[str, Any]] = []
        """What the file holds."""

    def __str__(self) -> str:
        """What it costs, for the summary of a run."""
        passes = sum(max(self._room[i] for pack in packs for i in pack) for packs in self._rounds)
        longest = max((sum(self._lengths[i] for i in pack) for packs in self._rounds for pack in packs), default=0)
        passed_over = f"; {self.num_too_long} that leave no room in --max_length are passed over"
        return (
            f"answers to {len(self.prompts)} prompts at each evaluation, of up to {MAX_NEW_TOKENS} tokens: up to "
            f"{passes:,} forward passes of {longest:,} tokens, since keys and values are not cached"
            f"{passed_over * bool(self.num_too_long)}"
        )

    def on_train_begin(self, args: SFTConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if args.should_save and (before := read_completions(Path(args.output_dir))):
            self.entries = [e for e in before if e["step"] <= state.global_step] if state.global_step else []
            self._write(Path(args.output_dir))

    def on_evaluate(self, args: SFTConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        start = time.perf_counter()
        with self.trainer.step_metrics.paused(), region("evaluation"):
            answers = self._sample()
        if not (answers and args.should_save):  # no prompt, or a signal
            return
        tokenizer, ends = self.trainer.processing_class, self._end_tokens()
        sampled = [
            {
                "step": state.global_step,
                "prompt": tokenizer.decode(prompt),
                "completion": tokenizer.decode(answer, skip_special_tokens=True),
                "finish_reason": "stop" if answer[-1] in ends else "length",
            }
            for prompt, answer in zip(self.prompts, answers, strict=True)
        ]
        self.entries = [entry for entry in self.entries if entry["step"] < state.global_step] + sampled
        self._write(Path(args.output_dir))
        if state.is_world_process_zero:
            say(f"answers after step {state.global_step:,}, in {duration(time.perf_counter() - start)}")
            for entry in sampled:
                show_row(Text(printable(ending(entry["prompt"])), "dim"))
                show_row(Text(printable(_in_few_lines(answer_of(entry)))))

    def _write(self, folder: Path) -> None:
        try:
            with written_whole(folder / COMPLETIONS_FILE) as unfinished:
                unfinished.write_text("".join(json.dumps(entry) + "\n" for entry in self.entries), encoding="utf-8")
        except OSError as error:  # the run is not to fail for its answers
            logger.warning("%s is not written: %s", folder / COMPLETIONS_FILE, error)

    def _sample(self) -> list[list[int]] | None:
        """Return the tokens of each answer, the same on all ranks; None once a signal asks the run to stop.

        Called by all ranks together. Data-parallel ranks answer prompts of their own, and take part in as many forward
        passes as the others.
        """
        dims, rank = self.trainer.sequence.dims, self.trainer.sequence.rank
        answers: list[list[int]] = [[] for _ in self.prompts]
        ends = self._end_tokens()
        for packs in self._rounds:
            mine = packs[dims.dp_rank(rank)] if dims.dp_rank(rank) < len(packs) else []
            growing = _Growing(self.trainer, [self.prompts[i] for i in mine], [self._room[i] for i in mine])
            waiting = {i for pack in packs for i in pack}
            while waiting:
                hang.WATCH.go_on()
                found = growing.next_tokens([place for place, i in enumerate(mine) if i in waiting])
                tokens = torch.full((len(answers) + 1,), -1)
                for place, token in found.items():
                    tokens[mine[place]] = token
                tokens[-1] = self.trainer.stop_on_signal.received
                if dist.is_initialized():
                    dist.all_reduce(tokens, op=dist.ReduceOp.MAX, group=host_group(dist.group.WORLD))
                if tokens[-1]:
                    return None
                for i in waiting:
                    answers[i].append(int(tokens[i]))
                    if i in mine:
                        growing.append(mine.index(i), answers[i][-1])
                waiting = {i for i in waiting if answers[i][-1] not in ends and len(answers[i]) < self._room[i]}
                if self.trainer.is_world_process_zero():
                    show_for_now(f"answers: token {max(map(len, answers))} of {MAX_NEW_TOKENS}" if waiting else "")
        return answers

    def _end_tokens(self) -> set[int]:
        """Return the tokens that end an answer, as `model.generate` takes them."""
        config, tokenizer = self.trainer.model.generation_config, self.trainer.processing_class
        ends = tokenizer.eos_token_id if config is None or config.eos_token_id is None else config.eos_token_id
        return {*ends} if isinstance(ends, list) else {ends}


class _Growing:
    """A pack of prompts with their answers so far, of which this rank holds a part.

    Args:
        prompts: int [tokens] each; without any, the pack is padding.
        room: tokens of each answer at most.
    """

    def __init__(self, trainer: Any, prompts: Sequence[NDArray[np.integer]], room: Sequence[int]):
        self._trainer, sequence = trainer, trainer.sequence
        collator = SequenceCollator(trainer.processing_class.pad_token_id, sequence.dims.multiple, padding_free=True)
        lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
        rows = [{"input_ids": np.pad(prompt, (0, new))} for prompt, new in zip(prompts, room, strict=True)]
        self._batch, layout = collator.with_layout(rows)
        self._layout = layout.spread(sequence.dims, sequence.time_of_plan)
        self._sp_rank = sequence.dims.sp_rank(sequence.rank)
        self._next = np.cumsum(lengths + room, dtype=np.int64) - room
        """Where the next token of each answer will stand in the pack."""
        self._held = shard_tokens(torch.arange(layout.num_tokens)[None], self._layout, self._sp_rank)[0]
        """Which tokens of the pack this rank holds."""

    def next_tokens(self, places: Sequence[int]) -> dict[int, int]:
        """Return the most likely next tokens of the answers at these places, where this rank holds the one before.

        Called by all ranks together.
        """
        labels = self._batch["labels"].fill_(IGNORE_INDEX).view(-1)
        labels[self._next[places]] = 0
        shard = cut(self._batch, self._layout, self._sp_rank)
        placed = self._trainer.sequence.place(shard)
        with torch.no_grad(), self._trainer.compute_loss_context_manager():
            tokens = self._trainer.model(
                **placed.inputs, shift_labels=placed.shift_labels, token_outputs=True, next_tokens=True
            )
        stands = {int(self._next[place]): place for place in places}
        held = (self._held[shard.learnt] + 1).tolist()
        return {stands[after]: token for after, token in zip(held, tokens.tolist(), strict=True)}

    def append(self, place: int, token: int) -> None:
        """Add a token to the answer at this place."""
        self._batch["input_ids"].view(-1)[self._next[place]] = token
        self._next[place] += 1


def _in_few_lines(text: str) -> str:
    """Return a text without blank lines, and with at most SHOWN_LINES."""
    lines = [line for line in text.split("\n") if line.strip()]
    return "\n".join(lines[:SHOWN_LINES] + ["…"] * (len(lines) > SHOWN_LINES)) or "(white space)"


def ending(prompt: str) -> str:
    """Return the end of a prompt, as it is shown."""
    return prompt if len(prompt) <= SHOWN else f"… {prompt[-SHOWN:]}"


def answer_of(entry: Mapping[str, Any]) -> str:
    """Return the answer of a line of completions.jsonl, as it is shown."""
    return entry["completion"] + " …" * (entry["finish_reason"] == "length")


def read_completions(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of completions.jsonl in a run's folder; none without a file."""
    with suppress(FileNotFoundError):
        lines = (folder / COMPLETIONS_FILE).read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines if line]
    return []
