"""Saves in the background: what is written, when, and where a failure comes out."""

import logging
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

from hvdsync.errors import CheckpointError
from tests.unit.checkpoint.arrays import Box, BoxCodec, checkpoint


class HeldCodec(BoxCodec):
    """Writes when it is let, and fails when it is told to."""

    def __init__(self):
        self.let = threading.Event()
        self.log = []
        self.failure = None

    def write(self, folder, name, snapshot):
        self.log.append("begins")
        assert self.let.wait(60)
        if self.failure is not None:
            raise self.failure
        super().write(folder, name, snapshot)
        self.log.append("ends")


@pytest.fixture
def codec():
    codec = HeldCodec()
    yield codec
    codec.let.set()


def test_training_goes_on_while_what_was_there_at_the_save_is_written(tmp_path, codec):
    box = Box(1.0)
    manager = checkpoint(tmp_path, codec, background=True)
    folder = manager.save(5, box=box, epoch=2)
    box.array += 1  # training
    assert folder == tmp_path / "step-00000005"
    assert not folder.exists()
    codec.let.set()
    manager.wait()
    assert np.load(folder / "box.npy").tolist() == [1.0] * 4
    assert manager.restore(box=box)["epoch"] == 2
    assert box.array.tolist() == [1.0] * 4
    manager.close()


def test_one_save_is_in_flight_at_a_time(tmp_path, codec):
    manager = checkpoint(tmp_path, codec, background=True)
    manager.save(1, box=Box())
    second = threading.Thread(target=manager.save, args=(2,), kwargs={"box": Box()})
    second.start()
    # Longer than it would take to begin, were it not for the first.
    second.join(0.2)
    assert codec.log == ["begins"]
    codec.let.set()
    second.join()
    manager.close()
    assert codec.log == ["begins", "ends"] * 2
    assert manager.latest() == 2


@pytest.mark.parametrize(
    "ask",
    [
        lambda manager: manager.save(2, box=Box(), loss=1.0),
        lambda manager: manager.restore(box=Box()),
        lambda manager: manager.restore_best(box=Box()),
        lambda manager: manager.latest(),
        lambda manager: manager.best(),
        lambda manager: manager.wait(),
        lambda manager: manager.close(),
    ],
    ids=["save", "restore", "restore_best", "latest", "best", "wait", "close"],
)
def test_a_failure_is_raised_once_by_whatever_comes_next(tmp_path, codec, ask):
    codec.let.set()
    manager = checkpoint(tmp_path, codec, background=True, best="loss", mode="min")
    manager.save(0, box=Box(7.0), loss=1.0)
    manager.wait()
    codec.failure = OSError(28, "No space left on device")
    manager.save(1, box=Box(), loss=0.5)
    with pytest.raises(CheckpointError, match=r"the checkpoint of step 1 failed.*No space left"):
        ask(manager)
    codec.failure = None
    assert manager.latest() == 0
    manager.save(3, box=Box(), loss=0.1)
    manager.close()
    assert manager.latest() == 3


def test_closing_while_an_exception_is_on_its_way_keeps_it_and_logs_the_other(
    tmp_path, codec, caplog, monkeypatch
):
    codec.let.set()
    codec.failure = OSError(28, "No space left on device")
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(ZeroDivisionError),
        checkpoint(tmp_path, codec, background=True) as manager,
    ):
        manager.save(1, box=Box())
        raise ZeroDivisionError
    assert "step 1 failed" in caplog.text

    def no_wire(*_):
        raise AssertionError("other ranks may not come here")

    manager = checkpoint(tmp_path, codec, background=True)
    with pytest.raises(ZeroDivisionError):
        try:
            manager.save(1, box=Box())
            raise ZeroDivisionError
        finally:
            monkeypatch.setattr("hvdsync.comm.verbs.broadcast_object", no_wire)
            manager.close()


def test_an_orderly_exit_does_not_hide_a_failed_save(tmp_path, codec):
    codec.let.set()
    codec.failure = OSError(28, "No space left on device")
    with (
        pytest.raises(CheckpointError, match="step 1 failed"),
        checkpoint(tmp_path, codec, background=True) as manager,
    ):
        manager.save(1, box=Box())
        sys.exit(0)


def script(body, directory):
    head = """
        import logging, sys
        from pathlib import Path
        from tests.unit.checkpoint.arrays import Box, BoxCodec, checkpoint
        logging.basicConfig()
        directory = Path(sys.argv[1])
    """
    code = textwrap.dedent(head) + textwrap.dedent(body)
    return subprocess.run(
        [sys.executable, "-c", code, directory], capture_output=True, text=True, timeout=60
    )


def test_a_program_that_ends_lets_its_last_save_finish(tmp_path):
    done = script(
        """
        import time
        class Slow(BoxCodec):
            def write(self, folder, name, snapshot):
                time.sleep(0.3)
                super().write(folder, name, snapshot)
        checkpoint(directory, Slow(), background=True).save(1, box=Box(3.0))
        """,
        tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    box = Box()
    assert checkpoint(tmp_path).restore(box=box)["step"] == 1
    assert box.array.tolist() == [3.0] * 4


def test_a_failure_that_nobody_asked_for_is_logged_at_the_end(tmp_path):
    done = script(
        """
        class Failing(BoxCodec):
            def write(self, folder, name, snapshot):
                raise OSError(28, "No space left on device")
        checkpoint(directory, Failing(), background=True).save(1, box=Box())
        """,
        tmp_path,
    )
    assert done.returncode == 0
    assert "the checkpoint of step 1 failed, and nobody asked" in done.stderr
    assert "No space left on device" in done.stderr
