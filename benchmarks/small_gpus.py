"""What QLoRA fits on one to eight cards of 24 to 48 GB, how fast it trains, and with which flags.

    python -m benchmarks.small_gpus                                     # print the tables
    python -m benchmarks.small_gpus --output docs/howto/small-gpus.md    # and put them into the page

Predicted, never measured: memory by the closed form, time by `longctx.forecast.step_time`, for one document per
sequence. The cards are in one machine without NVLink. A row is the plan's recommendation for its cards and length; it
leaves 10% of the device's and of the host's memory free. Rows that do not are left out.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from longctx.forecast.candidates import DEVICE_BYTES, GIB, Machine, Outlook, candidates, outlook, recommend
from longctx.forecast.step_time import Speeds, weights_seconds

from longctx.forecast.memory_options import AUTO
from longctx.report.plan_text import Commands

from .published import CONFIGS

MODELS = ("Qwen/Qwen3-8B", "Qwen/Qwen3-32B")
CARD_GB = {"RTX 4090": 24, "L40S": 48}
HOST_GIB = {"RTX 4090": 128, "L40S": 512}
"""Host memory of a machine with such cards, by card."""
CARDS = (1, 2, 4, 8)
LENGTHS = tuple(k * 1024 for k in (32, 64, 128, 256, 512))
KERNEL = "flash-attn 2"
START, END = "<!-- tables of benchmarks.small_gpus -->", "<!-- end of the tables -->"


class Row(NamedTuple):
    """A recommendation for so many cards and so long sequences."""

    cards: int
    best: Outlook
    flags: str
    gather_seconds: float
    """To gather weights, forward and backward, and to reduce the adapter's gradients, in one step."""

    def __str__(self) -> str:
        assert self.best.time is not None, "only what fits has a row"
        gather = f"{self.gather_seconds:.1f}"
        if (exposed := self.best.time.parts.get("weights", 0.0)) >= 0.05:
            gather += f", {exposed:.1f} of it exposed"
        numbers = f"{self.best.speed:,.0f} | {self.best.time.seconds:,.1f} | {gather}"
        flags = self.flags.replace(" --", "` `--")  # each in a span of its own, which is not broken over lines
        return f"| {self.cards} | {self.best.length:,} | {numbers} | `{flags}` |"


def rows(model: str, card: str, cards: int) -> Iterator[Row]:
    """Yield the rows of a model on so many cards, by length."""
    machine = Machine(
        gpus=cards,
        gpus_per_node=cards,
        device=card,
        device_bytes=DEVICE_BYTES[card],
        host_bytes=HOST_GIB[card] * GIB,
        kernel=KERNEL,
        speeds=Speeds.of(card, KERNEL),
    )
    adapter = {"model_name_or_path": model, "use_peft": True, "lora_r": 16, "load_in_4bit": True, "dtype": "bfloat16"}
    found = candidates(CONFIGS[model], machine, presets=("balanced", AUTO), settings=adapter)
    commands = Commands(
        config=CONFIGS[model], model=model, revision="main", rope_scaling=None, adapter=adapter, gpus_per_node=cards
    )
    for length in LENGTHS:
        best = recommend([outlook(candidate, machine, length) for candidate in found])
        if best is None or not best.has_room:
            return
        flags = [shlex.join(best.candidate.flags()), commands.rope_flags(length)]
        seconds = weights_seconds(best.candidate.setup, machine.speeds.device)
        yield Row(cards, best, " ".join(filter(None, flags)), seconds)


def table(model: str, card: str) -> Iterator[str]:
    """Yield the lines of the table of a model on a card."""
    yield f"### {model.partition('/')[2]} on {card}, {CARD_GB[card]} GB"
    yield f"\nThe machine has {HOST_GIB[card]} GiB of host memory.\n"
    yield "| cards | sequence | tokens/s per card | step, s | gather, s | flags |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for cards in CARDS:
        yield from map(str, rows(model, card, cards))
    yield ""


def section() -> str:
    """Return the part of the page that has the tables, with its two marks."""
    tables = (line for model in MODELS for card in CARD_GB for line in table(model, card))
    return "\n".join([START, "", *tables, END])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="Page to put the tables into, between its two marks.")
    options = parser.parse_args()
    text = section()
    print(text)
    if options.output is not None:
        before, _, rest = options.output.read_text(encoding="utf-8").partition(START)
        after = rest.partition(END)[2]
        options.output.write_text(f"{before}{text}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
