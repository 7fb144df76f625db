"""Arrangements of eight ranks on links of a given speed: measured seconds of attention beside the modelled ones.

    python -m benchmarks.links                                      # needs root and iproute2
    python -m benchmarks.links --nodes 4 --megabits 10 --within 320

Every rank has a network namespace of its own. Its link carries `--megabits` per second in each direction. In nodes of
four, ranks 0 to 3 and ranks 4 to 7 reach each other at `--within` megabits per second. gloo sends the same messages in
the same order as in training. Each block of attention is really computed, and the results are compared with those of
one process. After each block, its rank sleeps until the block has taken as long as on a device of `--gigaflops` per
second. In this way, eight ranks on a few cores compute as if each had a device of its own. The column "late" is the
largest part by which the blocks of a rank took longer than this.

The links are measured first, as training does with `--measure_links`, and the model takes these speeds. Each group of
ranks has whole rows of documents, and a step ends with its slowest group. Seconds are those of one forward and one
backward pass; the measured ones are the median of `--repeats` steps. Below the table, the page counts the pairs of
arrangements whose modelled times differ by more than 5%, and how many of them have the same order in measured time.
They are also counted without gathers, whose messages gloo sends in another way than the model expects of NCCL: a
reduce-scatter sends as much as an all-reduce, and only one rank's link carries what passes from node to node.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from longctx.attention import branches
from longctx.attention.backends import BACKENDS
from longctx.attention.cost import Arrangement, Setup
from longctx.attention.kernels import Entries
from longctx.attention.modelled import attention_time, plan_time, planned_work
from longctx.attention.operator import varlen_attention
from longctx.launch.store import meeting_point
from longctx.machine.here import Machine
from longctx.machine.measure import with_measured_links
from longctx.machine.speeds import FLOPS_BACKWARD, FLOPS_FORWARD, Link, Speeds
from longctx.ring import attention as ring_attention
from longctx.sequence.batch import PLAIN
from longctx.sequence.layout import Layout
from longctx.sequence.mesh import ParallelDims, sequence_groups
from longctx.sequence.shard import shard_tokens

from . import page
from .attention.timing import forward_backward
from .attention.ways import Heads, draw_packs
from .ranks import results_of

RANKS = 8
HEADS = Heads(query=8, key_value=2, dim=64)
TOLERANCE = 1e-5
"""Relative in norm, in fp32: sums of some thousand terms in another order."""
DIFFERENT = 1.05
"""Modelled times whose ratio is smaller have no order."""
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of setns(2)
HEADER = ["documents", "arrangement", "modelled s", "measured s", "lowest to highest", "late", "error"]


# --- the network ---------------------------------------------------------------------------------------------------


def _name(rank: int | str) -> str:
    return f"longctx-{os.getpid()}-{rank}"


def _address(rank: int) -> str:
    return f"10.72.0.{rank + 1}"


@contextmanager
def network(megabits: int, within: int, node: int) -> Iterator[list[str]]:
    """Make a network namespace for each rank, and a switch between them; yield their names."""
    names = [_name(rank) for rank in range(RANKS)]
    try:
        _ip(f"netns add {_name('switch')}")
        _ip(f"-n {_name('switch')} link add switch type bridge")
        _ip(f"-n {_name('switch')} link set switch up")
        for rank, name in enumerate(names):
            _ip(f"netns add {name}")
            _ip(f"-n {name} link add eth0 type veth peer name port{rank} netns {_name('switch')}")
            _ip(f"-n {name} addr add {_address(rank)}/24 dev eth0")
            _ip(f"-n {name} link set lo up")
            _ip(f"-n {name} link set eth0 up")
            _ip(f"-n {_name('switch')} link set port{rank} master switch up")
            neighbours = [_address(other) for other in range(RANKS) if other // node == rank // node and other != rank]
            _limit(name, "eth0", "dst", neighbours, megabits, within)
            _limit(_name("switch"), f"port{rank}", "src", neighbours, megabits, within)
        yield names
    finally:
        for name in (*names, _name("switch")):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _limit(namespace: str, link: str, end: str, neighbours: Sequence[str], megabits: int, within: int) -> None:
    """Let a link send no faster than this, and at `within` from or to the node's other ranks."""
    _tc(namespace, f"qdisc add dev {link} root handle 1: htb default 1 r2q 1000")
    for number, rate in ((1, megabits), (2, within)):
        _tc(namespace, f"class add dev {link} parent 1: classid 1:{number} htb rate {rate}mbit burst 64k cburst 64k")
    for address in neighbours:
        _tc(namespace, f"filter add dev {link} parent 1: protocol ip u32 match ip {end} {address} flowid 1:2")


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True)


