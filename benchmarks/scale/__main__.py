"""Run it: `python -m benchmarks.scale`. The package's docstring says what it measures."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple

from transformers import DeepseekV3Config

from .. import page
from ..published import CONFIGS
from . import __doc__ as about
from . import formulas
from .formulas import NODE, Bandwidth, Model, Ranges
from .runs import Phase, Run, converted_config, flags, measured, model_config, write_model

SMALL = {"hidden": 192, "layers": 4, "vocabulary": 2_000}
"""The model of more than 8 ranks."""
SMALL_FILE = 10**6
"""Most bytes of its files."""
COUNTS, MEMORY = 0.02, 0.15
"""Relative differences above which a row is marked."""
NOISE = 8 << 20
"""Bytes by which memory may differ besides: what threads and sockets take does not come from the model."""
PACKAGES = ("torch", "transformers", "accelerate", "safetensors")
CONVERTED = 4
"""Ranks that also run a model whose weights are converted when they are loaded."""
RESUMED_BY = {8: (2,), 48: (12,)}
"""Ranks that wrote a checkpoint -> others that resume from it, too."""
COMPUTED_RANKS = (8, 64, 256, 1024)
STORED_FILE = 5 * 10**9
"""Assumed size in bytes of each file of the weights that a run starts from."""


class Row(NamedTuple):
    """A figure of a real run, and what a formula gives."""

    run: str
    what: str
    measured: float
    computed: float | None
    """None for what no formula gives."""
    unit: str = "bytes"
    tolerance: float = COUNTS
    """Relative difference above which a row of bytes or counts is marked. Memory and seconds use MEMORY."""

    @property
    def differs(self) -> bool:
        if self.computed is None:
            return False
        slack = NOISE if self.unit == "MiB" else 0
        tolerance = MEMORY if self.unit in ("MiB", "s") else self.tolerance
        return abs(self.measured - self.computed) - slack > tolerance * self.measured

    def cells(self) -> list[str]:
        first = [self.run, self.what, _number(self.measured, self.unit)]
        if self.computed is None:
            return [*first, "", "", ""]
        ratio = f"{self.measured / self.computed:.3f}" if self.computed else ""
        mark = "**!**" if self.differs else ""
        if self.unit == "s" and self.differs:
            mark = "slower" if self.measured > self.computed else "faster"
        return [*first, _number(self.computed, self.unit), ratio, mark]


HEAD = ["run", "figure", "measured", "computed", "ratio", ""]


def _number(value: float, unit: str) -> str:
    if unit == "MiB":
        return f"{value / 2**20:,.2f} MiB" if value < 2**25 else f"{value / 2**20:,.0f} MiB"
    return f"{value:,.1f} s" if unit == "s" else f"{value:,.0f}{unit and f' {unit}'}"


def first_rows(name: str, model: Model, ranks: Sequence[dict[str, Phase]], folder: Path, speed: float) -> Iterator[Row]:
    """Hold what the ranks of a first start have measured against the formulas.

    Args:
        folder: the checkpoint.
        speed: bytes per second of the disk.
    """
    num_ranks, row = len(ranks), partial(Row, name)
    every = range(num_ranks)
    layout = [formulas.ranges_of(model, rank, num_ranks) for rank in every]
    loading, saving = [rank["loading"] for rank in ranks], [rank["saving"] for rank in ranks]
    mapped = 0
    if model.is_converted:
        mapped = 2 * model.numel  # rank 0 has mapped the files, and their pages are in memory
        rise = max(phase.rise for phase in loading[1:])
        yield row("load: host memory of another rank", rise, formulas.host_in_loading(model, 1, num_ranks), "MiB")
    else:
        opened = [sum(n for path, n in phase.opened.items() if path.endswith(".safetensors")) for phase in loading]
        yield row("load: weights read", _most(loading, "asked"), formulas.read_in_loading(model, 0, num_ranks))
        opens = formulas.opened_in_loading(model, 0, num_ranks, num_files=1)
        yield row("load: files of weights opened", max(opened), opens, "times")
    host = formulas.host_in_loading(model, 0, num_ranks) + mapped
    yield row("load: host memory", max(phase.rise for phase in loading), host, "MiB")

    files = [(formulas.weights_written(model, r, num_ranks), formulas.states_written(model, layout[r])) for r in every]
    written, found = [sum(chain(*of_rank)) for of_rank in files], [sum(phase.written.values()) for phase in saving]
    yield row("save: written, most of a rank", max(found), max(written))
    yield row("save: written by all", sum(found), sum(written))
    count = sum(len(phase.written) for phase in saving)
    yield row("save: files of weights and states", count, sum(len([*chain(*of_rank)]) for of_rank in files), "")
    yield row("save: gathered through each rank", _most(saving, "gathered"), 4 * model.numel)
    begun = [(moment, n) for p in saving for times in p.writing for moment, n in zip(times, (1, -1), strict=True)]
    at_once = max(accumulate(n for _, n in sorted(begun)))
    yield row("save: files of weights being written at once, which depends on time", at_once, None, "")
    hosts = [formulas.host_in_saving(*of_rank) for of_rank in files]
    yield row("save: host memory", _most(saving, "rise"), max(hosts), "MiB")
    for which, at in (("rank 0", [0]), ("another", every[1:])):
        calls = max(sum(saving[rank].calls[key] for key in ("set", "add", "delete_key")) for rank in at)
        computed = max(formulas.calls_in_saving(rank, num_ranks) for rank in at)
        yield row(f"save: calls that write to the store, {which}", calls, computed, "")
    waiting = max(phase.calls["get"] + phase.calls["check"] for phase in saving)
    yield row("save: other calls, which depend on time", waiting, None, "")
    reports = sum(formulas.report_of(model, rank, layout[rank], num_ranks) for rank in every)
    yield row("save: reports that rank 0 receives", saving[0].received, reports)
    index, manifest = ((folder / file).stat().st_size for file in ("index.json", "longctx.json"))
    yield row("index.json", index, formulas.index_bytes(model, layout))
    yield row("longctx.json", manifest, formulas.manifest_bytes(model, layout), tolerance=MEMORY)
    yield row("start, to the end of step 1", max(rank["start"].seconds for rank in ranks), None, "s")
    yield row("load", _most(loading, "seconds"), 2 * model.numel / speed, "s")
    yield row("save", _most(saving, "seconds"), sum(written) / speed, "s")


def resumed_rows(
    name: str, model: Model, ranks: Sequence[dict[str, Phase]], layout: Sequence[Ranges], speed: float
) -> Iterator[Row]:
    """Hold what the ranks of a start that resumes have measured against the formulas.

    Args:
        layout: the ranges of the ranks that wrote the checkpoint.
    """
    num_ranks, row = len(ranks), partial(Row, name)
    resuming, checking = [rank["resuming"] for rank in ranks], [rank["checking"] for rank in ranks]
    read = formulas.read_in_resuming(model, 0, num_ranks)
    yield row("resume: states and weights read", _most(resuming, "asked"), read)
    computed = [formulas.files_in_resuming(model, rank, num_ranks, len(layout)) for rank in range(num_ranks)]
    opened = [[Path(path).name for path in phase.opened if path.endswith(".safetensors")] for phase in resuming]
    for number, (what, prefix) in enumerate({"states": "states-", "weights": "model"}.items()):
        found = max(sum(file.startswith(prefix) for file in files) for files in opened)
        yield row(f"resume: files of {what} that a rank opens", found, max(files[number] for files in computed), "")
    yield row("resume: host memory", _most(resuming, "rise"), formulas.host_in_resuming(model, num_ranks), "MiB")
    read = formulas.read_in_checking(model, layout, num_ranks)
    yield row("resume: read to check files, by all", sum(phase.read for phase in checking), read, tolerance=MEMORY)
    yield row("resume: check", _most(checking, "seconds"), 12 * model.numel / speed, "s")
    yield row("resume: read", _most(resuming, "seconds"), 12 * model.numel / speed, "s")
    yield row("start that resumes, to its first step", max(rank["start"].seconds for rank in ranks), None, "s")


def _most(phases: Sequence[Phase], name: str) -> float:
    return max(getattr(phase, name) for phase in phases)


def real_rows(ranks: Sequence[int], sizes: Mapping[str, int], folder: Path, speed: float) -> Iterator[Row]:
    """Run each group size, and yield its rows as soon as they are known.

    Args:
        sizes: of the model of at most 8 ranks.
    """
    models: dict[str, Model] = {}
    kinds = [(ranks_, "small" if ranks_ > NODE else "large") for ranks_ in ranks]
    for num_ranks, kind in kinds + [(CONVERTED, "converted")] * (CONVERTED in ranks):
        is_small, own = kind == "small", folder / kind
        length = 8 * num_ranks if is_small else 64
        if kind not in models:
            config = converted_config() if kind == "converted" else model_config(**(SMALL if is_small else sizes))
            write_model(own / "model", config)
            model = Model.of(kind, config)
            models[kind] = replace(model, weights_file=SMALL_FILE, states_file=SMALL_FILE) if is_small else model
        model, output = models[kind], own / "output"
        folders = [own / "model", output]
        name = f"{num_ranks} ranks, {model.numel / 1e6:.0f}M{', converted' * model.is_converted}"
        run = Run(output, flags(own, num_ranks, length=length, steps=1), folders, SMALL_FILE if is_small else None)
        yield from first_rows(name, model, measured(num_ranks, run), output / "checkpoint-1", speed)
        layout = [formulas.ranges_of(model, rank, num_ranks) for rank in range(num_ranks)]
        for others in (num_ranks, *RESUMED_BY.get(num_ranks, ())):
            given = flags(own, others, length=length, steps=2, resume=output / "checkpoint-1")
            found = measured(others, run._replace(output=own / "again", flags=given))
            shutil.rmtree(own / "again")
            which = name if others == num_ranks else f"{name}, resumed by {others}"
            yield from resumed_rows(which, model, found, layout, speed)
        shutil.rmtree(output)


def disk_speed(folder: Path, size: int = 1 << 28) -> float:
    """Return the bytes per second at which a file is written, flushed and read again."""
    began, path = time.monotonic(), folder / "speed"
    with path.open("wb") as file:
        file.write(os.urandom(1 << 20) * (size >> 20))
        file.flush()
        os.fsync(file.fileno())
    path.read_bytes()
    path.unlink()
    return size / (time.monotonic() - began)


COMPUTED = {
    "A start": (
        *("read by rank 0", "times that a rank opens files of weights", "host memory of rank 0, on GPUs"),
        *("offloaded", "seconds"),
    ),
    "A save, files and memory": (
        *("written by rank 0", "by all", "gathered through each rank", "host memory, most of a rank"),
        *("with `--save_async`", "seconds"),
    ),
    "A save, messages": ("calls of rank 0", "of another", "reports to rank 0", "index.json", "longctx.json"),
    "A start that resumes": (
        *("read by rank 0", "files of states", "of weights", "of states, written by twice as many ranks"),
        *("host memory, offloaded", "seconds"),
    ),
}
"""Tables of computed rows, and what they have besides model and ranks."""


NOT_SHRINKING = """\
Some figures do not shrink with more ranks:

