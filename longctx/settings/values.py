"""The values of all flags, and where each came from. They are immutable: each stage returns new ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from longctx.settings.schema import UNSET, Flag, Method, check

Origin = Literal["longctx", "demo", "profile", "file", "flag", "auto", "command"]
"""Who set a value: longctx, from other values; the demo's file; the launcher's profile; the user, in a --config file or
on the command line; auto, which chose it; or the command, such as verify. A value without an origin is the default."""


@dataclass(frozen=True, kw_only=True)
class Settings(Mapping[str, Any]):
    """Every flag's value at one stage. Older names of flags are understood, too."""

    method: Method
    of: Mapping[str, Any]
    """By today's names."""
    origins: Mapping[str, Origin]
    arguments: tuple[str, ...] = ()
    """The command line, to start further processes with."""
    profile_keys: Mapping[str, str] = field(default_factory=dict)
    """What sets a value in the profile, as `optimizer.params.lr 1e-4 in deepspeed_config_file zero2.json`."""
    notes: tuple[str, ...] = ()
    """Printed when the run starts."""

    def __getitem__(self, name: str) -> Any:
        if name in self.of:
            return self.of[name]
        return self.of[self.flag(name).name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.of)

    def __len__(self) -> int:
        return len(self.of)

    def flag(self, name: str) -> Flag:
        """Return the flag of this name, or of an older one. Raises KeyError."""
        if flag := self.method.find(name):
            return flag
        raise KeyError(name)

    @cached_property
    def explicit(self) -> frozenset[str]:
        """Flags that the user set, on the command line or in the --config file, or the command, such as verify."""
        return frozenset(name for name, origin in self.origins.items() if origin in ("flag", "file", "command"))

    def is_set(self, name: str) -> bool:
        """Return whether someone asked for the value: the user, a profile, auto or the command."""
        return self.origins.get(name, "longctx") not in ("longctx", "demo")

    @property
    def is_demo(self) -> bool:
        """Whether the run has the demo's model and data, since it names neither."""
        return "demo" in self.origins.values()

    @property
    def filled(self) -> frozenset[str]:
        """Flags that nobody set and that act, where the demo or longctx has another value than TRL."""
        flags = (flag for flag in self.method.flags.values() if not self.is_set(flag.name) and self.acts(flag.name))
        return frozenset(flag.name for flag in flags if flag.ours is not UNSET or flag.name in self.origins)

    def acts(self, name: str) -> bool:
        """Return whether the flag has an effect beside the others."""
        if not (needs := self.method.flags[name].needs):
            return True
        found = self.of[needs[0]]
        return any(value in needs[1:] for value in (found if isinstance(found, list) else [found]))

    def subject(self, name: str) -> str:
        """Return who asks for a value, and for which, as a message begins with it."""
        value = self.of[name]
        if self.origins.get(name) != "profile":
            return f"--{name} {' '.join(map(str, value)) if isinstance(value, list) else value}"
        return self.profile_keys[name]

    def as_asked(self, message: str) -> str:
        """Return a message that names the profile's keys in the place of flags that nobody gave."""
        for name in self.profile_keys:
            # A sentence may end with --sp 4, which is no part of --sp 40.
            if found := re.search(rf"--{name} {re.escape(str(self.of[name]))}(?!\.?\w)", message):
                message = message[: found.start()] + self.subject(name) + message[found.end() :]
        return message

    def with_(self, origin: Origin, /, **values: Any) -> Settings:
        """Return a copy in which these flags are set, and who set them.

        Raises:
            ValueError: for a value that its flag does not take.
        """
        checked = {(flag := self.flag(name)).name: check(flag, value) for name, value in values.items()}
        origins = {**self.origins, **dict.fromkeys(checked, origin)}
        return replace(self, of={**self.of, **checked}, origins=origins)

    def decided(self, **values: Any) -> Settings:
        """Return a copy with values that follow from others. Who asked for them before stays known."""
        return replace(self, of={**self.of, **values})

    def note(self, *notes: str) -> Settings:
        """Return a copy with these notes."""
        return replace(self, notes=(*self.notes, *notes))
