"""What slows a rank down, for as long as a test wants; and the words of the verdict on it."""

import hashlib
import os
import time

# Much more than a step takes, also where ranks share few cores.
SECONDS = 0.15


def compute():
    """So much processor time, however long it takes to get it.

    As decoders do, it leaves Python to other threads: a step must not wait for the loader's.
    """
    until, block = time.thread_time() + SECONDS, bytes(2**18)
    while time.thread_time() < until:
        hashlib.sha256(block)


def sleep():
    time.sleep(SECONDS)


def read_slowly(path):
    """Reads a file for so long, as from a disk that gives it in small pieces."""
    until = time.perf_counter() + SECONDS
    with open(path, "rb", buffering=0) as file:
        while time.perf_counter() < until:
            if not file.read(2**16):
                file.seek(0)
            time.sleep(SECONDS / 50)


def make_file(folder):
    path = folder / f"samples{os.getpid()}"
    path.write_bytes(bytes(2**20))
    return path


#: By name: where it happens ("loader" or "step"), and kind and words of the verdict.
CASES = {
    "busy step": ("step", "compute", "it is busy there"),
    "idle step": ("step", "compute", "it is mostly idle there"),
    "sleeping loader": ("loader", "data", "it is idle there"),
    "computing loader": ("loader", "data", "it computes there"),
    "slow disk": ("loader", "data", "it reads files there"),
}


def slow_down(case, path):
    """Do what ``case`` is about."""
    if case == "slow disk":
        read_slowly(path)
    elif case in ("busy step", "computing loader"):
        compute()
    else:
        sleep()


def assert_verdict(report, case, ranks):
    """The last rank is slow because of ``case``; the others wait for it, and compute no more."""
    slow = ranks - 1
    _, kind, words = CASES[case]
    assert report.slowest == slow, report.text
    assert report.kind == kind, report.text
    assert report.why.startswith(words), report.text
    assert f"rank {slow} is the slowest" in report.text
    means = {kind: values.mean(axis=1) for kind, values in report.seconds.items()}
    for rank in range(slow):
        own = sum(means[k][rank] for k in ("data", "compute", "checkpoint"))
        assert own < means["waiting"][rank], report.text
        assert means["waiting"][slow] < means["waiting"][rank], report.text
        # How much more depends on how far batches are read ahead.
        assert means[kind][slow] > means[kind][rank], report.text
