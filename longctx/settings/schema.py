"""What a flag is: one row of a table, from which the parser, the checks, help, completion and the docs follow.

Everything here needs the standard library alone, so that bad input is refused before torch is imported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from longctx.untrusted.files import check_path

UNSET: Any = type("Unset", (), {"__repr__": lambda self: "UNSET"})()

TRUE = ("true", "yes", "on", "t", "y", "1")
FALSE = ("false", "no", "off", "f", "n", "0")


class Kind(NamedTuple):
    """How the text of a command line, or a value of a file, becomes a flag's value."""

    name: str
    """What messages say was expected: `a whole number`."""
    convert: Callable[[Any], Any]
    """Raises ValueError or TypeError for what is none."""
    nargs: str | None = None
    """argparse's number of words; None for one."""
    reads_none: bool = False
    """Whether the words none and null unset a flag of this kind that may have no value."""


def _bool(value: Any) -> bool:
    word = str(value).lower()
    if word not in TRUE + FALSE:
        raise ValueError
    return word in TRUE


def _int(value: Any) -> int:
    if isinstance(value, bool | float):
        raise ValueError
    return int(value)


def _float(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError
    return value if isinstance(value, int) else float(value)


def _text(value: Any) -> str:
    if isinstance(value, bool):  # YAML reads an unquoted `no`, which some flags take, as false
        return "yes" if value else "no"
    if isinstance(value, list | Mapping):
        raise TypeError
    return str(value)


def _object(value: Any) -> Any:
    found = value
    if isinstance(value, str):
        found = json.loads(value, parse_constant=_no_number)
    if not isinstance(found, Mapping):
        raise TypeError
    return dict(found)


def _no_number(name: str) -> float:
    raise ValueError(name)


def _one_of(words: tuple[str, ...], otherwise: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: value if value in words else otherwise(value)


def _listed(convert: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    return lambda value: [convert(item) for item in (value if isinstance(value, list | tuple) else [value])]


def _several_or_one(value: Any) -> Any:
    return [_text(item) for item in value] if isinstance(value, list | tuple) else _text(value)


BOOL = Kind("true or false", _bool, "?", True)
INT = Kind("a whole number", _int, None, True)
FLOAT = Kind("a number", _float, None, True)
TEXT = Kind("one value", _text)
PATH = Kind("a path", _text)
FOLDER = Kind("a folder", _text)
NAMES = Kind("one name, or a list of them in a file", _several_or_one)
TEXTS = Kind("a list of names", _listed(_text), "+")
FLOATS = Kind("a list of numbers", _listed(_float), "+", True)
JSON = Kind("a JSON object, such as '{\"key\": 1}'", _object, None, True)
JSON_OR_TEXT = Kind("one value or a JSON object", lambda value: value if isinstance(value, Mapping) else _text(value))
ENTRIES = Kind("a list of data sets", lambda value: list(value) if isinstance(value, list) else [value], "+")
ANY = Kind("a value", lambda value: value[0] if isinstance(value, list) and len(value) == 1 else value, "*")
DEGREE = Kind("a whole number, auto or all", _one_of(("auto", "all"), _int), None, True)
MULTIPLE = Kind("a whole number or auto", _one_of(("auto", "none", "null"), _int))
NAME_OR_FALSE = Kind("a name or False", lambda value: False if str(value).lower() in ("false", "no") else _text(value))


@dataclass(frozen=True)
class Flag:
    """A flag, and all that is true of it alone. What relates several is a `Rule`."""

    name: str
    kind: Kind
    default: Any
    """TRL's default; for a flag of longctx its own."""
    help: str
    """One line. Its first sentence is that of --help."""
    ours: Any = UNSET
    """The default here, where it differs from TRL's."""
    own: bool = False
    """Whether it is a flag of longctx, and not of TRL."""
    group: str = ""
    common: bool = False
    """Whether --help lists it, too, and not only --help-all."""
    default_is: str = ""
    """What --help says of the default in the place of its value."""
    values: tuple[Any, ...] = ()
    """All values that exist, or of TRL's those that are exact here."""
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    reason: str = ""
    """Why other values are refused."""
    instead: str = ""
    """What to use in its place, of a flag that is refused whatever its value."""
    needs: tuple[Any, ...] = ()
    """Another flag, and its values without which this one has no effect."""
    idle: str = ""
    """Why it never has an effect. It is then not passed on."""
    resume: str = "free"
    """same: a resumed run must not change it; free: it may, unless the digests of data or model show the change."""
    node: bool = False
    """Whether nodes may differ in it."""
    secret: bool = False
    """Whether reports hide it."""
    aliases: tuple[str, ...] = ()
    """Names that other releases of TRL and transformers gave it."""

    @property
    def summary(self) -> str:
        """The first sentence of its help, without the full stop."""
        return self.help.partition(". ")[0].removesuffix(".")

    @property
    def unset(self) -> Any:
        """Its value where nobody sets it."""
        return self.default if self.ours is UNSET else self.ours

    @property
    def may_be_none(self) -> bool:
        """Whether the words none and null mean no value."""
        return self.kind.reads_none and None in (self.default, self.ours, *self.values)

    @property
    def limits(self) -> str:
        """The range of its numbers, as `of at least 0 and below 1`."""
        words = {"of at least": self.least, "above": self.above, "up to": self.most, "below": self.below}
        return " and ".join(f"{word} {_figure(limit)}" for word, limit in words.items() if limit is not None)

    @property
    def choices(self) -> tuple[str, ...]:
        """The words among its values."""
        return tuple(str(value) for value in self.values if value not in (None, "", []) and value is not False)


def _figure(limit: float) -> str:
    return f"{limit:,}" if isinstance(limit, int) else f"{limit:g}"


def check(flag: Flag, value: Any, subject: str = "") -> Any:
    """Return a value of the flag's kind that the flag takes.

    Args:
        value: text of the command line, or what a file holds.
        subject: what set it, for the message. Default: the flag.

    Raises:
        ValueError: with the value, the limit and the remedy.
    """
    if value is None or (flag.may_be_none and str(value).lower() in ("none", "null")):
        return None
    given = value if isinstance(value, list) else [value]
    try:
        converted = flag.kind.convert(value)
    except (ValueError, TypeError, RecursionError):
        fault, shown = f"is not understood. Use {flag.kind.name}", " ".join(map(str, given))
    else:
        items = converted if isinstance(converted, list) and converted not in flag.values else [converted]
        faults = ((_fault(flag, item), text) for item, text in zip(items, given, strict=False))
        fault, shown = next((found for found in faults if found[0]), ("", ""))
    if fault:
        raise ValueError(f"{subject or f'--{flag.name} {shown}'} {fault}.")
    return converted


def _fault(flag: Flag, value: Any) -> str:
    """Return what is wrong with a value, or with one of several, and the remedy; an empty text if nothing is."""
    if flag.instead:
        return f"would shard the model a second time: {flag.instead}" if value not in (False, "", [], {}) else ""
    if flag.kind in (PATH, FOLDER):
        if value == "":
            return "is empty. Name one, or leave the flag out"
        check_path(flag.name, value)
    if flag.values and value not in flag.values:
        reason = flag.reason or "it has not been compared with one device under sequence parallelism" * (not flag.own)
        remedy = f"Use {_or(flag.choices)}" if flag.choices else "Leave it out"
        return f"is refused: {reason}. {remedy}" if reason else f"is unknown. {remedy}"
    for number in _numbers(value):
        if not abs(number) < math.inf:  # math.isfinite fails for integers beyond floats
            return f"is out of range: expected a finite number {flag.limits}".rstrip()
        below = number < flag.least if flag.least is not None else False
        under = number <= flag.above if flag.above is not None else False
        beyond = (flag.most is not None and number > flag.most) or (flag.below is not None and number >= flag.below)
        if below or under or beyond:
            limit = f"below {_figure(flag.least)}" if below and flag.least else "out of range"
            return f"is {limit}{flag.reason and ': ' + flag.reason}. Use a number {flag.limits}"
    return ""


def _or(words: tuple[str, ...]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _numbers(value: Any) -> Iterator[float]:
    """Yield the numbers of a value, also those in lists and mappings."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield value
    elif isinstance(value, list | tuple | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(item)


@dataclass(frozen=True, eq=False, kw_only=True)
class Method:
    """What the commands of training methods differ in, before data and model are read."""

    module: str
    """The module of its command, which its processes run."""
    usage: str
    description: str
    flags: Mapping[str, Flag]
    metrics: tuple[str, ...]
    """What its evaluations measure, by which the best model can be chosen."""
    reads_pairs: bool = False
    """Whether its records are pairs of answers."""
    closing: str = ""
    """The last lines of --help."""

    @property
    def command(self) -> str:
        """The name of its command."""
        return self.module.rpartition(".")[2]

    def find(self, name: str) -> Flag | None:
        """Return the flag of this name, with dashes or underscores, or of an older one."""
        name = name.replace("-", "_")
        return self.flags.get(name) or next((flag for flag in self.flags.values() if name in flag.aliases), None)


class Rule(NamedTuple):
    """What relates several flags. Settings that break a rule are refused."""

    flags: str
    """Their names, of which the first is at fault."""
    when: Callable[[Any], object]
    """Whether settings break it."""
    why: str | Callable[[Any], str]
    """What is wrong, with the remedy."""

    def fault(self, settings: Any) -> str:
        """Return the message for settings that break the rule, and an empty text for others."""
        if not self.when(settings):
            return ""
        why = self.why if isinstance(self.why, str) else self.why(settings)
        return f"{settings.subject(self.flags.split()[0])} {why}."
