"""Key retrieval: a key of three digits is hidden in 16,384 tokens of source code, and the end asks for it.

python examples/retrieval/retrieval.py data --output retrieval-data
accelerate launch -m longctx.train --config examples/retrieval/train.yaml
python examples/retrieval/retrieval.py ask --model_name_or_path retrieval-model --output retrieval-model

`data` writes documents that grow from 64 to 16,384 tokens. `ask` lets the trained model write the answers, with stock
transformers on one process. It draws how many are right, by length and by place of the key.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from longctx.model.tiny import tiny_tokenizer

SHORTEST = 64
"""Tokens of the shortest document, the answer included."""
DIGITS = 3
QUESTION = "\nkey: "
PLACES = [place / 10 for place in range(11)]
STAGES = (120, 80, 80, 80, 240)
"""Sequences of each training stage. The longest document is four times as long as in the stage before."""


class Haystack:
    """Random parts of the source code of Python's standard library. One byte is one token of `tiny`."""

    def __init__(self, seed: int):
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = "".join(file.read_text(encoding="ascii", errors="ignore") for file in files)
        self.text = re.sub(r"\d", "", text)
        self.random = random.Random(seed)
        self.tokenizer = tiny_tokenizer()

    def document(self, num_tokens: int, place: float | None = None) -> tuple[str, str]:
        """A question and its answer, `num_tokens` together, the key at `place`, 0 (first) to 1 (last), or anywhere."""
        key = "".join(self.random.choices("0123456789", k=DIGITS))
        needle = f"{QUESTION}{key}\n"
        room = num_tokens - len(needle) - len(QUESTION) - DIGITS
        start = self.random.randrange(len(self.text) - room)
        hay = self.text[start : start + room]
        at = self.random.randint(0, room) if place is None else round(place * room)
        return hay[:at] + needle + hay[at:] + QUESTION, key

    def record(self, num_tokens: int, place: float | None = None) -> dict[str, list[int]]:
        question, key = self.document(num_tokens, place)
        input_ids = self.tokenizer(question + key)["input_ids"]
        return {"input_ids": input_ids, "labels": [-100] * len(question) + input_ids[len(question) :]}

    def row(self, num_tokens: int, longest: int, first: int | None) -> Iterator[dict[str, list[int]]]:
        """Documents that fill a row; as many are between 64 and 128 tokens long as between 128 and 256, and so on.

        Args:
            first: length of the first of them.
        """
        while num_tokens:
            wanted = first or round(SHORTEST * (longest / SHORTEST) ** self.random.random())
            length = num_tokens if num_tokens < wanted + SHORTEST else wanted
            yield self.record(length)
            num_tokens, first = num_tokens - length, None


def write_data(output: Path, max_length: int) -> None:
    """train.jsonl, short documents first, and test.jsonl, long ones with the key in all places."""
    output.mkdir(parents=True, exist_ok=True)
    haystack = Haystack(seed=0)
    with (output / "train.jsonl").open("w") as file:
        for stage, rows in enumerate(STAGES):
            longest = round(SHORTEST * (max_length / SHORTEST) ** (stage / (len(STAGES) - 1)))
            for row in range(rows):
                first = longest if row % 2 else None
                file.writelines(json.dumps(record) + "\n" for record in haystack.row(max_length, longest, first))
    with (output / "test.jsonl").open("w") as file:
        file.writelines(json.dumps(haystack.record(max_length, place / 11)) + "\n" for place in range(12))


def share_right(written: str, key: str) -> float:
    """Return the share of the key's digits that stand in their places."""
    return sum(a == b for a, b in zip(written, key, strict=False)) / DIGITS


