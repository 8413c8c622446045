"""How two sets of named tensors differ: names and shapes in, one line for people out, or None."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_SHOWN = 8


def compare(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str | None:
    """Which tensors of ``expected`` are missing, which are too many, which have another shape."""
    parts = [
        ("missing", (f"{name} {shape}" for name, shape in expected.items() if name not in found)),
        ("not expected", (f"{name} {found[name]}" for name in found if name not in expected)),
        (
            "of another shape",
            (
                f"{name}: found {found[name]}, expected {shape}"
                for name, shape in expected.items()
                if name in found and found[name] != shape
            ),
        ),
    ]
    said = [f"{kind}: {listing}" for kind, names in parts if (listing := _listing(names))]
    return "; ".join(said) or None


def _listing(names: Iterable[str]) -> str:
    all_names = list(names)
    more = f" and {len(all_names) - _SHOWN} more" if len(all_names) > _SHOWN else ""
    return ", ".join(all_names[:_SHOWN]) + more
