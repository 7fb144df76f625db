"""The page of a plan lists every choice with its forecast, and fetches nothing from other machines."""

from __future__ import annotations

import json
import re

import pytest

from longctx.model.tiny import tiny_config
from longctx.plan import main
from tests.report.browser import needs_browser, shown
from tests.test_plan import LLAMA_8B, TINY


def data_of_page(path):
    _, _, script = path.read_text().partition('<script type="application/json" id="data">')
    return json.loads(script.partition("</script>")[0])


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A plan as JSON, and its page."""
    folder = tmp_path_factory.mktemp("plan")
    LLAMA_8B.save_pretrained(folder)
    flags = ["--gpus", "4", "--max_length", "50000", "--output", str(folder / "new")]
    assert main(["--model_name_or_path", str(folder), *flags]) == 0
    return json.loads((folder / "new" / "plan.json").read_text()), folder / "new" / "plan.html"


@pytest.mark.long
def test_the_page_has_every_choice_with_the_plan_s_own_forecasts(both) -> None:
    """The page also has the choices for fewer devices. Its script builds the same command that the plan prints."""
    plan, page = both
    data = data_of_page(page)
    assert [one["machine"]["gpus"] for one in data["plans"]] == [1, 2, 4]
    here, at = data["plans"][-1], data["lengths"].index(data["length"])
    assert data["length"] == 50000
    assert {*map(int, plan["choices"])} <= {*data["lengths"]}
    for length, choices in plan["choices"].items():
        assert here["choices"][length] == choices
    best = plan["recommendation"]
    assert here["recommended"][at] == best["arrangement"]
    assert f"{here['launcher']} {data['run_flags'][at]} {best['flags']}" == best["command"]
    assert {*here["arrangements"]} == {*plan["arrangements"]}


def test_the_page_fetches_nothing_and_shows_names_as_text(tmp_path, capsys) -> None:
    folder = tmp_path / "<b>model"
    tiny_config().save_pretrained(folder)
    page = tmp_path / "new" / "plan.html"
    assert main(["--model_name_or_path", str(folder), *TINY[2:], "--gpus", "1", "--html", str(page)]) == 0
    text = page.read_text()
    assert "default-src 'none'" in text
    assert not re.search(r"(?:src|href)=\"(?!data:)|@import|url\(|fetch\(|https?:", text)
    assert "<b>" not in text
    assert all(str(folder) in flags for flags in data_of_page(page)["run_flags"])


@needs_browser
@pytest.mark.parametrize("width", [400, 1280])
def test_a_browser_shows_the_recommendation_without_an_error_or_a_request(width, both, tmp_path) -> None:
    plan, page = both
    dom = shown(page, tmp_path, width)
    command = dom.partition('<pre id="command" tabindex="0">')[2].partition("</pre>")[0]
    words = " ".join(re.sub("<[^>]*>", "", command).split()).replace("&quot;", '"')
    best = plan["recommendation"]
    assert words == best["command"]
    assert f"<dd>{best['tokens_per_second_per_device']:,.0f}</dd>" in dom.replace(' class=""', "")
    assert "50,000 tokens" in dom
    assert len(re.findall("<figure>", dom)) == 2
    names = re.findall(r'<th scope="row">([^<]*)</th>', dom)
    assert names[0] == best["arrangement"]
    assert sorted(names) == sorted(plan["arrangements"])
