"""A plan as JSON, and as `plan.html`: a page on which people choose devices, a length and an arrangement.

The page fetches nothing. It holds the plans for several numbers of devices at many lengths; its script only shows them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from longctx.forecast.cost import FREE_PART, GIB
from longctx.forecast.search import Choice
from longctx.report.plan_text import Plan, flags_of, name_of
from longctx.report.svg import asset, document, escaped

MOST_LENGTHS = 8
"""Powers of two to choose from, up to the longest sequence that fits, besides the lengths of the plan."""
MOST_MACHINES = 4

BODY = """<header><h1>{title}</h1><p class="when">{about}</p></header>
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
{script}</script>"""


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON values."""
    machine, best = plan.machine, plan.best(plan.length)
    memory = {"device_bytes": machine.device_bytes, "host_bytes": machine.host_bytes}
    return {
        "predicted": True,
        "method": plan.settings.method.command,
        "model": plan.settings["model_name_or_path"],
        "machine": {"gpus": plan.gpus, "gpus_per_node": machine.per_node, "device": machine.device, **memory},
        "kernel": machine.kernel,
        "documents": None if plan.documents_file is None else str(plan.documents_file),
        "lengths": [*plan.choices],
        "arrangements": {
            name: {
                **{degree: getattr(run.dims, degree) for degree in ("sp", "ring", "ulysses", "dp")},
                "engine": run.engine,
                "longest_plain": plain and plain.length,
                "longest": farthest.length,
                "binds": farthest.binds,
            }
            for name, run in plan.runs.items()
            for plain, farthest in [plan.reaches[name]]
        },
        "choices": {str(n): [_choice_as_json(one) for one in of] for n, of in plan.choices.items()},
        "recommendation": None
        if best is None
        else {**_choice_as_json(best), "length": plan.length, "command": plan.command(best, plan.length)},
    }


def _choice_as_json(choice: Choice) -> dict[str, Any]:
    """Return a choice with its cost as JSON values."""
    of = choice.cost
    return {
        "arrangement": name_of(choice.shape),
        "flags": flags_of(choice),
        "fits": of.fits,
        "used": round(of.used, 4),
        "tokens_per_second_per_device": round(of.speed, 1) if of.fits else None,
        "sequences_per_step": of.tokens // of.length,
        "seconds_per_step": of.step_seconds,
        "seconds": dict(of.seconds),
        "device_bytes": dict(of.device),
        "device_peak": of.moment,
        "host_bytes": dict(of.host),
        "host_peak": of.host_moment,
        "disk_bytes": dict(of.disk),
    }


def page_of(plan: Plan) -> str:
    """Return the page of a plan, which also holds fewer devices and more lengths."""
    machine, longest = plan.machine, max(farthest.length for _, farthest in plan.reaches.values()).bit_length()
    lengths = sorted({*plan.choices, *(1 << max(1, longest - n) for n in range(1, MOST_LENGTHS + 1))})
    about = (
        f"{machine.device}{'' if machine.is_cpu else f', {machine.device_bytes / GIB:.0f} GiB each'}, "
        f"{machine.per_node} a node with {machine.host_bytes / GIB:,.0f} GiB of host memory. "
        "Every number is predicted; none is measured."
    )
    data = {
        "free_part": FREE_PART,
        "length": plan.length,
        "lengths": lengths,
        "run_flags": [plan.run_flags(length) for length in lengths],
        "warnings": [plan.about_context(length) for length in lengths],
        "plans": [_on_devices(plan, gpus, lengths) for gpus in sorted(_numbers_of_devices(plan))],
    }
    title = escaped(Path(plan.settings["model_name_or_path"]).name)
    body = BODY.format(
        title=title,
        about=escaped(about),
        free=FREE_PART,
        script=asset("plan_page.js"),
        data=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    )
    return document(f"{title} – longctx plan", body, ["page.css", "plan_page.css"], csp="script-src 'unsafe-inline'; ")


def _numbers_of_devices(plan: Plan) -> Iterator[int]:
    """Yield the plan's devices, and halves of them that are a part of a node or whole nodes."""
    gpus, per_node = plan.gpus, plan.machine.per_node
    for _ in range(MOST_MACHINES):
        yield gpus
        if gpus % 2 or (gpus > per_node and (gpus // 2) % per_node):
            return
        gpus //= 2


def _on_devices(plan: Plan, gpus: int, lengths: list[int]) -> dict[str, Any]:
    """Return the plan for some of the devices at these lengths, with the recommended arrangement of each, if any."""
    machine = replace(plan.machine, per_node=min(gpus, plan.machine.per_node))
    known = plan.choices if gpus == plan.gpus else {}
    on = replace(plan, machine=machine, gpus=gpus, lengths=lengths, known=known)
    best = [on.best(length) for length in lengths]
    return {
        **as_json(on),
        "launcher": on.launcher,
        "recommended": [one and name_of(one.shape) for one in best],
    }
