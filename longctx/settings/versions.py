"""The oldest releases of other packages that a run is exact with."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from longctx.settings.checks import check

REQUIRED_VERSIONS = {"torch": "2.11.0", "accelerate": "1.15.0", "transformers": "5.17.0", "trl": "1.16.0"}

MINIMUM_VERSIONS = {"deepspeed": {"deepspeed": "0.19.8"}}
"""Oldest releases an engine is exact with, besides those every run needs.

DeepSpeed before 0.19.8 waits only for the last of a module's all-gathers (its pull request 8539); over gloo, a layer
then computes with parameters that have not all arrived.
"""

PEFT_VERSIONS = {"peft": "0.20.0"}
"""Releases for --use_peft, the extra `peft`."""

LIGER_VERSIONS = {"liger-kernel": "0.8.0", "triton": "3.0.0"}
"""Releases for --use_liger_kernel."""

QLORA_VERSIONS = {"bitsandbytes": "0.50.0"}
"""Releases for --load_in_4bit, the extra `qlora`."""


@check("engine", "use_peft", "use_liger_kernel", "load_in_4bit")
def check_versions(minimum: Mapping[str, str], user: str) -> None:
    """Check that packages are installed, in a release that is new enough.

    Args:
        minimum: the oldest release by package.
        user: what needs them, for the message.

    Raises:
        ValueError: for the first that is not, with the installed release and the command to install it.
    """
    for package, oldest in minimum.items():
        try:
            installed = version(package)
        except PackageNotFoundError:
            installed = None
        if installed is None or Version(installed) < Version(oldest):
            found = f"{package} {installed} is installed" if installed else f"{package} is not installed"
            raise ValueError(f"{found} and {user} needs {oldest} or later. Run pip install -U '{package}>={oldest}'.")