@torch.no_grad()
def share_of_right_digits(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str, key: str) -> float:
    """Of what the model writes, asked."""
    prompt = tokenizer(question, return_tensors="pt").to(model.device)
    written = model.generate(**prompt, max_new_tokens=DIGITS, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    return share_right(tokenizer.decode(written), key)


def ask(model_name_or_path: str, output: Path, max_length: int, samples: int) -> None:
    """retrieval.json, by length and place of the key."""
    model = AutoModelForCausalLM.from_pretrained(model_name_or_path).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_name_or_path)
    haystack = Haystack(seed=1)
    lengths = [SHORTEST * 2**n for n in range((max_length // SHORTEST).bit_length())]
    shares: list[list[float]] = []
    for length in lengths:
        shares.append([])
        for place in PLACES:
            asked = [haystack.document(length, place) for _ in range(samples)]
            right = [share_of_right_digits(model, tokenizer, *document) for document in asked]
            shares[-1].append(sum(right) / samples)
        print(f"{length:6} tokens: {' '.join(f'{share:4.0%}' for share in shares[-1])}", flush=True)
    output.mkdir(parents=True, exist_ok=True)
    result = {"samples": samples, "lengths": lengths, "places": PLACES, "shares": shares}
    (output / "retrieval.json").write_text(json.dumps(result) + "\n")


def learning_curve(run: Path) -> tuple[list[int], list[float]]:
    """Steps, and the share of right digits in test.jsonl after each."""
    log = json.loads((run / "trainer_state.json").read_text())["log_history"]
    found = [(entry["step"], entry["eval_mean_token_accuracy"]) for entry in log if "eval_loss" in entry]
    return [step for step, _ in found], [share for _, share in found]


def draw(results: Path, runs: list[Path], picture: Path) -> None:
    """The shares as a heat map, and the learning curves of `runs` beside it."""
    from matplotlib.figure import Figure

    result = json.loads(results.read_text())
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    cells, curves = figure.subplots(1, 2, width_ratios=(2, 1))
    cells.imshow(result["shares"], vmin=0, vmax=1, cmap="viridis", aspect="auto")
    for row, shares in enumerate(result["shares"]):
        for column, share in enumerate(shares):
            color = "black" if share > 0.5 else "white"
            cells.annotate(f"{100 * share:.0f}", (column, row), ha="center", va="center", fontsize=8, color=color)
    cells.set_xticks(range(len(result["places"])), [f"{place:.0%}" for place in result["places"]])
    cells.set_yticks(range(len(result["lengths"])), [f"{length:,}" for length in result["lengths"]])
    cells.set_xlabel("place of the key in the document")
    cells.set_ylabel("tokens of the document")
    cells.set_title(f"Right digits, % ({result['samples']} documents a cell)", fontsize=11)
    for run in runs:
        curves.plot(*learning_curve(run), marker="o", label=run.name)
    curves.axhline(0.1, color="0.6", linestyle=":", label="by chance")
    curves.set_ylim(0, 1.02)
    curves.set_xlabel("optimizer step")
    curves.set_title(f"Right digits in documents of {result['lengths'][-1]:,} tokens", fontsize=11)
    curves.grid(color="0.9")
    curves.legend(frameon=False)
    figure.savefig(picture, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    parser.add_argument("--max_length", type=int, default=16_384)
    data = commands.add_parser("data", help="write train.jsonl and test.jsonl")
    data.add_argument("--output", type=Path, required=True)
    asking = commands.add_parser("ask", help="ask a trained model, and draw how many digits are right")
    asking.add_argument("--model_name_or_path", required=True)
    asking.add_argument("--output", type=Path, required=True)
    asking.add_argument("--samples", type=int, default=4)
    asking.add_argument("--runs", type=Path, nargs="*", help="folders of runs to draw the learning curves of")
    args = parser.parse_args()
    if args.command == "data":
        write_data(args.output, args.max_length)
    else:
        ask(args.model_name_or_path, args.output, args.max_length, args.samples)
        runs = args.runs or [Path(args.model_name_or_path)]
        draw(args.output / "retrieval.json", runs, args.output / "retrieval.png")


if __name__ == "__main__":
    main()
