"""TensorFlow's greetings are kept off standard error; whatever else is written there arrives."""

from __future__ import annotations

import os

import pytest

from hvdsync.train.chatter import without_greetings


def test_greetings_vanish_and_other_lines_arrive(capfd: pytest.CaptureFixture[str]) -> None:
    with without_greetings():
        os.write(2, b"WARNING: All log messages before absl::InitializeLog() is called ...\n")
        os.write(2, b"I0000 00:00:1795980331.646648   21214 port.cc:153] oneDNN ...\n")
        os.write(2, b"E0000 something is really wrong\nno end of line")
    os.write(2, b"\nafter\n")
    assert capfd.readouterr().err == "E0000 something is really wrong\nno end of line\nafter\n"


def test_an_error_inside_passes_and_standard_error_is_restored(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ImportError), without_greetings():
        raise ImportError("no such module")
    os.write(2, b"I0000 written later\n")
    assert capfd.readouterr().err == "I0000 written later\n"
