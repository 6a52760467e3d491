"""The whole table: every planted bug under twenty seeds, and forty configs that are right."""

import pytest

from audit_table import CONFIGS, MISSED, SEEDS, catch, false_alarms
from planted_bugs import BUGS, MORE_BUGS


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BUGS, *MORE_BUGS])
def test_a_bug_is_caught_in_19_of_20_seeds(name: str) -> None:
    first = catch({**BUGS, **MORE_BUGS}[name], SEEDS)
    assert first.total() - first[MISSED] >= SEEDS - 1


@pytest.mark.slow
def test_forty_configs_that_are_right_raise_no_alarm() -> None:
    assert len(CONFIGS) == 40
    assert not [(settings, parts) for settings, parts, _ in false_alarms() if parts]
