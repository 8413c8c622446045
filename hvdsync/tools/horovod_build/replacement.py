"""Exact replacements of text in a source tree.

In: an unpacked source tree and replacements. Out: the same tree, mended, or an error that names
the file whose text is not what was expected.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hvdsync.errors import BuildError


@dataclass(frozen=True)
class Replacement:
    """Put ``new`` in the place of ``old``, which ``file`` must hold exactly ``count`` times."""

    file: str
    old: str
    new: str
    why: str
    count: int = 1


def source(name: str) -> str:
    """C++ that replacements bring, kept in files of its own."""
    return (Path(__file__).parent / "sources" / name).read_text(encoding="utf-8")


def patch_level(replacements: Iterable[Replacement]) -> str:
    """Eight hexadecimal digits that change when any replacement changes."""
    digest = hashlib.sha256()
    for item in replacements:
        digest.update(repr((item.file, item.old, item.new, item.count)).encode())
    return digest.hexdigest()[:8]


def apply(tree: Path, replacements: Iterable[Replacement]) -> None:
    """Apply the replacements to the source tree, all or none.

    Raises :class:`BuildError` naming the file when it is missing, or holds a text another number
    of times than expected; then no file has been changed.
    """
    texts: dict[Path, str] = {}
    for item in replacements:
        path = tree / item.file
        if path not in texts:
            try:
                texts[path] = path.read_text(encoding="utf-8")
            except FileNotFoundError:
                raise BuildError(f"{item.file} is not in the source tree {tree}.") from None
        found = texts[path].count(item.old)
        if found != item.count:
            raise BuildError(
                f"{item.file}: found {found} times, expected {item.count}: {item.old.strip()!r}. "
                f"This replacement is needed because {item.why}. The source is not the one that "
                f"hvdsync was made for."
            )
        texts[path] = texts[path].replace(item.old, item.new)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
