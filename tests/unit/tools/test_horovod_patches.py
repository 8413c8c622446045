"""In: made-up source trees and archives. Out: proof that only the expected text is replaced."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import io
import json
import re
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hvdsync.errors import BuildError
from hvdsync.tools.horovod_build.patches import ALWAYS, replacements_for
from hvdsync.tools.horovod_build.replacement import Replacement, apply, patch_level
from hvdsync.tools.horovod_build.source import SDIST_SHA256, check_sha256, fetch_sdist, unpack

UTIL = """\
import json
import os
calls = []

def _check_extension_lambda(ext_base_name, fn, fn_desc, verbose):
    def _target_fn(ext_base_name, fn, fn_desc, queue, verbose):
        pass
    calls.append((ext_base_name, fn_desc))
    return 'probed'
"""


def _tree(folder: Path, torch_version: str | None) -> Path:
    """A source tree in which every replacement finds its text as often as it expects."""
    util = "horovod/common/util.py"
    texts, mended = {util: UTIL}, {util: UTIL}
    for item in replacements_for(torch_version):
        # A replacement sees the text as the ones before it left it.
        absent = item.count - mended.get(item.file, "").count(item.old)
        more = f"{item.old}\n" * absent
        texts[item.file] = texts.get(item.file, "") + more
        mended[item.file] = (mended.get(item.file, "") + more).replace(item.old, item.new)
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("version", "standard"),
    [("2.12.1", 17), ("2.13.0+cpu", 17), ("2.14.0", 20), ("2.14.1+cu130", 20), ("3.0", 20)],
)
def test_the_cxx_standard_follows_the_torch_version(
    version: str, standard: int, tmp_path: Path
) -> None:
    tree = _tree(tmp_path, version)
    apply(tree, replacements_for(version))
    text = (tree / "horovod/torch/CMakeLists.txt").read_text()
    assert f"set(CMAKE_CXX_STANDARD {standard})" in text
    assert "STANDARD 14" not in text
    assert "distutils" not in text
    assert "set(CMAKE_CXX_STANDARD 17)" in (tree / "CMakeLists.txt").read_text()


def test_without_torch_its_standard_is_left_alone(tmp_path: Path) -> None:
    assert all("STANDARD 14" not in item.old or item.file == "CMakeLists.txt" for item in ALWAYS)
    apply(_tree(tmp_path, None), replacements_for(None))


@pytest.mark.parametrize("item", replacements_for("2.13.0"), ids=lambda item: item.file)
def test_a_text_that_is_not_found_is_refused_and_nothing_is_changed(
    item: Replacement, tmp_path: Path
) -> None:
    tree = _tree(tmp_path, "2.13.0")
    path = tree / item.file
    path.write_text(path.read_text().replace(item.old, "something else"))
    before = {file: file.read_text() for file in tree.rglob("*.*") if file.is_file()}
    with pytest.raises(BuildError, match=f"{item.file}: found 0 times, expected "):
        apply(tree, replacements_for("2.13.0"))
    assert {file: file.read_text() for file in tree.rglob("*.*") if file.is_file()} == before


def test_a_text_found_too_often_is_refused_by_name(tmp_path: Path) -> None:
    tree = _tree(tmp_path, None)
    path = tree / "horovod/runner/js_run.py"
    path.write_text(path.read_text() * 2)
    with pytest.raises(BuildError, match=r"js_run\.py: found 2 times, expected 1.*distutils"):
        apply(tree, ALWAYS)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    tree = _tree(tmp_path, None)
    (tree / "setup.py").unlink()
    with pytest.raises(BuildError, match=r"setup\.py is not in the source tree"):
        apply(tree, ALWAYS)


def test_every_replacement_says_why() -> None:
    assert all(len(item.why) > 20 for item in replacements_for("2.13.0"))


def test_what_horovod_asks_of_hvdsync_is_there() -> None:
    # Where it is not, Horovod goes on as ever and nobody is told.
    asked = [
        match.groups()
        for item in ALWAYS
        for match in re.finditer(r"from (hvdsync[.\w]*) import (\w+)", item.new)
    ]
    assert len(asked) == 5
    for module, name in asked:
        assert callable(getattr(importlib.import_module(module), name)), (module, name)


def test_the_patch_level_changes_with_any_replacement() -> None:
    level = patch_level(ALWAYS)
    assert len(level) == 8
    assert patch_level(ALWAYS[:-1]) != level
    assert patch_level(replacements_for("2.13.0")) != patch_level(replacements_for("2.14.0"))


def _patched_util(tmp_path: Path, metadata: dict[str, Any] | None) -> ModuleType:
    tree = _tree(tmp_path, None)
    apply(tree, ALWAYS)
    if metadata is not None:
        (tree / "horovod" / "metadata.json").write_text(json.dumps(metadata))
    path = tree / "horovod" / "common" / "util.py"
    ast.parse(path.read_text())
    spec = importlib.util.spec_from_file_location("patched_util", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _ask(module: ModuleType, extension: str, question: str) -> Any:
    return module._check_extension_lambda(extension, lambda ext: None, question, False)


RECORDED = {
    "hvdsync": {
        "extensions": {"torch": {"answers": {"built": True, "built with MPI": False}}},
    }
}


def test_the_launcher_is_answered_from_the_record_without_probing(tmp_path: Path) -> None:
    module = _patched_util(tmp_path, RECORDED)
    assert _ask(module, "torch", "built") is True
    assert _ask(module, "torch", "built with MPI") is False
    # As a probe of an extension that was not built would answer.
    assert _ask(module, "tensorflow", "built with MPI") is None
    assert module.calls == []


def test_what_the_build_cannot_know_is_still_probed(tmp_path: Path) -> None:
    module = _patched_util(tmp_path, RECORDED)
    assert _ask(module, "torch", "running with GPU") == "probed"
    assert _ask(module, "torch", "built with something new") == "probed"


@pytest.mark.parametrize("metadata", [None, {}, {"pytorch": "2.13.0"}, {"hvdsync": 3}])
def test_without_a_record_the_launcher_probes(metadata: Any, tmp_path: Path) -> None:
    assert _ask(_patched_util(tmp_path, metadata), "torch", "built") == "probed"


def test_another_sdist_is_refused_with_both_hashes(tmp_path: Path) -> None:
    archive = tmp_path / "horovod-0.28.1.tar.gz"
    archive.write_bytes(b"another source")
    found = hashlib.sha256(b"another source").hexdigest()
    with pytest.raises(BuildError, match=f"{found}, expected {SDIST_SHA256}"):
        check_sha256(archive)
    check_sha256(archive, expected=found)


def test_a_wrong_sdist_in_the_cache_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sdist").mkdir()
    (tmp_path / "sdist" / "horovod-0.28.1.tar.gz").write_bytes(b"damaged")
    with pytest.raises(BuildError, match="SHA-256"):
        fetch_sdist(tmp_path)


def test_an_archive_that_writes_outside_its_folder_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "a.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        member = tarfile.TarInfo("../outside")
        member.size = 4
        tar.addfile(member, io.BytesIO(b"evil"))
    with pytest.raises(tarfile.TarError):
        unpack(archive, tmp_path / "in")
    assert not (tmp_path / "outside").exists()