def _tc(namespace: str, arguments: str) -> None:
    subprocess.run(["ip", "netns", "exec", namespace, "tc", *arguments.split()], check=True)


def _enter(namespace: str) -> None:
    """Let this thread, and those that it starts, see this network alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), _NEW_NETWORK) != 0:
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"


# --- a device of a given speed -------------------------------------------------------------------------------------


class Paced:
    """A device's speed, kept by sleeping after each block of attention."""

    def __init__(self, flops: float) -> None:
        self.flops = flops
        self.late = self.taken = 0.0
        for module in (branches, ring_attention):
            for name, flops, queries in (("block_forward", FLOPS_FORWARD, 0), ("block_backward", FLOPS_BACKWARD, 1)):
                setattr(module, name, self._paced(getattr(module, name), flops, queries))

    def _paced(self, block: Callable[..., Any], flops: int, queries: int) -> Callable[..., Any]:
        """
        Args:
            flops: for a pair of query and key, head, and element of the head.
            queries: which of the block's arguments the queries are.
        """

        def paced(*arguments: Any, **keywords: Any) -> Any:
            started = time.perf_counter()
            results = block(*arguments, **keywords)
            query = arguments[queries]
            entries = next(argument for argument in arguments if isinstance(argument, Entries))
            due = _pairs(entries) * flops * query.shape[1] * query.shape[3] / self.flops
            self.taken += due
            rest = started + due - time.perf_counter()
            self.late += max(0.0, -rest)
            time.sleep(max(0.0, rest))
            return results

        return paced


def _pairs(entries: Entries) -> int:
    """Return the legal pairs of query and key."""
    queries, keys = entries.num_queries, entries.num_keys
    unseen = queries * (queries - 1) // 2 if entries.causal else 0
    return int((queries * keys - unseen).sum())


