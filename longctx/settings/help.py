"""`longctx train --help` and `--help-all`, from the table of flags."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

from longctx.settings.schema import Flag, Method

_BEFORE_A_RUN = {"config": "Read flags from a YAML file or a recipe", "help-all": "List every flag, with those of TRL"}


def help_asked(arguments: Sequence[str], method: Method) -> str | None:
    """Return the help that a command line asks for, if it does."""
    if {"--help-all", "--help_all"} & set(arguments):
        return help_text(method, common=False)
    return help_text(method, common=True) if {"-h", "--help"} & set(arguments) else None


def help_text(method: Method, *, common: bool) -> str:
    """Return what `--help` prints or, with all flags and whole sentences, `--help-all`."""
    groups: dict[str, dict[str, str]] = {}
    for flag in sorted(method.flags.values(), key=lambda flag: flag.group != "Preferences"):
        if flag.common or not common:
            groups.setdefault(flag.group, {})[flag.name] = _summary(flag) if common else _sentence(flag)
    groups["Before a run"] = groups.get("Before a run", {}) | _BEFORE_A_RUN
    width = min(shutil.get_terminal_size().columns, 120)
    column = min(max(len(name) for group in groups.values() for name in group), 30) + len("  --  ")
    closing = "Defaults are in [brackets]." if common else "Dashes may stand for underscores, and --no_FLAG for false."
    intro = " ".join(filter(None, (method.description, method.closing, closing)))
    lines = [f"usage: {method.usage}", "", *textwrap.wrap(intro, width), ""]
    for title, group in groups.items():
        lines.append(f"{title}:")
        for name, text in group.items():
            head = f"  --{name}".ljust(column)
            if len(head) > column or not text:  # a long name has a line of its own
                lines.append(head)
                head = " " * column
            indent = " " * column
            lines += textwrap.wrap(text, width, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False)
    return "\n".join(lines)


def _summary(flag: Flag) -> str:
    """Return the first sentence of a flag's help, with its default."""
    default = flag.default_is or flag.unset
    return flag.summary + f" [{_shown(default)}]" * (default not in (None, False, "", ()))


def _sentence(flag: Flag) -> str:
    """Return a flag's help, with its values, and why it is refused or has no effect."""
    if flag.idle:
        return f"No effect {flag.idle}."
    if flag.instead:
        return f"Refused: {flag.instead}."
    if flag.values and (len(flag.values) == 1 or not flag.choices):
        value = flag.values[0]
        return f"{flag.help} {'Any value is refused.' if value is None else f'Only {value} is accepted.'}".strip()
    values = f"Values: {', '.join(flag.choices)}." * bool(flag.choices)
    default = flag.default_is or ("" if flag.unset in (None, "", ()) else _shown(flag.unset))
    return " ".join(filter(None, (flag.help, values, f"Default: {default}." * bool(default))))


def _shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
