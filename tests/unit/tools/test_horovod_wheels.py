"""In: two tiny wheels, each with one extension. Out: proof that their union is a valid wheel."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdsync.errors import BuildError
from hvdsync.tools.horovod_build import wheels

MakeWheel = Callable[[Path, str, str], Path]


def _check_record(archive: zipfile.ZipFile) -> set[str]:
    """Every file is in RECORD with its own hash and size, and the reverse; returns the names."""
    text = archive.read("horovod-0.28.1.dist-info/RECORD").decode()
    listed = {row[0]: row[1:] for row in csv.reader(io.StringIO(text)) if row}
    names = {info.filename for info in archive.infolist() if not info.is_dir()}
    assert set(listed) == names
    for name, (digest, size) in listed.items():
        if name.endswith("RECORD"):
            continue
        data = archive.read(name)
        found = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        assert (digest, int(size)) == (f"sha256={found}", len(data)), name
    return names


def test_merging_two_wheels_keeps_both_extensions_and_a_right_record(
    make_wheel: MakeWheel, tmp_path: Path
) -> None:
    torch = make_wheel(tmp_path / "torch", "torch", "2.13.0+cpu")
    tensorflow = make_wheel(tmp_path / "tf", "tensorflow", "2.21.0")
    merged = wheels.merge({"torch": torch, "tensorflow": tensorflow}, tmp_path / "merged")
    with zipfile.ZipFile(merged) as archive:
        names = _check_record(archive)
        assert archive.read("horovod/torch/mpi_lib_v2.so") == b"built for torch"
        assert archive.read("horovod/tensorflow/mpi_lib.so") == b"built for tensorflow"
        content = json.loads(archive.read("horovod/metadata.json"))
    assert "horovod-0.28.1.dist-info/METADATA" in names
    assert content["pytorch"] == "2.13.0+cpu"
    assert content["tensorflow"] == "2.21.0"
    keys = {name: entry["key"] for name, entry in content["hvdsync"]["extensions"].items()}
    assert keys == {"torch": "key-torch", "tensorflow": "key-tensorflow"}
    # Nothing of the work is left beside the result.
    assert list((tmp_path / "merged").iterdir()) == [merged]


def test_one_wheel_alone_is_its_own_union(make_wheel: MakeWheel, tmp_path: Path) -> None:
    only = make_wheel(tmp_path / "tf", "tensorflow", "2.21.0")
    merged = wheels.merge({"tensorflow": only}, tmp_path / "merged")
    with zipfile.ZipFile(merged) as archive:
        names = _check_record(archive)
    assert "horovod/tensorflow/mpi_lib.so" in names
    assert "horovod/torch/mpi_lib_v2.so" not in names


def test_a_wheel_without_its_extension_is_refused_by_name(
    make_wheel: MakeWheel, tmp_path: Path
) -> None:
    wheel = make_wheel(tmp_path / "tf", "tensorflow", "2.21.0")
    with pytest.raises(BuildError, match="holds no extension for torch"):
        wheels.merge({"torch": wheel}, tmp_path / "merged")


def test_a_damaged_wheel_is_refused(make_wheel: MakeWheel, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "torch", "torch", "2.13.0")
    wheel.write_bytes(wheel.read_bytes().replace(b"built for torch", b"built for what?"))
    with pytest.raises(BuildError, match="failed"):
        wheels.merge({"torch": wheel}, tmp_path / "merged")


def test_what_is_recorded_is_added_to_what_the_build_wrote(
    make_wheel: MakeWheel, tmp_path: Path
) -> None:
    tree = wheels.unpack_wheel(make_wheel(tmp_path, "torch", "2.13.0"), tmp_path / "tree")
    wheels.record(tree, "tensorflow", {"key": "new"})
    content = wheels.read_metadata(tree)
    assert content["pytorch"] == "2.13.0"
    assert content["hvdsync"]["extensions"]["tensorflow"] == {"key": "new"}
    assert content["hvdsync"]["extensions"]["torch"]["key"] == "key-torch"


def test_an_extension_that_cannot_be_loaded_is_an_error(
    make_wheel: MakeWheel, tmp_path: Path
) -> None:
    tree = wheels.unpack_wheel(make_wheel(tmp_path, "torch", "2.13.0"), tmp_path / "tree")
    with pytest.raises(BuildError, match="torch cannot be loaded"):
        wheels.ask_extension(tree, "torch", [])


def test_the_extension_itself_answers_the_questions(make_wheel: MakeWheel, tmp_path: Path) -> None:
    tree = wheels.unpack_wheel(make_wheel(tmp_path, "torch", "2.13.0"), tmp_path / "tree")
    functions = {"mpi_built": False, "gloo_built": True, "nccl_built": 21800}
    functions |= {"ddl_built": False, "ccl_built": False}
    code = "".join(f"def {name}(): return {value}\n" for name, value in functions.items())
    (tree / "horovod/torch/__init__.py").write_text(code)
    assert wheels.ask_extension(tree, "torch", []) == {
        "built": True,
        "built with MPI": False,
        "built with Gloo": True,
        "built with NCCL": True,
        "built with DDL": False,
        "built with CCL": False,
    }