# --- one arrangement -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Documents in rows, which groups of ranks share."""

    title: str
    rows: list[np.ndarray]
    """The lengths of each row's documents."""

    def arrangements(self) -> list[Arrangement]:
        """Return those whose groups can be given as many whole rows each."""
        sizes = [sp for sp in (2, 4, RANKS) if len(self.rows) % (RANKS // sp) == 0]
        return [arrangement for sp in sizes for b in BACKENDS.spread.values() for arrangement in b.arrangements(sp)]

    def documents(self, group: int, num_groups: int) -> np.ndarray:
        """Return the lengths of one group's documents, which it has in one sequence."""
        each = len(self.rows) // num_groups
        return np.concatenate(self.rows[group * each : (group + 1) * each])


class Found(NamedTuple):
    """What one arrangement took."""

    modelled: float
    measured: list[float]
    late: float
    error: float


def setup_of(arrangement: Arrangement, machine: Machine) -> Setup:
    """Return what the model and the plan know."""
    return Setup(
        sp=arrangement.ring * arrangement.ulysses,
        num_heads=HEADS.query,
        num_key_value_heads=HEADS.key_value,
        head_size=HEADS.dim,
        element_size=4,
        machine=machine,
    )


def modelled(case: Case, arrangement: Arrangement, setup: Setup) -> float:
    """Return the seconds of the slowest group."""
    groups = RANKS // setup.sp
    works = [planned_work(tuple(case.documents(g, groups).tolist()), setup, arrangement) for g in range(groups)]
    return max(attention_time(setup, arrangement, work).seconds for work in works)


def run(case: Case, arrangement: Arrangement, setup: Setup, paced: Paced, repeats: int) -> Found:
    """Measure one arrangement. All ranks call this together."""
    dims = ParallelDims.arrange(RANKS, ring=arrangement.ring, ulysses=arrangement.ulysses)
    rank, groups = dist.get_rank(), sequence_groups(dims, torch.device("cpu"))
    lengths = case.documents(dims.dp_rank(rank), dims.dp)
    tokens = torch.zeros(1, int(lengths.sum()), dtype=torch.int64)
    layout = Layout.of_documents(tokens, tokens, np.cumsum(lengths) - lengths)
    layout = layout.spread(dims, partial(plan_time, setup, arrangement))
    attend = BACKENDS[arrangement.name].attention(layout, groups, PLAIN)
    whole = HEADS.tensors(layout.num_tokens, torch.float32, torch.device("cpu"))
    mine = [_cut(x, layout, dims.sp_rank(rank)) for x in whole]
    seconds: list[float] = []
    results: list[Tensor] = []
    paced.late = paced.taken = 0.0
    for _ in range(repeats):
        dist.barrier()
        results, times = forward_backward(attend, mine, time.perf_counter)
        seconds.append(_slowest(sum(times)))
    late = paced.late / max(paced.taken, 1e-9)
    paced.flops, flops = float("inf"), paced.flops
    one_process = partial(varlen_attention, cu_seqlens=layout.cu_seqlens)
    expected, _ = forward_backward(one_process, whole, time.perf_counter)
    paced.flops = flops
    errors = [
        float((x - _cut(y, layout, dims.sp_rank(rank))).norm() / y.norm())
        for x, y in zip(results, expected, strict=True)
    ]
    return Found(modelled(case, arrangement, setup), seconds, _slowest(late), _slowest(max(errors)))


def _cut(x: Tensor, layout: Layout, sp_rank: int) -> Tensor:
    """[1, h, T, D] -> [1, h, T/P, D]."""
    return shard_tokens(x.transpose(1, 2), layout, sp_rank).transpose(1, 2)


def _slowest(value: float) -> float:
    """Return the largest value of all ranks."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def measure(
    options: argparse.Namespace, node: int, names: list[str], cases: list[Case]
) -> tuple[Speeds, list[list[Found]]]:
    """Measure all arrangements of all cases as one of the ranks."""
    torch.set_num_threads(1)
    _enter(names[int(os.environ["RANK"])])
    dist.init_process_group("gloo", timeout=timedelta(minutes=30), **meeting_point(os.environ))
    across, within = options.megabits * 1e6 / 8, options.within * 1e6 / 8
    flops = options.gigaflops * 1e9
    machine = Machine.of("GPU", node)
    guess = replace(
        machine.speeds,
        attention_forward=flops,
        attention_backward=flops,
        memory=options.gigabytes * 1e9,
        within=Link(within, within),
        across=Link(across, across),
        message_seconds=options.latency,
    )
    machine = with_measured_links(replace(machine, speeds=guess), torch.device("cpu"))
    paced = Paced(flops)
    found = []
    for case in cases:
        ways = case.arrangements()
        found.append([run(case, way, setup_of(way, machine), paced, options.repeats) for way in ways])
    dist.destroy_process_group()
    return machine.speeds, found


def same_order(found: Sequence[Found]) -> tuple[int, int]:
    """Return how many pairs with different modelled times have the same order in both, and how many there are."""
    pairs = [sorted(pair, key=lambda one: one.modelled) for pair in itertools.combinations(found, 2)]
    apart = [(fast, slow) for fast, slow in pairs if slow.modelled > DIFFERENT * fast.modelled]
    same = sum(statistics.median(fast.measured) < statistics.median(slow.measured) for fast, slow in apart)
    return same, len(apart)


def report_network(report: page.Report, node: int, speeds: Speeds, cases: list[Case], found: list[list[Found]]) -> None:
    """Add the section of a network whose nodes have so many ranks."""
    across, within = ((x.pass_on * 8e-6, x.exchange * 8e-6) for x in (speeds.across, speeds.within))
    report.add(
        "", f"## {RANKS // node} nodes of {node}", "", "Megabits a second to one rank and of an all-to-all, measured:"
    )
    report.add(f"{across[0]:.1f} and {across[1]:.1f} between nodes, {within[0]:.1f} and {within[1]:.1f} within.", "")
    report.add(page.head(HEADER))
    orders = []
    for case, ways in zip(cases, found, strict=True):
        named = sorted(zip(case.arrangements(), ways, strict=True), key=lambda pair: pair[1].modelled)
        for way, one in named:
            groups = RANKS // (way.ring * way.ulysses)
            values = [f"{x:.2f}" for x in (one.modelled, statistics.median(one.measured))]
            spread = f"{min(one.measured):.2f} to {max(one.measured):.2f}"
            name = f"{way}" + (f" × dp {groups}" if groups > 1 else "")
            report.add(page.row([case.title, name, *values, spread, f"{one.late:.1%}", f"{one.error:.0e}"]))
        same, pairs = same_order(ways)
        same_without, pairs_without = same_order([one for way, one in named if way.name != "gather"])
        slower = statistics.median(named[0][1].measured) / min(statistics.median(one.measured) for one in ways) - 1
        orders.append(
            f"- {case.title}: {same} of {pairs} pairs, {same_without} of {pairs_without} without gathers. "
            f"{named[0][0]}, the first, took {slower:.1%} longer than the fastest."
        )
    report.add("", "In the modelled order:", "", *orders)


def cases_of(options: argparse.Namespace) -> list[Case]:
    packs = draw_packs(options.tokens // 4, options.tokens // 4, 4)
    uneven = [np.array([options.tokens // 4]), *packs[:3]]
    return [
        Case("packed", packs),
        Case("packed, one row is one document", uneven),
        Case("one document", [np.array([options.tokens // 2])]),
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = page.parser("links", __doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="of all rows together; one document has half of it")
    parser.add_argument("--megabits", type=int, default=40, help="a second, of each rank's link")
    parser.add_argument("--within", type=int, default=320, help="megabits a second between the ranks of a node")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 4], metavar="N", help="ranks of a node")
    parser.add_argument("--gigaflops", type=float, default=1.0, help="a second, of a device's attention")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="a second, of a device's memory")
    parser.add_argument("--latency", type=float, default=2e-3, help="seconds of a message")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, help="write the page to this file, too")
    options = parser.parse_args(arguments)
    if os.geteuid() != 0 or shutil.which("tc") is None:
        sys.exit("Network namespaces need root and iproute2. Run this as root, and install iproute2.")

    report = page.Report(options.output)
    report.add(f"# Arrangements on links of a given speed\n\n{page.command('links', arguments)}  ")
    report.add(f"{page.device()}; {page.today()}, {page.versions(['torch'])}")
    cases, worst = cases_of(options), 0.0
    for node in options.nodes:
        with network(options.megabits, options.within, node) as names:
            speeds, found = results_of(RANKS, measure, options, node, names, cases)[0]
        report_network(report, node, speeds, cases, found)
        worst = max(worst, *(one.error for ways in found for one in ways))
    if not worst <= TOLERANCE:
        sys.exit(f"An arrangement differs from one process by {worst:.1e}; {TOLERANCE:.0e} is allowed.")


if __name__ == "__main__":
    main()
