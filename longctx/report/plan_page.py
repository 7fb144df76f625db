"""`plan.html`: a page in which people choose devices, a length and an arrangement. It fetches nothing.

The page holds every arrangement on several numbers of devices at many lengths, as forecast here; its script only ranks
and shows them.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from longctx.forecast.candidates import Candidate, Machine, Outlook, candidates, outlook, recommend
from longctx.forecast.documents import RowLengths
from longctx.forecast.expected_step import FREE_PART
from longctx.report.plan_text import Commands, about_context, model_folder
from longctx.report.svg import escaped

LENGTHS = tuple(2**power for power in range(13, 23))
MOST_MACHINES = 4

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{title} – longctx plan</title>
<style>
{style}</style>
</head>
<body>
<header><h1>{title}</h1><p class="when">{about}</p></header>
<main>
<form class="controls">
<label>Devices <select id="devices"></select></label>
<label class="length">Length of a sequence <output id="length-shown" for="length"></output>
<input id="length" type="range" min="0" step="1"></label>
<label>Arrangement <select id="arrangement"></select></label>
</form>
<p class="warning" id="warning" role="status"></p>
<dl class="tiles" id="tiles"></dl>
<section class="bars" id="bars" aria-label="Memory"></section>
<section><div class="command"><h2>Command</h2><button type="button" id="copy">Copy</button></div>
<pre id="command" tabindex="0"></pre>
<p class="when" id="nodes">Start it on every node, with RANK 0 on the first and HOST the first one's address.</p>
</section>
<section><h2>All arrangements</h2><p class="when">The recommended one comes first: the simplest of the fastest that
leave {free:.0%} of memory free. Arrangements that leave less, or do not fit, are grey and come last. Click one to see
its memory and its command.</p>
<div class="wide" tabindex="0"><table class="numbers choices"><thead><tr><th>arrangement</th><th>tokens/s a device</th>
<th>seconds a step</th><th>GiB per device</th><th>used</th><th>longest that fits</th></tr></thead>
<tbody id="choices"></tbody></table></div></section>
</main>
<script type="application/json" id="data">{data}</script>
<script>
{script}</script>
</body>
</html>
"""


@dataclass(frozen=True, kw_only=True)
class PlanPage:
    """What the page is made from."""

    machine: Machine
    commands: Commands
    presets: Sequence[str]
    documents: RowLengths
    lengths: Sequence[int]
    """Lengths to choose from, besides LENGTHS."""
    length: int
    """The length to begin with."""

    def html(self) -> str:
        """Return the page."""
        assets, machine = resources.files("longctx.report"), self.machine
        about = (
            f"{machine.device}, {machine.device_bytes / 2**30:.0f} GiB each, {machine.gpus_per_node} a node with "
            f"{machine.host_bytes / 2**30:,.0f} GiB of host memory, {machine.kernel}, bf16. Every number is predicted "
            "by longctx plan; none is measured."
        )
        return PAGE.format(
            title=escaped(model_folder(self.commands.model).name),
            about=escaped(about),
            free=FREE_PART,
            style="".join(assets.joinpath(name).read_text("utf-8") for name in ("page.css", "plan_page.css")),
            script=assets.joinpath("plan_page.js").read_text("utf-8"),
            data=json.dumps(self.data(), separators=(",", ":")).replace("<", "\\u003c"),
        )

    def data(self) -> dict[str, Any]:
        """Return the choices of the page."""
        lengths = sorted({*LENGTHS, *self.lengths, self.length})
        return {
            "free_part": FREE_PART,
            "device": self.machine.device,
            "device_bytes": self.machine.device_bytes,
            "host_bytes": self.machine.host_bytes,
            "lengths": lengths,
            "length": self.length,
            "rope_flags": [self.commands.rope_flags(length) for length in lengths],
            "warnings": [about_context(self.commands.context(length)) for length in lengths],
            "run_flags": self.commands.run_flags(),
            "machines": [self._on_devices(gpus, lengths) for gpus in sorted(self._numbers_of_devices())],
        }

    def _numbers_of_devices(self) -> Iterator[int]:
        """Yield the plan's devices, and halves of them that are a part of a node or whole nodes."""
        gpus, per_node = self.machine.gpus, self.machine.gpus_per_node
        for _ in range(MOST_MACHINES):
            yield gpus
            if gpus % 2 or (gpus > per_node and (gpus // 2) % per_node):
                return
            gpus //= 2

    def _on_devices(self, gpus: int, lengths: Sequence[int]) -> dict[str, Any]:
        machine = replace(self.machine, gpus=gpus, gpus_per_node=min(gpus, self.machine.gpus_per_node))
        settings = dict(self.commands.adapter)
        found = candidates(self.commands.config, machine, presets=self.presets, settings=settings)
        table = {c: [outlook(c, machine, length, self.documents) for length in lengths] for c in found}
        best = [recommend(outlooks) for outlooks in zip(*table.values(), strict=True)]
        return {
            "gpus": gpus,
            "launcher": self.commands.launcher(gpus),
            "recommended": [one.candidate.name if one else None for one in best],
            "candidates": [_choice(candidate, outlooks) for candidate, outlooks in table.items()],
        }


def _choice(candidate: Candidate, outlooks: Sequence[Outlook]) -> dict[str, Any]:
    return {
        "name": candidate.name,
        "flags": shlex.join(candidate.flags()),
        "longest": candidate.max_length,
        "dp": candidate.dims.dp,
        "at": [_at(found) for found in outlooks],
    }


def _at(found: Outlook) -> dict[str, Any]:
    return ({"flags": shlex.join(found.candidate.flags())} if found.candidate.memory_options else {}) | {
        "seconds": round(found.time.seconds, 4) if found.time else None,
        "speed": round(found.speed, 1),
        "used": round(found.used, 4),
        "device": {name: round(size) for name, size in found.memory.device.items()},
        "host": {name: round(size) for name, size in found.memory.host.items()},
    }
