"""Ranks that watch one another, here threads of one process: complaints, verdicts and endings."""

import logging
import threading
import time

import pytest

from hvdsync.errors import RankFailed, StalledRank
from hvdsync.guard.watch import inquiry, member
from hvdsync.guard.watch.endings import Ending
from hvdsync.guard.watch.hub import Hub
from hvdsync.guard.watch.pending import Operation

SECONDS = 60


class FakePending:
    """What waits on a rank, for ever longer from the moment that it was said."""

    def __init__(self):
        self.since = {}

    def wait_for(self, *names):
        self.since = dict.fromkeys(names, time.monotonic())

    def read(self):
        now = time.monotonic()
        return [Operation(0, now - since, name) for name, since in self.since.items()]

    def members(self, operations):
        return {}


class World:
    """A hub and its members; ``stopped`` and ``ended`` list ranks whose collectives or process
    were ended."""

    def __init__(self, size, limit, monkeypatch):
        self.ended = []
        monkeypatch.setattr(member, "_end_process", lambda: self.ended.append(True))
        self.hub = Hub(size, limit, one_host=True)
        self.pending = [FakePending() for _ in range(size)]
        self.stopped = [threading.Event() for _ in range(size)]
        said = self.hub.invitation()
        self.members = [
            member.Member(rank, size, limit, self.pending[rank], self.stopped[rank].set, said)
            for rank in range(size)
        ]

    def close(self):
        for one in self.members:
            one.close()
        self.hub.close()


@pytest.fixture
def world_of(monkeypatch):
    worlds = []

    def make(size, limit=0.2):
        worlds.append(World(size, limit, monkeypatch))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


def test_every_rank_gets_the_same_report_and_its_collectives_end(world_of, caplog):
    world = world_of(3)
    for rank in (0, 2):
        world.pending[rank].wait_for("loss")
    for rank in range(3):
        assert world.stopped[rank].wait(SECONDS)
    reasons = [one.reason(SECONDS) for one in world.members]
    assert [type(reason) for reason in reasons] == [StalledRank] * 3
    assert len({reason.report for reason in reasons}) == 1
    assert "loss: for " in reasons[1].report and "not come: rank 1" in reasons[1].report
    critical = [r.getMessage() for r in caplog.records if r.levelno == logging.CRITICAL]
    assert sorted(text[:11] for text in critical) == [f"rank {rank} of 3" for rank in range(3)]
    assert world.ended == []


def test_a_wait_within_the_limit_is_nobodys_matter(world_of):
    world = world_of(2, limit=30)
    world.pending[0].wait_for("loss")
    assert world.members[0].reason(3.0) is None
    assert not world.stopped[0].is_set()


def test_no_limit_is_none(world_of):
    world = world_of(2, limit=0)
    world.pending[0].since = {"loss": time.monotonic() - 1e6}
    assert world.members[0].reason(3.0) is None


def test_a_wait_that_ended_before_all_were_asked_changes_nothing(world_of, monkeypatch):
    world = world_of(2)
    asked = threading.Event()
    take = member.record.take

    def come_now(*arguments):
        world.pending[0].since = {}
        asked.set()
        return take(arguments[0], arguments[1], False, [])

    monkeypatch.setattr(member.record, "take", come_now)
    world.pending[0].wait_for("loss")
    assert asked.wait(SECONDS)
    assert world.members[0].reason(1.0) is None
    monkeypatch.setattr(member.record, "take", take)
    # The next one counts again.
    world.pending[0].wait_for("next")
    assert "next" in world.members[1].reason(SECONDS).report


def test_a_rank_that_raised_is_the_reason_on_all_others(world_of):
    world = world_of(3)
    world.members[1].say_end(Ending(1, "raised", "KeyError: 'x'", "Traceback of mine"))
    for rank in (0, 2):
        reason = world.members[rank].reason(SECONDS)
        assert isinstance(reason, RankFailed)
        assert str(reason).startswith(f"rank {rank} of 3 cannot go on: rank 1 raised KeyError: 'x'")
        assert str(reason).endswith("\nTraceback of mine")
    assert world.members[1].reason(0.1) is None


def test_a_connection_that_ends_without_a_word_is_a_death(world_of):
    world = world_of(3)
    world.members[2].close()
    assert "rank 2 died without a word" in str(world.members[0].reason(SECONDS))
    world.members[0].let_the_first_go_first()
    assert 2 in world.members[0]._gone


