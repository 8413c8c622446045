"""The report names what waits, who has come, where each rank is, and what to do."""

from hvdsync.guard.watch.condition import Condition
from hvdsync.guard.watch.endings import Ending, cause
from hvdsync.guard.watch.pending import Operation, parse
from hvdsync.guard.watch.record import Record
from hvdsync.guard.watch.report import Situation, compose
from hvdsync.guard.watch.stacks import Frame

LIBRARY = Frame("/env/lib/python3/site-packages/horovod/ops.py", 9, "synchronize", "wait(handle)")
COMPILER = Frame("/env/lib/python3/site-packages/torch/_inductor/compile_fx.py", 1, "compile")


def waiting(rank, *operations, line=5, **more):
    stack = [Frame("/job/train.py", line, "step", "loss = reduce(x)"), LIBRARY]
    return Record(rank, True, list(operations), stack=stack, **more)


def elsewhere(rank, *inner):
    stack = [Frame("/job/load.py", 40, "read", "while busy: pass"), *inner]
    return Record(rank, False, [], stack=stack)


def situation(*records, size=4, limit=10.0, **more):
    return Situation(size, limit, {record.rank: record for record in records}, **more)


def test_the_first_line_names_the_tensor_the_seconds_and_the_ranks_that_have_not_come():
    wait = Operation(0, 12.4, "loss")
    report = compose(situation(waiting(0, wait), waiting(3, wait), elsewhere(1), elsewhere(2)))
    expected = "collective 'loss' has waited 12 s for ranks 1, 2 (limit 10 s)"
    assert report.summary == report.text.splitlines()[0] == expected
    assert not report.failed
    assert "  loss: for 12 s; come: ranks 0, 3; not come: ranks 1, 2" in report.text
    assert "rank 0 waits for loss at /job/train.py:5 in step: loss = reduce(x)" in report.text
    assert (
        "rank 1 lives, and is in no collective, but at /job/load.py:40 in read: while busy: pass"
        in report.text
    )
    assert "init(wait_limit=...)" in report.text and "HVDSYNC_WAIT_LIMIT" in report.text


def test_equal_stacks_are_shown_once_for_all_their_ranks():
    wait = Operation(0, 12, "loss")
    report = compose(situation(waiting(0, wait), waiting(3, wait), elsewhere(1), elsewhere(2)))
    assert report.text.count("Stack of ") == 2
    assert "Stack of ranks 0, 3:\n" in report.text
    assert (
        'Stack of ranks 1, 2:\n  File "/job/load.py", line 40, in read\n    while busy: pass\n'
        in report.text
    )


def test_only_members_of_a_process_set_are_waited_for():
    record = waiting(1, Operation(2, 12, "part"), members={2: [1, 3]})
    report = compose(situation(elsewhere(0), record, elsewhere(2), elsewhere(3)))
    assert "  part: for 12 s; come: rank 1; not come: rank 3" in report.text


def test_ranks_that_wait_for_different_tensors_show_that_one_was_left_out():
    first = waiting(0, Operation(0, 12, "step 3"))
    report = compose(situation(first, waiting(1, Operation(0, 11, "step 4")), size=2))
    assert "  step 3: for 12 s; come: rank 0; not come: rank 1" in report.text
    assert "  step 4: for 11 s; come: rank 1; not come: rank 0" in report.text


def test_a_condition_on_the_rank_is_told_with_file_line_and_text():
    condition = Condition("/job/train.py", 4, "if rank() == 0:")
    record = waiting(0, Operation(0, 12, "loss"), condition=condition)
    report = compose(situation(record, elsewhere(1), size=2))
    assert "rank 0 waits inside\n  /job/train.py:4: if rank() == 0:\n" in report.text


def test_a_silent_rank_is_told_with_what_the_system_knows():
    record = waiting(0, Operation(0, 12, "loss"))
    report = compose(situation(record, size=2, silent={1: "its process 7 is stopped"}))
    assert "rank 1 does not answer: its process 7 is stopped" in report.text


def test_a_rank_that_failed_is_the_cause_and_its_traceback_is_shown():
    record = waiting(0, Operation(0, 6, "loss"))
    ended = [Ending(2, "finished"), Ending(1, "raised", "KeyError: 'x'", "Traceback ...")]
    report = compose(situation(record, size=3, endings=ended))
    assert report.failed
    assert report.summary.startswith("rank 1 raised KeyError: 'x', while other ranks wait")
    assert "Traceback of rank 1:\nTraceback ...\n" in report.text
    assert "rank 2 finished its script" in report.text
    assert "look for the reason on rank 1" in report.text


def test_a_compiling_rank_is_told_from_one_that_hangs():
    record = elsewhere(1, COMPILER)
    assert record.compiling and not elsewhere(1).compiling
    assert elsewhere(1, Frame("<frozen importlib._bootstrap>", 1, "_load_unlocked")).compiling
    report = compose(situation(waiting(0, Operation(0, 12, "loss")), record, size=2))
    assert "rank 1 lives, and imports, traces or compiles at /job/load.py:40" in report.text


def test_a_failure_is_the_cause_even_when_another_rank_finished_before():
    ended = [Ending(0, "finished"), Ending(2, "died"), Ending(1, "raised", "E")]
    assert cause(ended).rank == 2
    assert cause(ended[:1]).rank == 0
    assert cause([]) is None


def test_an_ending_carries_the_last_lines_of_the_traceback():
    def deep(n):
        if n == 0:
            raise ValueError("first line\nsecond line")
        deep(n - 1)

    try:
        deep(50)
    except ValueError as error:
        ending = Ending.of(3, error)
    assert ending.text == "rank 3 raised ValueError: first line"
    assert ending.trace.endswith("ValueError: first line\nsecond line")
    assert len(ending.trace.splitlines()) <= 31
    assert Ending(**ending.as_dict()) == ending


def test_records_travel_as_plain_values():
    condition = Condition("/job/train.py", 4, "if rank() == 0:")
    record = waiting(
        0,
        Operation(2, 1.5, "x"),
        members={2: [0, 1]},
        condition=condition,
        threads={"t": [LIBRARY]},
    )
    assert Record.from_dict(record.as_dict()) == record


def test_horovods_lines_are_read_oldest_first():
    text = "0\t1500\tallreduce.a\tb\n3\t20000\tbroadcast.c\n"
    assert parse(text) == [Operation(3, 20.0, "broadcast.c"), Operation(0, 1.5, "allreduce.a\tb")]
    assert parse("") == []


def test_a_rank_that_has_joined_may_wait_as_long_as_others_train():
    assert not Operation(0, 1e6, "join.noname").bounded
    assert Operation(0, 1, "loss").bounded
