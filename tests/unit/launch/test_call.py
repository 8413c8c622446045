"""A call and its outcomes: what travels, which failure is the first, what the error says."""

from __future__ import annotations

import pickle
import sys

import pytest

from hvdsync.errors import RankFailed, RunFailed
from hvdsync.launch.call import Call, Failure, Outcome, attempt, raise_for, results
from hvdsync.launch.options import Options


def test_a_call_takes_arguments_and_variables_along(monkeypatch):
    monkeypatch.setenv("HVDSYNC_TEST_OF_CALLS", "before")

    def shout(text, times=1):
        import os

        return text * times + os.environ["HVDSYNC_TEST_OF_CALLS"]

    call = Call.of(shout, ["ab"], {"times": 2}, {"HVDSYNC_TEST_OF_CALLS": "after"})
    outcome, error = attempt(pickle.loads(pickle.dumps(call)), 3)
    assert (outcome.rank, error) == (3, None)
    assert results([outcome]) == ["ababafter"]


def test_a_rank_finds_the_modules_of_the_caller_after_its_own(monkeypatch, tmp_path):
    (tmp_path / "only_here.py").write_text("def answer():\n    return 42\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here

    call = Call.of(only_here.answer, (), {}, {})
    monkeypatch.setattr(sys, "path", [f for f in sys.path if f != str(tmp_path)])
    monkeypatch.delitem(sys.modules, "only_here")
    assert call() == 42
    assert sys.path[-1] == str(tmp_path)


def failed(rank, error, ended):
    try:
        raise error
    except BaseException as raised:
        return Outcome(rank, failure=Failure.of(raised), ended=ended)


def test_results_come_in_order_of_ranks():
    outcomes = [attempt(lambda rank=rank: rank * 10, rank)[0] for rank in (2, 0, 1)]
    assert results(outcomes) == [0, 10, 20]


def test_the_first_that_failed_of_itself_is_named_and_its_exception_is_the_cause():
    follower = failed(0, RankFailed("rank 2 raised"), ended=1.0)
    later = failed(1, KeyError("later"), ended=3.0)
    first = failed(2, ValueError("first"), ended=2.0)
    with pytest.raises(RunFailed, match="rank 2 of 4 raised ValueError: first\nTraceback") as info:
        results([follower, later, first, Outcome(3, pickle.dumps(None))])
    assert info.value.rank == 2
    assert isinstance(info.value.__cause__, ValueError)
    assert {rank: type(e) for rank, e in info.value.exceptions.items()} == {
        0: RankFailed,
        1: KeyError,
        2: ValueError,
    }


def test_a_failure_that_a_loss_caused_follows_it():
    try:
        try:
            raise RuntimeError("Horovod has been shut down. This was caused by ...")
        except RuntimeError as error:
            raise ValueError("no loss to print") from error
    except ValueError as error:
        assert Failure.of(error).follows
    assert not Failure.of(ValueError("of its own")).follows


def test_those_that_only_follow_leave_the_word_to_the_launcher():
    raise_for([failed(0, RankFailed("rank 1 died"), ended=1.0)], 2)
    with pytest.raises(RunFailed, match="rank 1 of 2 raised KeyError"):
        raise_for([failed(1, KeyError("x"), ended=1.0)], 2)


def test_the_traceback_begins_in_the_function():
    def fail():
        raise ValueError("inside")

    outcome, error = attempt(Call.of(fail, (), {}, {}), 0)
    assert isinstance(error, ValueError)
    lines = outcome.failure.trace.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].endswith("in fail")


def test_an_exception_that_cannot_be_sent_is_told_in_words():
    class Locked(Exception):
        def __reduce__(self):
            raise TypeError("a lock")

    with pytest.raises(RunFailed, match="rank 0 of 1 raised .*Locked: shut") as info:
        results([failed(0, Locked("shut"), ended=0.0)])
    assert info.value.exceptions == {}
    assert info.value.__cause__ is None


def test_a_result_that_cannot_be_sent_fails_on_its_rank():
    outcome, error = attempt(lambda: (number for number in range(3)), 1)
    assert isinstance(error, TypeError)
    with pytest.raises(RunFailed, match="rank 1: what the function returned cannot be sent back"):
        results([outcome])


@pytest.mark.parametrize(
    ("on", "options", "words"),
    [
        ("cluster", {}, "on='cluster'; expected one of local, spark, ray"),
        ("local", {"np": 0}, "np=0; expected 1 or more"),
        ("local", {"over": "udp"}, "over='udp'"),
        ("spark", {"over": "mpi"}, "over is not for on='spark'; ranks on Spark"),
        ("local", {"min_np": 1}, "min_np is not for on='local'; .*--host-discovery-script"),
        ("spark", {"gpus_per_rank": 1}, "gpus_per_rank is not .*spark.task.resource.gpu.amount"),
        ("ray", {"min_np": 3}, "min_np=3, np=2, max_np=2; expected them to rise"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_with_the_reason(on, options, words):
    with pytest.raises(ValueError, match=words):
        Options(**{"np": 2, **options}).check(on)


def test_what_can_be_asked_for_is_not_refused():
    Options(np=2, over="mpi", start_timeout_seconds=60).check("local")
    Options(np=2, min_np=1, max_np=4).check("spark")
    Options(np=2, min_np=1, cpus_per_rank=2, gpus_per_rank=1).check("ray")