- In a save, the whole model passes through each rank, tensor by tensor, and the ranks of the first node write most of
  its files.
- Every rank that resumes reads index.json and longctx.json, which grow with the ranks that wrote them.
- Before a start on several nodes, one rank digests the model's files; the next start takes its digest from the cache.
- DeepSeek-V3 is a type whose weights are converted: rank 0 reads all of them and holds them in fp32, and a checkpoint
  has 16 bytes a parameter, since the ranges hold the weights as well. The experts of a layer are one parameter, which
  is cut between experts: 256 ranks hold one of each layer, and all others hold none."""


def computed_rows(model: Model, num_ranks: int, speed: Bandwidth) -> list[list[str]]:
    """Return the values of a row in each table of COMPUTED."""
    layout = [formulas.ranges_of(model, rank, num_ranks) for rank in range(num_ranks)]
    written, of_states, hosts, copies, reports = [], [], [], [], 0
    for rank, ranges in enumerate(layout):
        weights, states = formulas.weights_written(model, rank, num_ranks), formulas.states_written(model, ranges)
        written.append(sum(weights) + sum(states))
        of_states.append(sum(states))
        hosts.append(formulas.host_in_saving(weights, states))
        copies.append(formulas.host_in_saving(weights, states, is_async=True))
        reports += formulas.report_of(model, rank, ranges, num_ranks)
    num_files = -(-2 * model.numel // STORED_FILE)
    start, save, resume = formulas.seconds(model, num_ranks, of_states, speed)
    states_files, weights_files = formulas.files_in_resuming(model, 0, num_ranks, num_ranks)
    return [
        [
            _size(formulas.read_in_loading(model, 0, num_ranks)),
            "" if model.is_converted else f"{formulas.opened_in_loading(model, 0, num_ranks, num_files=num_files):,}",
            _size(formulas.host_in_loading(model, 0, num_ranks, on_host=False)),
            _size(formulas.host_in_loading(model, 0, num_ranks)),
            f"{start:,.0f}",
        ],
        [*map(_size, (max(written), sum(written), 4 * model.numel, max(hosts), max(copies))), f"{save:,.0f}"],
        [
            *(f"{formulas.calls_in_saving(rank, num_ranks):,}" for rank in (0, 1)),
            *map(_size, (reports, formulas.index_bytes(model, layout), formulas.manifest_bytes(model, layout))),
        ],
        [
            _size(formulas.read_in_resuming(model, 0, num_ranks)),
            f"{states_files:,}",
            f"{weights_files:,}",
            f"{formulas.files_in_resuming(model, 0, num_ranks, 2 * num_ranks)[0]:,}",
            _size(formulas.host_in_resuming(model, num_ranks)),
            f"{resume:,.0f}",
        ],
    ]


def _size(size: float) -> str:
    power = 0
    while size >= 1000 and power < 4:
        size, power = size / 1000, power + 1
    return f"{size:,.3g} {('B', 'KB', 'MB', 'GB', 'TB')[power]}"


def large_models() -> list[Model]:
    """Return the models of the computed rows; the sizes of DeepSeek-V3's config.json are transformers' defaults."""
    configs: dict[str, Any] = {name: CONFIGS[f"meta-llama/{name}"] for name in ("Llama-3.1-8B", "Llama-3.1-70B")}
    return [Model.of(name, config) for name, config in (configs | {"DeepSeek-V3": DeepseekV3Config()}).items()]


def report(options: argparse.Namespace, folder: Path) -> Iterator[str]:
    """Yield the page's tables, a row of a real run as soon as it is known."""
    if options.ranks:
        speed = disk_speed(folder)
        yield from ("## Real runs", "", f"The disk wrote, flushed and read again {speed / 1e9:.2f} GB/s.", "")
        yield page.head(HEAD)
        sizes = {"hidden": options.hidden, "layers": options.layers, "vocabulary": options.vocabulary}
        for row in real_rows(options.ranks, sizes, folder, speed):
            yield page.row(row.cells())
        yield ""
    speeds = Bandwidth(options.node_gbs * 1e9, options.storage_gbs * 1e9)
    models = large_models()
    rows = [(model, ranks, computed_rows(model, ranks, speeds)) for model in models for ranks in COMPUTED_RANKS]
    yield from ("## Computed rows", "")
    yield f"Seconds are those of files, at {options.node_gbs:g} GB/s a node and {options.storage_gbs:g} GB/s in all."
    yield from ("", *NOT_SHRINKING.splitlines())
    for number, (title, names) in enumerate(COMPUTED.items()):
        yield from ("", f"### {title}", "", page.head(["model", "ranks", *names]))
        yield from (page.row([model.name, f"{ranks:,}", *values[number]]) for model, ranks, values in rows)