def test_what_a_rank_said_first_of_its_end_remains(world_of):
    world = world_of(2)
    world.members[1].say_end(Ending(1, "finished"))
    world.members[1].say_end(Ending(1, "raised", "E", ""))
    world.members[1].close()
    assert "rank 1 finished its script" in str(world.members[0].reason(SECONDS))


def test_what_waits_for_a_rank_that_ended_does_not_wait_for_the_limit(world_of, monkeypatch):
    monkeypatch.setattr(member, "_ENDED_SECONDS", 0.2)
    world = world_of(3, limit=1000)
    world.members[1].say_end(Ending(1, "raised", "KeyError: 'x'", "Traceback of mine"))
    world.pending[0].wait_for("loss")
    assert world.stopped[0].wait(SECONDS) and world.stopped[2].wait(SECONDS)
    assert isinstance(world.members[0].reason(SECONDS), RankFailed)


def test_rank_0_gone_leaves_each_rank_to_its_own_report(world_of, monkeypatch, caplog):
    monkeypatch.setattr(member, "_ENDED_SECONDS", 0.2)
    world = world_of(2, limit=1000)
    world.members[0].close()
    world.hub.close()
    assert "rank 0 died" in str(world.members[1].reason(SECONDS))
    world.pending[1].wait_for("loss")
    assert world.stopped[1].wait(SECONDS)
    assert "rank 0 died without a word" in caplog.text and "loss: for" in caplog.text


@pytest.mark.slow
def test_rank_0_silent_leaves_each_rank_to_its_own_report(world_of, monkeypatch, caplog):
    monkeypatch.setattr(member, "_SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(Hub, "_hear", lambda *_: None)
    world = world_of(2)
    world.pending[1].wait_for("loss")
    assert world.stopped[1].wait(SECONDS)
    assert "rank 0 does not answer: its process " in caplog.text


def test_without_a_way_to_rank_0_a_rank_reports_alone(monkeypatch, caplog):
    monkeypatch.setattr(member, "_SILENCE_SECONDS", 0.5)
    pending, stopped = FakePending(), threading.Event()
    alone = member.Member(1, 2, 0.2, pending, stopped.set, None)
    pending.wait_for("loss")
    assert stopped.wait(SECONDS)
    assert "rank 0 does not answer: it could not be reached" in caplog.text
    alone.reason()
    alone.close()


def test_a_rank_that_does_not_heed_the_verdict_is_ended(world_of, monkeypatch):
    monkeypatch.setattr(member, "_GRACE_SECONDS", 0.2)
    world = world_of(2)
    world.pending[0].wait_for("loss")
    assert world.stopped[0].wait(SECONDS)
    deadline = time.monotonic() + SECONDS
    while len(world.ended) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(world.ended) == 2


def test_a_rank_that_compiles_is_waited_for_longer_with_one_warning(world_of, monkeypatch, caplog):
    monkeypatch.setattr(inquiry.Record, "compiling", property(lambda self: not self.operations))
    monkeypatch.setattr(inquiry, "_COMPILING_LIMITS", 10)
    world = world_of(2, limit=0.5)
    world.pending[0].wait_for("loss")
    reason = world.members[0].reason(SECONDS)
    # Ten limits had to pass, in which it was asked more than once.
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1 and warnings[0].startswith("rank 1 imports, traces or compiles at ")
    assert world.pending[0].read()[0].seconds > 5
    assert "imports, traces or compiles" in reason.report


def test_a_stranger_without_the_token_hears_nothing(world_of):
    world = world_of(2)
    said = {**world.hub.invitation(), "token": "guessed"}
    stranger = member.Member(1, 2, 1000, FakePending(), lambda: None, said)
    assert "rank 0 died" in str(stranger.reason(SECONDS))
    assert world.hub.living() == [0, 1] and world.hub.endings() == []
    stranger.close()


def test_a_shutdown_that_another_rank_holds_up_ends_with_the_limit(monkeypatch, caplog):
    ended, released = [], threading.Event()
    monkeypatch.setattr(member, "_end_process", lambda: ended.append(True))
    held = member.Member(0, 2, 0.2, FakePending(), released.wait, None)
    held.shut_down()
    assert ended == [True]
    assert "rank 0 of 2: Horovod has not shut down in 0.2 s" in caplog.text
    released.set()
    held.close()


def test_a_shutdown_in_time_is_waited_for(monkeypatch):
    done = []
    free = member.Member(0, 2, 0, FakePending(), lambda: done.append(time.sleep(0.2)), None)
    free.shut_down()
    free.shut_down()
    assert done == [None]
    free.close()
