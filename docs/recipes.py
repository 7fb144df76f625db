"""What each recipe of configs/recipes takes on the machine in its name: docs/recipes.md.

    python -m docs.recipes > docs/recipes.md

Predicted as a run does when it starts, never measured.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.published import MODELS
from longctx.forecast.cost import cost
from longctx.forecast.documents import one_document, one_pair
from longctx.launch.accelerate import shipped_configs
from longctx.machine.here import Machine
from longctx.settings.auto import choose_layout
from longctx.settings.dpo import DPO
from longctx.settings.flags import SFT
from longctx.settings.read import parse_flags
from longctx.settings.resolve import described
from longctx.settings.run import Run
from longctx.settings.schema import Method
from longctx.settings.values import Settings

GIB = 2**30
DEVICES = {24: ("RTX 4090", 128 * GIB), 80: ("H100", None)}
"""By the memory of a card in GB: its name in the table of speeds, and the host memory for each."""
HEAD = """\
<!-- tables of docs.recipes -->

# Recipes

A recipe is a file of flags for one model, one method and one machine, in [configs/recipes/](../configs/recipes).
`--config` takes its name, also where longctx is installed without its repository:

```bash
longctx train --config qwen3-8b-lora-1x80gb-128k
```

`longctx dpo` starts those that have dpo in their names. To train on other data or for another length, override the
recipe by flags, or copy the file and give the path of the copy. `longctx plan --config NAME` predicts the result.

All numbers are **predicted**, with the public sizes of each model, for sequences of one document or one pair of
answers; shorter documents are faster. Each recipe leaves 10% of the memory free on its machine: RTX 4090s with 128 GiB
of host memory for each, or H100s with 221 GiB. A layout such as `ulysses 2 × 4` spreads each sequence over two GPUs,
and trains four at a time. `python -m docs.recipes > docs/recipes.md` wrote this page.
"""
TAIL = "\n<!-- end of the tables -->"


def recipes() -> list[Path]:
    """Return the files, small machines first."""
    found = (shipped_configs() / "recipes").glob("*.yaml")
    return sorted(found, key=lambda path: (sorted(machine_of(path.stem), reverse=True), path.stem))


def machine_of(name: str) -> tuple[int, int]:
    """Return the number of cards in the name of a recipe, and the GB of each."""
    cards, size = re.findall(r"-(\d+)x(\d+)gb-", name)[0]
    return int(cards), int(size)


def method_of(name: str) -> Method:
    """Return what the command of a recipe does."""
    return DPO if "-dpo-" in name else SFT


def run_of(name: str) -> Run:
    """Return the run of a recipe on its machine, with the public configuration of its model."""
    asked = parse_flags(["--config", name], method_of(name))
    cards, size = machine_of(name)
    device, host = DEVICES[size]
    machine = Machine.of(device, cards, host_bytes=host and host * cards)
    with tempfile.TemporaryDirectory() as folder:
        config = MODELS[asked["model_name_or_path"]]["config"]
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        values: Settings = asked.with_("command", model_name_or_path=folder, memory="auto")
        settings, facts = described(values, machine, cards)
        return choose_layout(settings, cards, facts)


def row(name: str, run: Run) -> str:
    """Return a line of the table."""
    length = run.settings["max_length"]
    of = cost(run.shape, run.machine, length, (one_pair if method_of(name) is DPO else one_document)(length))
    layout = f"{run.backend.arrangement if run.dims.sp > 1 else 'one GPU'}{f' × {run.dims.dp}' * (run.dims.dp > 1)}"
    memory = f"{of.device_bytes / GIB:.0f} | {of.host_bytes / GIB:,.0f}"
    return f"| [`{name}`](../configs/recipes/{name}.yaml) | {length:,} | {layout} | {of.speed:,.0f} | {memory} |"


def page(runs: Mapping[str, Run]) -> str:
    """Return docs/recipes.md, of runs by the names of their recipes."""
    columns = ["recipe", "tokens of a sequence", "layout", "tokens/s per GPU", "GPU, GiB", "host, GiB"]
    head = [HEAD, f"| {' | '.join(columns)} |", "| --- | ---: | --- | ---: | ---: | ---: |"]
    return "\n".join([*head, *(row(name, run) for name, run in runs.items()), TAIL])


if __name__ == "__main__":
    print(page({path.stem: run_of(path.stem) for path in recipes()}))
