"""An uncaught error is told to the others, unless it only follows another rank's."""

import logging
import os
import sys

import pytest

from hvdsync.comm import failures, windows
from hvdsync.errors import RankFailed
from hvdsync.guard.watch.endings import Ending
from hvdsync.guard.watch.exits import Exits, is_of_a_lost_rank

LOST = RuntimeError("Horovod has been shut down. This was caused by an exception on a rank")


class FakeMember:
    rank = 1

    def __init__(self, why=None, is_well=True):
        self.why = why
        self.is_well = is_well
        self.said = []

    def reason(self):
        return self.why

    def say_end(self, ending):
        self.said.append(ending)

    def let_the_first_go_first(self):
        self.said.append("after the first")

    def shut_down(self):
        self.said.append("shut down")


@pytest.fixture
def shown(monkeypatch):
    """The errors that reach the hook that was there before."""
    errors = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: errors.append(error))
    return errors


@pytest.fixture
def exits_of(shown):
    made = []

    def make(why=None):
        made.append(Exits(FakeMember(why)))
        return made[-1]._member

    yield make
    for exits in made:
        exits.remove()


def uncaught(error, cause=None):
    try:
        raise error from cause
    except Exception:
        sys.excepthook(*sys.exc_info())


def test_an_own_error_is_told_and_shown(exits_of, shown):
    member = exits_of()
    error = KeyError("x")
    uncaught(error)
    (ending,) = member.said
    assert (ending.rank, ending.how, ending.error) == (1, "raised", "KeyError: 'x'")
    assert "uncaught(error)" not in ending.trace and "raise error from cause" in ending.trace
    assert shown == [error]


def test_an_error_that_follows_another_ranks_is_told_by_its_reason_alone(exits_of, shown, caplog):
    member = exits_of(RankFailed("rank 1 of 2 cannot go on: rank 0 died"))
    uncaught(LOST)
    assert (member.said, shown) == ([], [])
    (record,) = caplog.records
    assert record.levelno == logging.CRITICAL
    assert record.getMessage() == "RankFailed: rank 1 of 2 cannot go on: rank 0 died"


def test_an_error_of_the_users_own_around_it_is_shown_but_is_not_the_first(exits_of, shown):
    member = exits_of(RankFailed("rank 0 died"))
    error = ValueError("training failed")
    uncaught(error, cause=LOST)
    assert (member.said, shown) == ([], [error])


def test_a_lost_connection_that_no_rank_explains_is_an_own_error(exits_of, shown):
    member = exits_of(None)
    uncaught(LOST)
    assert member.said[0].how == "raised" and shown == [LOST]


def test_a_child_by_fork_tells_nothing(exits_of, shown, monkeypatch):
    member = exits_of()
    here = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    uncaught(KeyError("x"))
    assert member.said == [] and len(shown) == 1


def test_at_the_end_of_the_script_the_first_goes_first_then_this_rank_is_finished(shown):
    member = FakeMember()
    exits = Exits(member)
    exits._on_exit()
    exits.remove()
    assert member.said == ["after the first", Ending(1, "finished"), "shut down"]


def test_an_error_whose_hook_was_replaced_is_told_at_the_end(shown, monkeypatch):
    member = FakeMember()
    exits = Exits(member)
    monkeypatch.setattr(sys, "last_value", KeyError("x"), raising=False)
    exits._on_exit()
    exits.remove()
    assert member.said[0].error == "KeyError: 'x'"


def test_removed_it_leaves_the_hook_that_was_there(shown):
    before = sys.excepthook
    exits = Exits(FakeMember())
    assert sys.excepthook != before
    exits.remove()
    assert sys.excepthook == before


def test_collectives_raise_the_reason_as_the_frameworks_error_too(exits_of):
    exits = Exits(FakeMember(RankFailed("rank 0 died")))
    failures.explain_with(exits.explain)
    try:
        error = failures.explain(LOST)
        assert isinstance(error, RankFailed) and isinstance(error, RuntimeError)
        assert str(error) == "rank 0 died"
        assert failures.explain(RuntimeError("out of memory")) is None
    finally:
        failures.explain_with(None)
        exits.remove()


def test_the_systems_errors_are_of_the_users_own_connections():
    assert is_of_a_lost_rank(RuntimeError("[gloo/transport/tcp/pair.cc:1] Read timeout"))
    assert not is_of_a_lost_rank(ConnectionResetError("Connection reset by peer"))
    assert not is_of_a_lost_rank(ValueError("shapes differ"))


@pytest.mark.parametrize("is_well", [True, False])
def test_ranks_leave_one_anothers_memory_together_unless_one_has_failed(
    shown, monkeypatch, is_well
):
    member = FakeMember(is_well=is_well)
    monkeypatch.setattr(windows, "before_leaving", lambda: member.said.append("together"))
    exits = Exits(member)
    exits._on_exit()
    exits.remove()
    assert member.said[0] == ("together" if is_well else "after the first")
    assert member.said.count("together") == is_well
