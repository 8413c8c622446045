"""Stacks tell where threads are, whose code that is, and whether a framework compiles it."""

import gc
import sys
import threading

import pytest

from hvdsync.guard.watch import stacks, threads
from hvdsync.guard.watch.stacks import Frame


def test_the_main_thread_is_found_at_its_line():
    stack = stacks.main_thread()
    here = next(f for f in stack if f.function == "test_the_main_thread_is_found_at_its_line")
    assert (here.file, here.code) == (__file__, "stack = stacks.main_thread()")
    assert stack.index(here) > 0
    assert f'  File "{__file__}", line {here.line}, in {here.function}\n' in stacks.formatted(stack)


def test_other_threads_are_shown_where_they_run_the_users_code():
    go_on = threading.Event()

    def read_disk():
        go_on.wait()

    loader = threading.Thread(target=read_disk, name="loader")
    library = threading.Thread(target=go_on.wait, name="library")
    loader.start(), library.start()
    threads.start(read_disk, "own")
    found = stacks.other_threads()
    go_on.set()
    loader.join(), library.join()
    assert "loader" in found and "library" not in found
    assert [f.function for f in found["loader"] if f.file == __file__] == ["read_disk"]
    assert not any(name.startswith(threads.PREFIX) for name in found)


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_while_threads_are_listed(monkeypatch, enabled):
    collecting = []

    def current_frames(frames=sys._current_frames):
        collecting.append(gc.isenabled())
        return frames()

    monkeypatch.setattr(sys, "_current_frames", current_frames)
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        assert stacks.main_thread()
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert collecting == [False]


def test_the_users_frame_is_the_innermost_that_is_no_librarys():
    library = Frame("/env/lib/python3.11/site-packages/torch/nn/module.py", 1, "forward")
    own = Frame("/job/train.py", 7, "step", "loss.backward()")
    assert stacks.users_frame([Frame("/job/train.py", 1, "<module>"), own, library]) == own
    assert stacks.users_frame([library]) == library
    assert stacks.users_frame([]) is None
    assert own.place == "/job/train.py:7 in step"


def test_a_deep_stack_keeps_the_users_lines():
    found = []

    def users(n):
        if n == 0:
            found.extend(stacks.main_thread())
        else:
            users(n - 1)

    users(40)
    assert [f.function for f in found].count("users") == 41


@pytest.mark.slow
def test_pytorch_compiles_only_while_it_compiles():
    torch = pytest.importorskip("torch")
    seen = {}

    def backend(module, inputs):
        seen["compiling"] = stacks.is_compiling(stacks.main_thread())

        def run(*arguments):
            seen["running"] = stacks.is_compiling(stacks.main_thread())
            return module(*arguments)

        return run

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert seen == {"compiling": True, "running": False}


@pytest.mark.slow
def test_tensorflow_compiles_only_while_it_traces():
    tf = pytest.importorskip("tensorflow")
    seen = {}

    def look(what):
        seen[what] = stacks.is_compiling(stacks.main_thread())

    @tf.function
    def step(x):
        look("tracing")
        tf.py_function(lambda: look("running"), [], [])
        return x + 1

    step(tf.ones(2))
    assert seen == {"tracing": True, "running": False}
