"""The command line; see the package."""

from __future__ import annotations

import os
import tempfile

from .. import elsewhere, page, ranks
from .cases import CASES
from .steps import HEADER, PACKAGES, write_model


def main(arguments: list[str] | None = None) -> None:
    parser = page.parser("elsewhere", elsewhere.__doc__)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="cases to run")
    options = parser.parse_args(arguments)

    os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    ranks.start_server()
    import longctx

    print(f"{page.command('elsewhere', arguments)}, {page.today()}")
    at = f" (commit {page.commit()})" if page.commit() else ""
    print(f"{page.device()}, gloo; {page.versions(PACKAGES)}, longctx {longctx.__version__}{at}\n")
    print("loss and norm: mean loss and gradient norm of the first optimizer step, fp32.\n")
    print(page.head(HEADER), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder)
        for name in options.only:
            for row in CASES[name](folder):
                print(page.row(row), flush=True)


if __name__ == "__main__":
    main()
