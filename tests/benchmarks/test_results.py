"""The list of benchmarks, the index of results, and the controls among the cases of benchmarks.elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from benchmarks.elsewhere.cases import packed_trainings, weighting_trainings, window_trainings
from benchmarks.elsewhere.recurrent import RELEASES, WAYS

ROOT = Path(__file__).parents[2]


def test_cases_of_the_stock_stack_include_controls_in_which_it_is_exact():
    trainings = [*packed_trainings(), *weighting_trainings(), *window_trainings()]
    [page] = (ROOT / "benchmarks" / "results").glob("elsewhere_*.md")
    table = [row.strip("| ").split(" | ") for row in page.read_text().splitlines() if row.startswith("| ")]
    assert {training.situation for training in trainings} <= {situation for situation, *_ in table}
    controls = [row for row in table if row[0].startswith("control: ") and row[1].startswith("loss")]
    of_releases = len(RELEASES) * len(WAYS)
    assert sum(training.situation.startswith("control: ") for training in trainings) == len(controls) - of_releases == 4
    assert all(exact == stock == ours for _, exact, stock, ours in controls)
    assert all(exact == ours for situation, exact, _, ours in table if exact.startswith("loss"))
    errors = {row[0]: [float(cell) for cell in row[2:]] for row in table if row[0].endswith("error of the gradient")}
    assert all(ours < 1e-5 and (stock < 1e-5) == ("control" in name) for name, (stock, ours) in errors.items())


def test_the_list_has_every_benchmark_and_the_index_every_result():
    folder = ROOT / "benchmarks"
    listed = subprocess.run([sys.executable, "-m", "benchmarks"], capture_output=True, text=True, check=True, cwd=ROOT)
    programs = {path.stem for path in folder.glob("[a-z]*.py") if 'if __name__ == "__main__"' in path.read_text()}
    programs |= {path.parent.name for path in folder.glob("*/__main__.py")}
    assert set(re.findall(r"python -m benchmarks\.(\w+)", listed.stdout)) == programs
    index = (folder / "results" / "README.md").read_text()
    linked = {target.partition("/")[0] for target in re.findall(r"\]\(([^)]+)\)", index)}
    assert linked == {path.name for path in (folder / "results").iterdir()} - {"README.md"}
