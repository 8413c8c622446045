"""Where one process's time goes: what is marked, what is left, and what is not counted."""

import multiprocessing
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from hvdsync.comm import clock, runtime_threads
from hvdsync.guard import time_split
from hvdsync.guard.stragglers import Stragglers
from hvdsync.guard.time_split import EVIDENCE, TimeSplit
from hvdsync.guard.usage import children, processor_seconds, threads


@pytest.fixture
def hands(monkeypatch):
    """A clock that stands still until a test moves it: ``hands(seconds)``."""
    now = [100.0]

    def move(seconds):
        now[0] += seconds

    for module in (clock, time_split):
        monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(clock, "_spent", {"data": 0.0, "stalled": 0.0, "checkpoint": 0.0})
    monkeypatch.setattr(clock, "_counting", set())
    return move


def test_marks_inside_of_marks_count_once(hands):
    split = TimeSplit()
    split.step()
    hands(1)
    with split.data_wait():
        hands(2)
        with clock.spend("stalled"):
            hands(4)
        hands(8)
    with clock.spend("checkpoint"), clock.spend("stalled"):
        hands(16)
    split.step()
    rows, _ = split.take()
    assert rows.tolist() == [[31, 10, 20, 0]]


def test_the_first_step_starts_the_clock_and_what_is_skipped_belongs_to_none(hands):
    split = TimeSplit()
    hands(50)  # compiling
    assert split.step() == 0
    hands(1)
    assert split.step() == 1
    hands(7)  # an evaluation, with collectives
    clock.add("stalled", 3)
    split.skip()
    hands(2)
    assert split.step() == 2
    assert split.take()[0][:, (0, 2)].tolist() == [[1, 0], [2, 0]]
    assert len(split.take()[0]) == 0


def test_what_counts_for_itself_is_stalled_for_as_long_as_it_lives(hands):
    class Graph:
        waited_seconds = 5.0

    graph = Graph()
    clock.include(graph)
    split = TimeSplit()
    split.step()
    graph.waited_seconds = 7.0
    hands(3)
    split.step()
    clock._counting.discard(graph)
    hands(1)
    split.step()
    assert split.take()[0][:, (0, 2)].tolist() == [[3, 2], [1, 0]]


def test_a_decorated_function_keeps_its_result_and_its_errors_are_counted(hands):
    @clock.spend("checkpoint")
    def save(fails):
        hands(2)
        if fails:
            raise OSError
        return "saved"

    assert save(False) == "saved"
    with pytest.raises(OSError):
        save(True)
    assert clock.spent() == (0.0, 0.0, 4.0)


def test_other_threads_marks_are_not_inside_of_this_ones(hands):
    with clock.spend("checkpoint"):
        thread = threading.Thread(target=clock.spend("stalled")(hands), args=(3,))
        thread.start()
        thread.join()
    assert clock.spent() == (0.0, 3.0, 3.0)


def test_bytes_that_a_loader_reads_are_evidence(tmp_path):
    path = tmp_path / "samples"
    path.write_bytes(bytes(2**20))
    split = TimeSplit()
    split.step()
    path.read_bytes()  # not while waiting for data
    with split.data_wait():
        path.read_bytes()
    split.step()
    evidence = dict(zip(EVIDENCE, split.take()[1], strict=True))
    assert 2**20 <= evidence["data_read"] < 2 * 2**20


def read_forever(path, started):
    started.set()
    while True:
        Path(path).read_bytes()


@pytest.mark.parametrize("known_before", [False, True])
def test_processes_below_are_evidence_when_data_takes_long(tmp_path, known_before):
    path = tmp_path / "samples"
    path.write_bytes(bytes(2**16))
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    worker = context.Process(target=read_forever, args=(path, started), daemon=True)
    worker.start()

    def let_it_work():
        until = children()[worker.pid][0].process + 0.1
        while children()[worker.pid][0].process < until:
            pass

    def evidence():
        split.step()
        return dict(zip(EVIDENCE, split.take()[1], strict=True))

    try:
        assert started.wait(60)
        split = TimeSplit()
        split.step()
        for _ in range(1 + known_before):
            clock.add("data", 1e6)  # as if that were all
            let_it_work()
            found = evidence()
            assert found["children_read"] > 2**16
            assert found["children_cpu"] > 0
        assert evidence()["children_read"] == 0  # data took no time: it was not looked at
    finally:
        worker.kill()
        worker.join()


def test_alone_a_report_says_where_time_goes(hands):
    told = []
    stragglers = Stragglers(every=2, tell=lambda report, is_news: told.append((report, is_news)))

    def batches():
        for _ in range(5):
            hands(1)
            yield hands(0)

    for _ in stragglers.watch(batches()):
        hands(3)
        stragglers.step()
    (first, news), (second, _) = told
    assert (first.first_step, first.last_step, second.first_step) == (2, 3, 4)
    assert first.seconds["data"].tolist() == [[1, 1]]
    assert first.seconds["compute"].tolist() == [[3, 3]]
    assert not news


def test_a_report_that_is_due_waits_for_a_step_at_which_ranks_meet(hands):
    stragglers = Stragglers(every=2)
    reports = []
    for number in range(8):
        hands(1)
        reports.append(stragglers.step(meets=number % 4 == 0))
    # The first call starts the clock, of steps 2 and 3 nothing is said yet.
    (report,) = filter(None, reports)
    assert (report.first_step, report.last_step) == (2, 5)
    assert reports[4] is report


@pytest.mark.parametrize("arguments", [{"every": 0}, {"tolerance": -1}])
def test_senseless_arguments_are_refused(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        Stragglers(**arguments)


@pytest.mark.parametrize("carries", [True, False], ids=["runtime", "own"])
def test_threads_that_carry_collectives_are_not_this_ranks_work(carries, monkeypatch):
    monkeypatch.setattr(runtime_threads, "_known", frozenset())
    worked, end = threading.Event(), threading.Event()

    def work():
        until = time.thread_time() + 0.3
        while time.thread_time() < until:
            pass
        worked.set()
        end.wait()

    before, worker = processor_seconds(), threading.Thread(target=work)
    with runtime_threads.noticed() if carries else nullcontext():
        worker.start()
    worked.wait()
    used, others = processor_seconds() - before, threads()
    end.set()
    worker.join()
    assert (used < 0.15) == carries
    assert (str(worker.native_id) in others) != carries
    runtime_threads.forget()
    assert not runtime_threads.known()
