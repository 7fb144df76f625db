"""The command line and the page; see the package."""

from __future__ import annotations

from pathlib import Path

from .. import page, scaling
from .pictures import curves_picture, time_picture
from .simulation import (
    AGENT,
    DEVICE,
    KERNEL,
    LLAMA,
    NODE,
    ONE,
    PACKED,
    PAYS,
    QWEN,
    SHOWN,
    STEPS,
    STRONG_LENGTH,
    STRONG_ROWS,
    TOGETHER_ON,
    WEAK_TOKENS,
    Case,
    Results,
    longer_rows,
    more_rows,
    strong,
    together,
    widest,
)
from .tables import conclusions, efficiency_table, fastest_table, looser_table, paying_table, together_table

HEAD = f"""\
# How far each backend scales

**All numbers on this page are simulated; nothing is measured.** `python -m benchmarks.scaling --output FOLDER` printed
them on {{date}}. `benchmarks.scaling.simulate` builds each training step from these parts:

- the plan that places documents on ranks: the query–key pairs of every hop, and the tokens that arrive in it;
- the published speeds of an {DEVICE} with {KERNEL} (`longctx.machine.speeds`);
- nodes of {NODE} devices with 450 GB/s between them;
- one network adapter per device, with 400 or 100 Gb/s between nodes.

How to read the tables:

- Models train in bf16 on FSDP2 over all devices. Activation checkpoints include the output of attention and are stored
  in host memory.
- *Packed* sequences hold documents with the lengths of benchmarks/data/document_lengths.csv, packed by best-fit
  decreasing. Steps are drawn from a window of {STEPS} steps. Where the batch grows, every fourth step of the window is
  simulated. Elsewhere, only the step of median cost is simulated.
- *Efficiency* is an ideal time divided by the time of the step. The ideal time is that of layers and attention at the
  speed of the kernels, spread evenly over the devices. The rest of the step is spent on exchanges, on waiting, and on
  merging small blocks.
- A backend *pays off* as long as doubling the number of devices increases the work per second by a factor of {PAYS} or
  more.
- The hybrid is Ulysses over the {NODE} devices of a node, and a ring over nodes.
- Rings are planned as in training. Where this is needed for balance, the plan distributes documents over all ranks.
  The keys and values of these documents then travel to all ranks, and the ring loses efficiency.
  [The cost of balance](#the-cost-of-balance) shows how much.
- The simulation leaves out other jobs on the network, differences between devices, failures, and congestion in
  switches.
- Attention's part of the simulation can be measured without GPUs: [eight processes on slow
  links](../links_cpu_2026-11-25.md) show the measured order of backends beside the simulated one.
"""

STUDIES = ("more devices, same sequences", "longer sequences", "larger batch")


def cases(*documents: str) -> list[Case]:
    return [Case(model, kind, gigabits) for kind in documents for model, gigabits in SHOWN]


def text_of(folder: Path | None) -> str:
    every_split = {case: strong(case) for case in cases(PACKED, ONE)}
    fixed: Results = {case: widest(runs) for case, runs in every_split.items()}
    longer: Results = {case: longer_rows(case) for case in cases(PACKED, ONE)}
    more: Results = {case: more_rows(case) for case in cases(PACKED)}
    studies = dict(zip(STUDIES, (fixed, longer, more), strict=True))
    packed, one = Case(LLAMA, PACKED, 400), Case(LLAMA, ONE, 400)
    shuffled = more_rows(packed, balanced=False)
    one_group = {(case, devices): together(case, devices) for case in cases(PACKED, AGENT) for devices in TOGETHER_ON}
    shown = {case: runs for case, runs in every_split.items() if case in (packed, one, Case(QWEN, PACKED, 400))}
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        of = {kind: {case: fixed[case] for case in cases(kind)} for kind in (PACKED, ONE)}
        curves_picture(folder / "strong.png", of, "Simulated: the same sequences on more devices")
        growing: dict[str, Results] = {
            f"longer sequences: {kind}": {case: longer[case] for case in cases(kind)} for kind in (PACKED, ONE)
        }
        growing["more sequences: packed documents"] = more
        curves_picture(folder / "weak.png", growing, "Simulated: more work on more devices")
        of_kinds = {f"{case.documents}, {case.title}": fixed[case] for case in (packed, Case(LLAMA, PACKED, 100), one)}
        time_picture(folder / "time.png", of_kinds, "Simulated: how ranks spend a step, the same sequences")
    return "\n".join(
        [
            HEAD.format(date=page.today()),
            "## Conclusions",
            "",
            *(f"- {sentence}" for sentence in conclusions(fixed, more, shuffled)),
            "",
            "The table gives the number of devices up to which each backend pays off. († marks a limit by heads, "
            "sequences or memory.)",
            "",
            *paying_table(studies),
            "",
            "## The same sequences on more devices",
            "",
            f"A step has {STRONG_ROWS} sequences of {STRONG_LENGTH:,} tokens. Each sequence is spread over as many "
            "devices as the backend can use, and the sequences run one after the other. On more devices than the model "
            "has heads, Ulysses trains several sequences at a time.",
            "",
            "![efficiency over devices](strong.png)",
            "",
            f"Efficiency and seconds per step ({packed.documents}, {packed.title}):",
            "",
            *efficiency_table(fixed[packed]),
            "",
            "![compute, exchange and waiting](time.png)",
            "",
            "The table gives the fastest backend and number of groups (dp), with at least eight devices per sequence:",
            "",
            *fastest_table(shown),
            "",
            "### The cost of balance",
            "",
            "In training, longctx makes plans for several limits of the imbalance and takes the plan that is modelled "
            "to be fastest (column *by seconds*). With a single limit, `plan_ring` takes the first arrangement in "
            "which no rank has more than `max_imbalance` times the mean attention work (columns *at most*). To reach a "
            "low limit, some documents must be distributed over all ranks in a zigzag. In a ring over many nodes, the "
            "last percent of balance then costs messages that no computation hides. The table shows the efficiency for "
            f"the same sequences as above ({packed.documents}, {packed.title}):",
            "",
            *looser_table(packed, fixed[packed]),
            "",
            "## More work for more devices",
            "",
            f"In the first table, sequences grow: all devices share one sequence, which has {WEAK_TOKENS:,} tokens per "
            f"device. In the second table, the number of sequences grows: each group of {NODE} devices has one "
            f"sequence of {WEAK_TOKENS * NODE:,} tokens.",
            "",
            "![efficiency over devices](weak.png)",
            "",
            f"Longer sequences ({packed.documents}, {packed.title}):",
            "",
            *efficiency_table(longer[packed]),
            "",
            f"More sequences ({packed.documents}, {packed.title}):",
            "",
            *efficiency_table(more[packed]),
            "",
            "## One group of all devices",
            "",
            f"Shuffled or streamed packs differ in cost, and groups of {NODE} devices wait for the group with the "
            "longest documents. `--sp all` makes one group of all devices, which takes the sequences of all groups at "
            "once. Each document is then spread over as many devices as it needs. The table compares steps of shuffled "
            f"packs of {WEAK_TOKENS * NODE:,} tokens, with one pack for every {NODE} devices. The packs are the same "
            "for groups and for one group. *Goal* is the efficiency that the design of `--sp all` aims at. "
            "The documents called agent sessions have log-normal lengths with a median of 38k tokens.",
            "",
            *together_table(one_group),
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    parser = page.parser("scaling", scaling.__doc__)
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write table.md and its pictures here, too")
    options = parser.parse_args(arguments)
    text = text_of(options.output)
    page.Report(options.output and options.output / "table.md").add(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
