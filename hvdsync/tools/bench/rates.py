"""Link rates as people write them: text in, bits per second out, and back."""

from __future__ import annotations

import re

LOOPBACK = "loopback"
_FORM = re.compile(r"(?P<number>\d+(\.\d+)?) ?(?P<unit>[kKMGT]?)(bit)?(/s|ps)?")
_UNITS = {"": 1e0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def parse(text: str) -> float | None:
    """Bits per second of ``"100Mbit"``, ``"25 Gbit/s"`` or ``"1G"``; None for ``"loopback"``.

    Raises ``ValueError`` for other text and for a rate of 0.
    """
    if text.strip() == LOOPBACK:
        return None
    match = _FORM.fullmatch(text.strip())
    rate = float(match["number"]) * _UNITS[match["unit"]] if match else 0.0
    if not rate:
        raise ValueError(
            f"link is {text!r}; expected a rate such as 100Mbit or 25Gbit, or loopback"
        )
    return rate


def name(rate: float | None) -> str:
    """A rate in bits per second as people write it, None as ``"loopback"``."""
    if rate is None:
        return LOOPBACK
    for unit in ("T", "G", "M", "k"):
        if rate >= _UNITS[unit]:
            return f"{rate / _UNITS[unit]:g} {unit}bit/s"
    return f"{rate:g} bit/s"
