"""The page of a plan lists every choice with its forecast, and fetches nothing from other machines."""

from __future__ import annotations

import json
import re

import pytest

from longctx.model.tiny import tiny_config
from longctx.plan import main
from tests.test_plan import LLAMA_8B, TINY


def data_of_page(path):
    return json.loads(
        path.read_text().partition('<script type="application/json" id="data">')[2].partition("</script>")[0]
    )


def test_the_page_has_every_choice_with_the_plan_s_own_forecasts(tmp_path, capsys) -> None:
    """The page also has the choices for fewer devices. Its script builds the same command that the plan prints."""
    page = tmp_path / "new" / "plan.html"
    LLAMA_8B.save_pretrained(tmp_path)
    flags = ["--gpus", "4", "--max_length", "50000", "--html", str(page), "--json"]
    assert main(["--model_name_or_path", str(tmp_path), *flags]) == 0
    plan, data = json.loads(capsys.readouterr().out), data_of_page(page)
    assert [machine["gpus"] for machine in data["machines"]] == [1, 2, 4]
    here, at = data["machines"][-1], data["lengths"].index(data["length"])
    assert data["length"] == 50000
    choice = next(c for c in here["candidates"] if c["name"] == here["recommended"][at])
    shown = {**choice, **choice["at"][at]}  # as the script does
    parts = [here["launcher"], data["run_flags"], data["rope_flags"][at], "--max_length 50000", shown["flags"]]
    assert " ".join(part for part in parts if part) == plan["recommendation"]["command"]
    assert {c["name"] for c in here["candidates"]} == {name_of(c) for c in plan["candidates"]}
    forecast = plan["recommendation"]["at"][0]
    assert choice["at"][at]["device"] == {name: round(size) for name, size in forecast["device_bytes"].items()}
    assert choice["at"][at]["seconds"] == pytest.approx(forecast["seconds_per_step"], abs=1e-4)
    too_long = next(c for c in here["candidates"] if c["longest"] < data["lengths"][-1])
    assert too_long["at"][-1]["seconds"] is None


def name_of(candidate):
    both = min(candidate["ring"], candidate["ulysses"]) > 1
    ways = f"{candidate['ulysses']} x ring {candidate['ring']}" if both else str(candidate["sp"])
    name = f"{candidate['backend']} {ways}".replace("local 1", "sp 1")
    return f"{name} --memory {candidate['memory']}"


def test_the_page_fetches_nothing_and_shows_names_as_text(tmp_path, capsys) -> None:
    folder = tmp_path / "<b>model"
    tiny_config().save_pretrained(folder)
    page = tmp_path / "plan.html"
    assert main(["--model_name_or_path", str(folder), *TINY[2:], "--gpus", "1", "--html", str(page)]) == 0
    text = page.read_text()
    assert "default-src 'none'" in text
    assert not re.search(r"(?:src|href)=\"(?!data:)|@import|url\(|fetch\(|https?:", text)
    assert "<b>" not in text
    assert str(folder) in data_of_page(page)["run_flags"]
