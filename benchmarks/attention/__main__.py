"""The command line; see the package."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import longctx
from longctx.training.engines import prefer_huge_pages
from longctx.upstream.deepspeed_internals import stay_on_cpu

from .. import attention, page
from .timing import measure_ranks, measure_virtual
from .ways import CASES


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = page.parser("attention", attention.__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768], help="tokens in a pack")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--packs", type=int, default=3, help="packs of each case")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions for each pack")
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--heads", type=int, nargs=2, default=[8, 2], help="query and key/value heads")
    parser.add_argument("--head_dim", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=2, help="gloo processes, one thread each")
    parser.add_argument("--virtual_ranks", type=int, nargs="+", metavar="P", help="time P ranks on one device instead")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the virtual ranks")
    parser.add_argument("--output", type=Path, help="also write the report here")
    options = parser.parse_args(arguments)
    if error := misfit(options):
        parser.error(error)
    return options


def misfit(options: argparse.Namespace) -> str | None:
    """Why these options cannot run, and what would."""
    query, key_value = options.heads
    sizes = options.virtual_ranks or [options.ranks]
    if min(options.packs, options.repeats, key_value, *sizes) < 1 or query % key_value:
        return f"--packs, --repeats, ranks and heads start at 1, query heads divide by key/value heads; got {options}"
    if uneven := [(n, p) for n in options.tokens for p in sizes if n < p or n % p]:
        return f"--tokens {uneven[0][0]} cannot be divided over {uneven[0][1]} ranks; use a multiple of the ranks"
    if not options.virtual_ranks and (options.ranks < 2 or query % options.ranks):
        return f"--ranks {options.ranks} must be at least 2 and divide the {query} query heads, which Ulysses spreads"
    if options.device == "cuda" and not (options.virtual_ranks and torch.cuda.is_available()):
        return "--device cuda is for --virtual_ranks on a machine with a CUDA device"
    return None


def main(arguments: list[str] | None = None) -> None:
    prefer_huge_pages()
    options = parse(arguments)
    if options.device == "cpu":
        stay_on_cpu()  # else DeepSpeed, which ranks import, would say on stdout that it has found no GPU
    report = page.Report(options.output)
    where = torch.cuda.get_device_name() if options.device == "cuda" else page.device()
    report.add(f"{page.command('attention', arguments)}, {page.today()}  ")
    report.add(f"{where}; {page.versions(('torch', 'numpy'))}, longctx {longctx.__version__}  ")
    report.add(
        f"{options.heads[0]} query heads, {options.heads[1]} key/value heads, head size {options.head_dim}; "
        f"{options.packs} packs, {options.repeats} repetitions each"
    )
    (measure_virtual if options.virtual_ranks else measure_ranks)(options, report)


if __name__ == "__main__":
    main()
