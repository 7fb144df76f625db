"""What QLoRA fits on one to eight cards of 24 to 48 GB, how fast it trains, and with which flags.

    python -m benchmarks.small_gpus                                     # print the tables
    python -m benchmarks.small_gpus --output docs/howto/small-gpus.md    # and put them into the page

Predicted as `longctx plan` does, never measured, for one document per sequence. The cards are in one machine without
NVLink. A row is the plan's recommendation for its cards and length; it leaves 10% of the device's and of the host's
memory free. Rows that do not are left out.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from longctx.forecast.documents import one_document
from longctx.forecast.search import Choice
from longctx.forecast.seconds import weights_seconds
from longctx.machine.here import Machine
from longctx.report.plan_text import Plan, flags_of
from longctx.settings.read import parse_flags

from . import page
from .published import CONFIGS

MODELS = ("Qwen/Qwen3-8B", "Qwen/Qwen3-32B")
CARD_GB = {"RTX 4090": 24, "L40S": 48}
HOST_GIB = {"RTX 4090": 128, "L40S": 512}
"""Host memory of a machine with such cards, by card."""
CARDS = (1, 2, 4, 8)
LENGTHS = tuple(k * 1024 for k in (32, 64, 128, 256, 512))
GIB = 2**30
START, END = "<!-- tables of benchmarks.small_gpus -->", "<!-- end of the tables -->"


class Row(NamedTuple):
    """A recommendation for so many cards and so long sequences."""

    cards: int
    length: int
    best: Choice
    flags: str
    gather_seconds: float
    """To gather weights, forward and backward, and to reduce the adapter's gradients, in one step."""

    def cells(self) -> list[str]:
        gather = f"{self.gather_seconds:.1f}"
        if (exposed := self.best.cost.seconds.get("weights", 0.0)) >= 0.05:
            gather += f", {exposed:.1f} of it exposed"
        flags = self.flags.replace(" --", "` `--")  # each in a span of its own, which is not broken over lines
        numbers = f"{self.best.cost.speed:,.0f}", f"{self.best.cost.step_seconds:,.1f}", gather
        return [str(self.cards), f"{self.length:,}", *numbers, f"`{flags}`"]


def rows(model: str, card: str, cards: int) -> Iterator[Row]:
    """Yield the rows of a model on so many cards, by length."""
    machine = Machine.of(card, cards, host_bytes=HOST_GIB[card] * GIB)
    with tempfile.TemporaryDirectory() as folder:
        CONFIGS[model].save_pretrained(folder)
        adapter = ["--use_peft", "True", "--load_in_4bit", "True", "--dtype", "bfloat16"]
        settings = parse_flags(["--model_name_or_path", folder, *adapter])
        plan = Plan(settings, machine, cards, lengths=LENGTHS, documents=one_document)
        for length, choices in plan.choices.items():
            best = choices[0]
            if best.cost.level > 0:
                return
            scaling = plan.scaling(length)
            flags = flags_of(best) + (f" --rope_scaling {scaling}" if scaling else "")
            yield Row(cards, length, best, flags, weights_seconds(best.shape, machine))


def table(model: str, card: str) -> Iterator[str]:
    """Yield the lines of the table of a model on a card."""
    yield f"### {model.partition('/')[2]} on {card}, {CARD_GB[card]} GB"
    yield f"\nThe machine has {HOST_GIB[card]} GiB of host memory.\n"
    found = (row.cells() for cards in CARDS for row in rows(model, card, cards))
    yield from page.table(["cards", "sequence", "tokens/s per card", "step, s", "gather, s", "flags"], found)
    yield ""


def section() -> str:
    """Return the part of the page that has the tables, with its two marks."""
    tables = (line for model in MODELS for card in CARD_GB for line in table(model, card))
    return "\n".join([START, "", *tables, END])


def main() -> None:
    parser = page.parser("small_gpus", __doc__)
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