def main(arguments: list[str] | None = None) -> int:
    """Print the page; exit code 1 if a figure differs from its formula."""
    parser = page.parser("scale", about)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8, 48], help="Of real runs. Default: 2 4 8 48.")
    parser.add_argument("--hidden", type=int, default=1024, help="Of the model of up to 8 ranks. Default: 1024.")
    parser.add_argument("--layers", type=int, default=22, help="Of this model. Default: 22, so 291M parameters.")
    parser.add_argument("--vocabulary", type=int, default=32_000, help="Of this model. Default: 32000.")
    parser.add_argument("--node_gbs", type=float, default=2.0, help="GB/s of files that a node reads. Default: 2.")
    parser.add_argument("--storage_gbs", type=float, default=100.0, help="GB/s of all nodes together. Default: 100.")
    parser.add_argument("--output", type=Path, help="Also write the page here.")
    options = parser.parse_args(arguments)
    output, differs = page.Report(options.output), False
    facts = f"{page.device()}, gloo", page.versions(PACKAGES)
    output.add(*page.heading("Files, memory and messages at scale", page.command("scale", arguments), *facts))
    output.add(page.explained(about), "")
    with tempfile.TemporaryDirectory() as folder:
        for text in report(options, Path(folder)):
            output.add(text)
            differs |= text.startswith("|") and "**!**" in text
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
