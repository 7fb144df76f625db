"""What longctx computes equals what tests/golden has recorded.

`.ci/run` trains two of the recorded runs, and `pytest -m long` all of them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.few import few
from tests.golden import GROUPS
from tests.golden.compare import differences, recorded, values_of
from tests.golden.counts import LIBRARIES

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("group", few(GROUPS, ["counts", "training"]))
def test_the_quick_part_is_as_recorded(group) -> None:
    now = values_of(group, quick=True)
    assert now, f"{group} has no quick part"
    assert not differences(group, recorded(group), now, partial=True)


def test_counts_are_recorded_with_the_versions_that_the_check_installs() -> None:
    """With others they are not compared."""
    pinned = dict(re.findall(r"^([\w-]+)==(.+)$", (ROOT / ".ci" / "versions.txt").read_text(), re.MULTILINE))
    found = recorded("counts")["versions"]
    assert {name: found[name] for name in LIBRARIES} == {name: pinned.get(name) for name in LIBRARIES}


@pytest.mark.long
def test_every_run_is_as_recorded() -> None:
    """Of other groups, the quick part is everything."""
    assert not differences("training", recorded("training"), values_of("training"))
