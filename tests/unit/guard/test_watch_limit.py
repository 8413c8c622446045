"""The limit of waits: the argument, else the variable, else ten minutes."""

import pytest

from hvdsync.guard.watch import limit


def test_the_argument_wins_over_the_variable_and_both_over_ten_minutes(monkeypatch):
    monkeypatch.delenv(limit.VARIABLE, raising=False)
    assert limit.resolve(None) == 600
    monkeypatch.setenv(limit.VARIABLE, "2.5")
    assert limit.resolve(None) == 2.5
    assert limit.resolve(0) == 0
    assert limit.resolve(30) == 30


@pytest.mark.parametrize("value", ["soon", "-1", "inf", "nan"])
def test_what_is_no_number_of_seconds_is_refused_by_the_name_of_its_source(value, monkeypatch):
    monkeypatch.setenv(limit.VARIABLE, value)
    with pytest.raises(ValueError, match=f"HVDSYNC_WAIT_LIMIT is '{value}', expected seconds"):
        limit.resolve(None)
    with pytest.raises(ValueError, match=r"init\(wait_limit=...\) is -3"):
        limit.resolve(-3)
