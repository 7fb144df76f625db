"""Keep the terminal short: every message once, and only those that a user can act on."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path

from longctx.ranks.first import is_first_on_node, is_first_rank

DEPRECATIONS_BETWEEN_LIBRARIES = (
    r"`(is_)?gradient_checkpointing` is deprecated",  # transformers about the name that TRL, peft and users have for it
    r"`torch\.distributed\.\w+` is deprecated",  # torch about DeepSpeed's calls, again in every step
)


def quieten() -> None:
    """Show warnings on the first rank only, and none that one library has for another."""
    if not is_first_rank():
        warnings.simplefilter("ignore")
    for message in DEPRECATIONS_BETWEEN_LIBRARIES:
        warnings.filterwarnings("ignore", message=message, category=FutureWarning)


def refuse(error: Exception) -> None:
    """Print an error as one line, once on each machine; the launcher prints what no first rank does."""
    tell(" ".join(str(error).splitlines()), prints=is_first_on_node(), is_left=not is_first_on_node())


def tell(message: str, *, prints: bool, is_left: bool = False, later: int = 0) -> None:
    """Say why a run ends, and leave it to the launcher for its closing report.

    torchrun and `accelerate launch` end with a page about processes, which then holds the error of every rank.

    Args:
        prints: whether this rank does; not if it is printed otherwise.
        is_left: whether our own launcher is to print it.
        later: seconds by which the launcher is to take the failure for a later one.
    """
    message = printable(message)
    if prints:
        print(f"longctx: error: {message}", file=sys.stderr, flush=True)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        extra = {"timestamp": str(int(time.time()) + later), "is_left": is_left}
        report = json.dumps({"message": {"message": message, "extraInfo": extra}})
        whole = Path(f"{path}.{os.getpid()}")  # the launcher may read at any moment
        whole.write_text(report)
        os.replace(whole, path)


def printable(message: str) -> str:
    """Return the message with what a terminal would act on escaped, such as control characters in a file's name."""
    return "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in message)


def number(value: float) -> str:
    """Three digits, as people write them: 12300 -> 12.3k, 0.00002 -> 2e-05."""
    size = abs(value)
    for unit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if 1e13 > size >= 0.9995 * unit:
            return f"{value / unit:.3g}{suffix}"
    return f"{value:.3g}"
