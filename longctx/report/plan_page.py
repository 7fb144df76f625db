"""`plan.html`: a page on which people choose devices, a length and an arrangement. It fetches nothing.

The page holds every arrangement on several numbers of devices at many lengths, as forecast here; its script only shows
them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from longctx.forecast.cost import FREE_PART, GIB
from longctx.forecast.search import Choice
from longctx.report.plan_text import Plan, flags_of, name_of
from longctx.report.svg import escaped

MOST_LENGTHS = 8
"""Powers of two to choose from, up to the longest sequence that fits, besides the lengths of the plan."""
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
<section><div class="command"><h2>Command</h2><button type="button" id="copy">Copy</button></div>
<pre id="command" tabindex="0"></pre>
<p class="when" id="nodes">Run it on every node, with RANK 0 on the first, and HOST that node's address.</p>
</section>
<section><h2>Memory</h2><div class="bars" id="bars"></div></section>
<section><h2>All arrangements</h2><p class="when">The recommended one comes first: the simplest of those within 2% of
the fastest that leaves {free:.0%} of the memory free. Those that leave less or do not fit are grey. Select one to see
its memory and its command.</p>
<div class="wide" tabindex="0"><table class="numbers choices"><thead><tr><th>arrangement</th><th>tokens/s a device</th>
<th>seconds a step</th><th>GiB a device</th><th>host GiB a node</th><th>longest that fits</th></tr></thead>
<tbody id="choices"></tbody></table></div></section>
</main>
<script type="application/json" id="data">{data}</script>
<script>
{script}</script>
</body>
</html>
"""


def page_of(plan: Plan) -> str:
    """Return the page of a plan, which also holds fewer devices and more lengths."""
    assets, machine = resources.files("longctx.report"), plan.machine
    about = (
        f"{machine.device}{'' if machine.is_cpu else f', {machine.device_bytes / GIB:.0f} GiB each'}, "
        f"{machine.per_node} a node with {machine.host_bytes / GIB:,.0f} GiB of host memory. "
        "Every number is predicted; none is measured."
    )
    return PAGE.format(
        title=escaped(Path(plan.settings["model_name_or_path"]).name),
        about=escaped(about),
        free=FREE_PART,
        style="".join(assets.joinpath(name).read_text("utf-8") for name in ("page.css", "plan_page.css")),
        script=assets.joinpath("plan_page.js").read_text("utf-8"),
        data=json.dumps(_data(plan), separators=(",", ":")).replace("<", "\\u003c"),
    )


def _data(plan: Plan) -> dict[str, Any]:
    longest = max(farthest.length for _, farthest in plan.reaches.values()).bit_length()
    lengths = sorted({*plan.choices, *(1 << max(1, longest - n) for n in range(1, MOST_LENGTHS + 1))})
    return {
        "device": plan.machine.device,
        "device_bytes": plan.machine.device_bytes,
        "host_bytes": plan.machine.host_bytes,
        "lengths": lengths,
        "length": plan.length,
        "run_flags": [plan.run_flags(length) for length in lengths],
        "warnings": [plan.about_context(length) for length in lengths],
        "machines": [_on_devices(plan, gpus, lengths) for gpus in sorted(_numbers_of_devices(plan))],
    }


def _numbers_of_devices(plan: Plan) -> Iterator[int]:
    """Yield the plan's devices, and halves of them that are a part of a node or whole nodes."""
    gpus, per_node = plan.gpus, plan.machine.per_node
    for _ in range(MOST_MACHINES):
        yield gpus
        if gpus % 2 or (gpus > per_node and (gpus // 2) % per_node):
            return
        gpus //= 2


def _on_devices(plan: Plan, gpus: int, lengths: list[int]) -> dict[str, Any]:
    machine = replace(plan.machine, per_node=min(gpus, plan.machine.per_node))
    documents, done = plan.documents, plan.choices if gpus == plan.gpus else {}
    on = Plan.of(plan.settings, machine, gpus, lengths=lengths, documents=documents, known=done)
    best = [on.best(length) for length in lengths]
    return {
        "gpus": gpus,
        "launcher": on.launcher,
        "longest": {name: far.length for name, (_, far) in on.reaches.items()},
        "fits": [one is not None for one in best],
        "at": [_ranked(on.choices[length], first) for length, first in zip(lengths, best, strict=True)],
    }


def _ranked(choices: Sequence[Choice], first: Choice | None) -> list[dict[str, Any]]:
    """Return what is shown: the recommended choice, others by speed, and what does not fit by its memory."""

    def rank(one: Choice) -> tuple[bool, int, float]:
        return one is not first, one.level, one.cost.used if one.level == 2 else -one.speed

    return [_shown(one) for one in sorted(choices, key=rank)]


def _shown(choice: Choice) -> dict[str, Any]:
    of = choice.cost
    return {
        "name": name_of(choice),
        "flags": flags_of(choice),
        "level": of.level,
        "sequences": of.tokens // of.length,
        "seconds": round(of.step_seconds, 4),
        "speed": round(of.speed, 1),
        "used": round(of.used, 4),
        "checkpoint": of.disk["checkpoint"],
        "peaks": [of.moment, of.host_moment],
        "device": {name: round(size) for name, size in of.device.items()},
        "host": {name: round(size) for name, size in of.host.items()},
    }
