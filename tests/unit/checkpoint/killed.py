"""Saves again and again in processes that are killed, and looks at what is left each time.

    python killed.py points DIRECTORY blocking|background
    python killed.py moments DIRECTORY blocking|background SEED KILLS

``points`` kills at every file operation of a save in turn, ``moments`` at random moments. Ends with
the number of kills, or with the first checkpoint that is lost or wrong.
"""

import itertools
import logging
import os
import random
import signal
import sys
import time
from pathlib import Path

from tests.unit.checkpoint.arrays import Box, checkpoint

EVENTS = {"open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.listdir", "os.scandir"}
SIZE = 20_000

warned = []


class Listener(logging.Handler):
    def emit(self, record):
        warned.append(record.getMessage())


def newest(directory):
    """The number in the newest checkpoint, which must be whole and of one save.

    A kill damages nothing, so there is nothing to be warned of.
    """
    warned.clear()
    box = Box(-1.0, SIZE)
    found = checkpoint(directory).restore(box=box)
    if found is None:
        return 0
    number = found["number"]
    assert (box.array == number).all(), f"{number} was saved with {set(box.array)}"
    assert found["step"] == number // 2
    assert not warned, warned
    return number


def save(manager, number):
    # Each step twice: the second save replaces the first.
    manager.save(number // 2, box=Box(float(number), SIZE), number=number)


def kill_at(event):
    """End this process at the event of that number, counted from now on."""
    count = itertools.count(1)

    def hook(name, _):
        if name in EVENTS and next(count) == event:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def in_child(action):
    """Run ``action`` in a forked process; whether it was killed."""
    child = os.fork()
    if child == 0:
        try:
            action()
        except BaseException as error:
            print(f"failed in a child: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def settle(directory, remainder):
    """Whole saves until there are the same files each time; the last number is of that parity."""
    with checkpoint(directory, keep=2) as manager:
        number = newest(directory)
        while True:
            number += 1
            save(manager, number)
            if len(list(directory.glob("step-*"))) == 2 and number % 2 == remainder:
                return number


def points(directory, background):
    kills = 0
    for remainder in (1, 0):  # then comes the first save of a step; the one that replaces it
        for event in itertools.count(1):
            before = settle(directory, remainder)

            def one_save(before=before, event=event):
                manager = checkpoint(directory, keep=2, background=background)
                kill_at(event)
                save(manager, before + 1)
                manager.close()

            killed = in_child(one_save)
            after = newest(directory)
            assert after in ((before, before + 1) if killed else (before + 1,)), (before, after)
            kills += killed
            if not killed:
                break
    return kills


def moments(directory, background, seed, count):
    choice = random.Random(seed)
    for _ in range(count):
        before = newest(directory)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            manager = checkpoint(directory, keep=2, background=background)
            for number in itertools.count(before + 1):
                save(manager, number)
                # In the background a save is done when the next one has begun.
                os.write(writer, (number - background).to_bytes(8, "big"))
        os.close(writer)
        os.read(reader, 8)  # the child saves
        time.sleep(choice.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        acknowledged = before
        while said := os.read(reader, 8):
            acknowledged = int.from_bytes(said, "big")
        os.close(reader)
        after = newest(directory)
        assert after >= acknowledged, f"{acknowledged} was saved, and {after} is the newest"
    return count


def main():
    logging.getLogger("hvdsync").addHandler(Listener())
    what, directory, mode, *numbers = sys.argv[1:]
    action = {"points": points, "moments": moments}[what]
    print(action(Path(directory), mode == "background", *map(int, numbers)))


if __name__ == "__main__":
    main()
