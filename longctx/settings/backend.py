"""Choose the attention backend, and collect the memory options that flags and profile set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from longctx.attention.choice import BackendChoice, assumed_documents, choose_backend, chunking_backend
from longctx.attention.cost import Setup
from longctx.forecast.levers import PROFILE_LEVERS
from longctx.forecast.memory_options import asked_levers, prefers_ulysses
from longctx.settings.profile import LaunchProfile
from longctx.settings.profile_values import agree
from longctx.settings.run import given_multiple, row_length
from longctx.settings.values import Values


def ask_levers(values: Values, profile: LaunchProfile) -> tuple[Values, dict[str, Any]]:
    """Return the values, and the memory levers that a flag or the profile sets."""
    asked = asked_levers(values, values.flags.explicit)
    for name in PROFILE_LEVERS:
        if (agreed := agree(values.flags, name, profile.levers.get(name), name)) is not None:
            asked[name] = agreed
    if profile.activation_checkpointing:  # the trainer does it, and keeps the ring's output
        if asked.get("activation_checkpointing") is not True:
            values = values.note("activation_checkpointing is on: the profile says fsdp_activation_checkpointing: true")
        asked["activation_checkpointing"] = True
        if profile.activation_checkpointing_offload:
            asked["activation_offloading"] = True
    return values, asked


def choose(wanted: str, setup: Setup, values: Values, levers: Mapping[str, Any]) -> tuple[str, BackendChoice]:
    """Return the wanted backend's name, and the choice before the data is known.

    With a sequence-chunked step, `auto` wants the backend that has least of it on the device.
    """

    def choice(name: str) -> BackendChoice:
        return choose_backend(
            name,
            setup,
            assumed_documents(row_length(values), packed=values["packing"]),
            ring_size=values.flags.ring_size,
            pad_to_multiple_of=given_multiple(values.flags),
        )

    chunks = prefers_ulysses(values["memory"], levers) and not setup.num_linear_heads
    if wanted == "auto" and setup.sp > 1 and chunks and (name := chunking_backend(setup)) is not None:
        return name, replace(choice(name), reason="auto: the sequence-chunked step has least on the device")
    return wanted, choice(wanted)
