"""The store: a checkpoint is whole or not there, whatever happened while it was written."""

import json
import logging
import subprocess
import sys

import pytest

from hvdsync.checkpoint.manifest import MANIFEST
from hvdsync.checkpoint.store import Store
from hvdsync.errors import CheckpointError


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "run", keep=2)
    yield store
    store.close()


def fill(text):
    def write(folder):
        (folder / "data.txt").write_text(text)
        (folder / "more").mkdir()
        (folder / "more" / "x.bin").write_bytes(b"\0" * 10)

    return write


def test_a_checkpoint_lists_and_verifies_every_file(store):
    folder = store.write(7, fill("hello"), {"world_size": 4})
    manifest = json.loads((folder / MANIFEST).read_text())
    assert (manifest["step"], manifest["world_size"], manifest["format"]) == (7, 4, 1)
    assert manifest["files"]["data.txt"] == {
        "bytes": 5,
        "sha256": "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824",
    }
    assert set(manifest["files"]) == {"data.txt", "more/x.bin"}
    assert store.newest_whole() == (folder, manifest)


def test_old_ones_go_only_beyond_keep(store):
    for step in (1, 2, 30):
        store.write(step, fill("x"), {})
    assert store.steps() == [2, 30]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "data.txt").write_text("hellO"), "data.txt has 5 bytes"),
        (lambda f: (f / "data.txt").write_text("hell"), "data.txt has 4 bytes"),
        (lambda f: (f / "data.txt").unlink(), "data.txt is missing"),
        (lambda f: (f / MANIFEST).unlink(), f"no {MANIFEST}"),
        (lambda f: (f / MANIFEST).write_text("{"), "does not read"),
        (lambda f: (f / MANIFEST).write_text('{"format": 99, "files": {}}'), "layout version 99"),
    ],
)
def test_a_damaged_one_is_named_and_the_one_before_is_taken(store, caplog, damage, message):
    before = store.write(1, fill("hello"), {})
    newest = store.write(2, fill("hello"), {})
    damage(newest)
    with pytest.raises(CheckpointError, match=message):
        store.verify(newest)
    with caplog.at_level(logging.WARNING):
        found, _ = store.newest_whole()
    assert found == before
    assert str(newest) in caplog.text


def test_a_write_that_fails_leaves_the_earlier_ones_and_no_rubbish(store):
    store.write(1, fill("x"), {})

    def no_room(folder):
        (folder / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"step 2 .*No space left"):
        store.write(2, no_room, {})
    assert store.steps() == [1]
    assert sorted(p.name for p in store.directory.iterdir()) == [".lock", "step-00000001"]


def test_what_a_killed_run_left_is_swept_and_never_read(store):
    store.write(1, fill("x"), {})
    (store.directory / ".unfinished-step-00000002").mkdir()
    (store.directory / ".unfinished-step-00000002" / "data.txt").write_text("half")
    assert store.newest_whole()[1]["step"] == 1
    store.close()  # as the kernel does for a process that was killed
    store.write(3, fill("x"), {})
    assert store.steps() == [1, 3]
    assert not list(store.directory.glob(".unfinished*"))


def test_a_step_written_again_replaces_the_old_one(store):
    store.write(1, fill("old"), {})
    folder = store.write(1, fill("new"), {})
    assert (folder / "data.txt").read_text() == "new"
    assert store.steps() == [1]


def test_a_run_killed_between_setting_aside_and_renaming_loses_nothing(store):
    folder = store.write(1, fill("only"), {})
    folder.rename(store.directory / ".replaced-step-00000001")
    store.write(2, fill("x"), {})
    assert store.steps() == [1, 2]


def test_two_jobs_in_one_folder_are_refused(store):
    store.write(1, fill("x"), {})
    code = (
        "import sys; from pathlib import Path\n"
        "from hvdsync.checkpoint import store\n"
        "store.LOCK_SECONDS = 0.2\n"
        "from hvdsync.checkpoint.store import Store\n"
        "Store(Path(sys.argv[1]), 2).write(2, lambda folder: None, {})"
    )
    other = subprocess.run(
        [sys.executable, "-c", code, store.directory], capture_output=True, text=True, timeout=60
    )
    assert other.returncode != 0
    assert "another job is writing checkpoints" in other.stderr
    store.close()
    subprocess.run([sys.executable, "-c", code, store.directory], check=True, timeout=60)


def test_no_directory_is_no_checkpoint(tmp_path):
    assert Store(tmp_path / "absent", keep=1).newest_whole() is None
    with pytest.raises(ValueError, match="keep is 0"):
        Store(tmp_path, keep=0)
