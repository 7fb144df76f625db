"""What longctx computes is what tests/golden has recorded: a part in every run, everything in `pytest -m long`."""

from __future__ import annotations

import pytest

from tests.golden import GROUPS
from tests.golden.compare import differences, recorded, values_of


@pytest.mark.parametrize("group", GROUPS)
def test_the_quick_part_is_as_recorded(group) -> None:
    now = values_of(group, quick=True)
    assert now, f"{group} has no quick part"
    assert not differences(group, recorded(group), now, partial=True)


@pytest.mark.long
@pytest.mark.parametrize("group", GROUPS)
def test_everything_is_as_recorded(group) -> None:
    assert not differences(group, recorded(group), values_of(group))
