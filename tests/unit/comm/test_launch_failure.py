"""What the launcher makes of its ranks' ends: which failed first, and what is said of it."""

import io
import signal
import subprocess
import sys
import types

import psutil
import pytest

from hvdsync.comm.launch_failure import Ranks, RanksFailed, ending, last_words
from hvdsync.comm.launch_mpi import run_mpirun
from hvdsync.comm.launch_processes import command_processes, end_command

TRACEBACK = """\
before
Traceback (most recent call last):
  File "a.py", line 1, in <module>
    first()
ValueError: the first

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 3, in <module>
    second()
KeyError: 'the second'
a warning at exit""".splitlines()


def test_the_last_words_are_the_last_traceback_and_what_follows():
    assert last_words(TRACEBACK) == TRACEBACK[8:]


def test_a_long_message_keeps_its_beginning_and_its_end():
    message = ["ValueError: it", *(str(i) for i in range(99))]
    words = last_words(["Traceback (most recent call last):", *message])
    assert words[1:] == [*message[:5], "  ...", *message[-15:]]


def test_without_a_traceback_the_last_words_are_the_last_lines():
    assert last_words([str(i) for i in range(100)]) == [str(i) for i in range(80, 100)]
    assert last_words([]) == []


def test_of_a_long_traceback_the_innermost_frames_and_the_error_are_kept():
    frames = [f"  frame {i}" for i in range(100)]
    lines = ["Traceback (most recent call last):", *frames, "ValueError: it"]
    assert last_words(lines) == [lines[0], "  ...", *frames[-20:], "ValueError: it"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (3, "exit code 3"),
        (128, "exit code 128"),
        (143, "ended by SIGTERM, exit code 143"),
        (137, "ended by SIGKILL (as the kernel does when memory runs out), exit code 137"),
        (255, "exit code 255"),
    ],
)
def test_exit_codes_are_put_in_words(code, words):
    assert ending(code) == words


def test_a_kill_that_was_asked_for_is_not_laid_to_the_kernel():
    assert ending(137, asked=True) == "ended by SIGKILL, exit code 137"


@pytest.fixture
def ranks(monkeypatch):
    """Two ranks whose others have no time to end."""
    monkeypatch.setattr("hvdsync.comm.launch_failure._LINGER_SECONDS", 0)
    return Ranks(2)


def listen(ranks, rank):
    slot = types.SimpleNamespace(rank=rank, hostname="host-a")
    return ranks.listen(slot, io.StringIO())


def test_output_passes_through_and_is_kept_without_the_launcher_s_prefix(ranks):
    stream = io.StringIO()
    rank = ranks.listen(types.SimpleNamespace(rank=1, hostname="host-a"), stream)
    rank.write("Mon Jan 1 00:00:00 2024[1]<stderr>:a <stderr>:b\n")
    assert stream.getvalue() == "Mon Jan 1 00:00:00 2024[1]<stderr>:a <stderr>:b\n"
    assert list(rank.lines) == ["a <stderr>:b"]


def test_a_run_of_ranks_that_ended_well_has_no_failure(ranks):
    for index in (0, 1):
        assert listen(ranks, index).command_ended(0) is None
    ranks.raise_for_failure()


def test_the_first_failure_gives_exit_code_and_report(ranks):
    first, second = listen(ranks, 0), listen(ranks, 1)
    second.write("[1]<stderr>:Traceback (most recent call last):\n")
    second.write("[1]<stderr>:ValueError: it\n")
    second.command_ended(5)
    first.command_ended(6)
    with pytest.raises(RanksFailed) as caught:
        ranks.raise_for_failure()
    assert caught.value.exit_code == 5
    assert str(caught.value).splitlines() == [
        "horovodrun: rank 1 of 2 on host-a failed first: exit code 5",
        "horovodrun: rank 0 failed too: exit code 6",
        "horovodrun: the last lines on the stderr of rank 1:",
        "  Traceback (most recent call last):",
        "  ValueError: it",
    ]


@pytest.mark.parametrize(
    "words",
    [
        "horovod.common.exceptions.HorovodInternalError: Connection closed",
        "tensorflow.python.framework.errors_impl.UnknownError: {{..}} Horovod has been shut down.",
        "hvdsync.errors.RankFailed: rank 1 has failed",
    ],
)
def test_a_rank_that_misses_another_is_not_the_first_even_when_it_ended_before(ranks, words):
    first, second = listen(ranks, 0), listen(ranks, 1)
    first.write("[0]<stderr>:Traceback (most recent call last):\n")
    first.write(f"[0]<stderr>:{words}\n")
    first.command_ended(1)
    second.command_ended(7)
    with pytest.raises(RanksFailed, match="rank 1 of 2 on host-a failed first") as caught:
        ranks.raise_for_failure()
    assert caught.value.exit_code == 7


def test_a_rank_that_the_launcher_has_ended_is_no_failure_of_its_own(ranks):
    first, second = listen(ranks, 0), listen(ranks, 1)
    first.write("[0]<stderr>:horovod.common.exceptions.HorovodInternalError: Connection closed\n")
    first.command_ended(1)
    ranks.let_others_end()
    second.command_ended(-signal.SIGTERM)
    with pytest.raises(RanksFailed) as caught:
        ranks.raise_for_failure()
    assert caught.value.exit_code == 1
    assert "rank 1" not in str(caught.value)


SCRIPT = "import sys, time; print('up', flush=True); time.sleep(1000)"


@pytest.mark.parametrize("shell", ["", "true; "], ids=["in its place", "beside it"])
def test_the_command_is_found_and_ended_whether_or_not_the_shell_stays(shell):
    process = subprocess.Popen(
        ["bash", "-c", f'{shell}{sys.executable} -c "{SCRIPT}"{"; exit 9" if shell else ""}'],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "up\n"
        top = psutil.Process(process.pid)
        (command,) = command_processes(top)
        assert command.name().startswith("python")
        assert (command.pid == process.pid) is not bool(shell)
        end_command(top, 60)
        # The shell is not ended: it goes on after its command, to its own exit code.
        assert process.wait(60) == (9 if shell else -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


OPEN_MPI_5 = """\
[1,1]<stderr>: Traceback (most recent call last):
[1,0]<stderr>: other
[1,1]<stderr>: ValueError: it
--------------
   Process name: [prterun-host-8689@1,1]
   Exit code:    3
"""
OPEN_MPI_4 = """\
[1,0]<stderr>:other
[1,1]<stderr>:ValueError: it
mpirun noticed that process rank 1 with PID 0 on node host exited on signal 9 (Killed).
"""


@pytest.mark.parametrize(
    ("output", "code", "line"),
    [
        (OPEN_MPI_5, 3, "rank 1 of 2 failed first: exit code 3"),
        (OPEN_MPI_5.replace("prterun-host-8689@1,1", "[8689,1],1"), 3, "rank 1 of 2 failed first"),
        (OPEN_MPI_4, 137, "rank 1 of 2 failed first: ended by SIGKILL"),
    ],
)
def test_the_rank_that_mpirun_names_comes_last_with_its_words(
    output, code, line, tmp_path, capfd, monkeypatch
):
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    (tmp_path / "said").write_text(output)
    with pytest.raises(RanksFailed, match=line) as caught:
        run_mpirun(
            f"sh -c 'cat {tmp_path / 'said'} >&2; exit {code}'", {"PATH": "/bin:/usr/bin"}, 2
        )
    assert caught.value.exit_code == code
    assert str(caught.value).splitlines()[-1] == "  ValueError: it"
    assert capfd.readouterr().err == output
