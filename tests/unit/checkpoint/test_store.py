"""The store: a checkpoint is whole or not there, whatever happened while it was written."""

import json
import logging
import shutil
import subprocess
import sys

import pytest

from hvdsync.checkpoint.manifest import MANIFEST
from hvdsync.checkpoint.store import Store
from hvdsync.errors import CheckpointError
from tests import disks


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


def replace(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


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
        (lambda f: replace(f / MANIFEST, '"epoch": 3', '"epoch": 4'), "its own SHA-256"),
        (lambda f: (f / MANIFEST).write_text('{"format": 99, "files": {}}'), "layout version 99"),
    ],
)
def test_a_damaged_one_is_named_and_the_one_before_is_taken(store, caplog, damage, message):
    before = store.write(1, fill("hello"), {"epoch": 2})
    newest = store.write(2, fill("hello"), {"epoch": 3})
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


def other_job(directory):
    """Another process that writes a checkpoint there."""
    code = (
        "import sys; from pathlib import Path\n"
        "from hvdsync.checkpoint import store\n"
        "store.LOCK_SECONDS = 0.2\n"
        "store.Store(Path(sys.argv[1]), 2).write(2, lambda folder: None, {})"
    )
    return subprocess.run(
        [sys.executable, "-c", code, directory], capture_output=True, text=True, timeout=60
    )


def test_two_jobs_in_one_folder_are_refused(store):
    store.write(1, fill("x"), {})
    other = other_job(store.directory)
    assert other.returncode != 0
    assert "another job is writing checkpoints" in other.stderr
    assert store.steps() == [1]
    store.close()
    assert other_job(store.directory).returncode == 0


def test_no_directory_is_no_checkpoint(tmp_path):
    assert Store(tmp_path / "absent", keep=1).newest_whole() is None
    with pytest.raises(ValueError, match="keep is 0"):
        Store(tmp_path, keep=0)


def whole(store):
    return [step for step in store.steps() if store.verify(store.folder(step))]


def large(folder):
    (folder / "large.bin").write_bytes(bytes(3 * 2**20))


def test_a_full_disk_is_told_with_the_room_there_is_and_what_was_there_stays(tmp_path):
    with disks.small(tmp_path / "disk", megabytes=2):
        store = Store(tmp_path / "disk" / "run", keep=2)
        store.write(1, fill("x"), {})
        with pytest.raises(CheckpointError, match=r"step 2 .*MiB are free there\).*untouched"):
            store.write(2, large, {})
        assert whole(store) == [1]
        store.write(3, fill("x"), {})
        assert whole(store) == [1, 3]
        store.close()


def test_a_read_only_disk_is_told_and_what_was_there_stays(store):
    store.write(1, fill("x"), {})
    with disks.read_only(store.directory):
        with pytest.raises(CheckpointError, match="step 2 could not be written"):
            store.write(2, fill("x"), {})
        store.close()
        with pytest.raises(CheckpointError, match="cannot be written to"):
            store.claim()
        assert Store(store.directory, keep=2).newest_whole()[1]["step"] == 1
    store.write(2, fill("x"), {})
    assert whole(store) == [1, 2]


def test_a_directory_removed_under_a_job_is_made_anew_and_locked_again(store, caplog):
    store.write(1, fill("x"), {})
    shutil.rmtree(store.directory)
    store.write(2, fill("x"), {})
    assert whole(store) == [2]
    assert f"{store.directory} was removed while this job runs" in caplog.text
    assert other_job(store.directory).returncode != 0


def test_a_directory_removed_in_the_middle_of_a_write_is_an_error_and_the_next_write_works(store):
    def pulled(folder):
        shutil.rmtree(store.directory)
        (folder / "data.txt").write_text("x")

    with pytest.raises(CheckpointError, match=r"step 1 could not be written .* is gone"):
        store.write(1, pulled, {})
    store.write(2, fill("x"), {})
    assert whole(store) == [2]


def test_a_rename_that_fails_brings_the_replaced_one_back(store, monkeypatch):
    store.write(1, fill("old"), {})
    rename = type(store.directory).rename

    def fails(path, target):
        if path.name.startswith(".unfinished"):
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(type(store.directory), "rename", fails)
    with pytest.raises(CheckpointError, match="Input/output error"):
        store.write(1, fill("new"), {})
    assert (store.directory / "step-00000001" / "data.txt").read_text() == "old"
    assert whole(store) == [1]


def test_a_reader_beside_a_writer_finds_the_newest(store, monkeypatch):
    """What was listed is dropped before it is read, after a newer one has come."""
    store.keep = 1
    store.write(1, fill("x"), {})
    reader, history = Store(store.directory, keep=1), Store.history

    def overtaken(self):
        listed = history(self)
        if listed == [1]:
            store.write(2, fill("x"), {})
        return listed

    monkeypatch.setattr(Store, "history", overtaken)
    assert reader.newest_whole()[1]["step"] == 2


def test_a_checkpoint_under_another_name_is_damaged(store):
    folder = store.write(1, fill("x"), {})
    folder.rename(store.directory / "step-00000005")
    with pytest.raises(CheckpointError, match="says step 1"):
        store.verify(store.directory / "step-00000005")
