"""What must be equal on all ranks: named facts of this rank in, nothing or ``RankMismatch`` out.

Asked before ranks depend on it, so that a difference is an error at once and not a hang later.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import numpy as np

from hvdsync import __version__
from hvdsync.comm import verbs, world
from hvdsync.errors import RankMismatch

_DIGEST_BYTES = 16
_LONGEST = 200
_MOST_NOTED = 64

_noted: dict[str, list[str]] = {}


def require_equal(
    subject: str,
    facts: Mapping[str, Any],
    advice: str,
    *,
    labels: Mapping[str, str] | None = None,
    group: Any = None,
) -> None:
    """Raise :class:`RankMismatch` on every rank unless all ranks give the same facts.

    Arguments:
        subject: what the facts are of, as the error has it ("the optimizers").
        facts: values by name, compared as the error shows them (their ``repr``). The first that
            differs, in the order given, is reported with the values of all ranks.
        advice: what to do, as the error's last words.
        labels: this rank's words for some of the facts, shown before their values; not compared.
        group: the ranks that take part, as in ``Communicator``; all call this.

    On the wire: one all-gather of 16 bytes a rank; only when facts differ they follow, pickled.
    """
    if world.current().size == 1:
        return
    table = {name: v if isinstance(v, str) else repr(v) for name, v in facts.items()}
    digest = hashlib.blake2b(repr(table).encode(), digest_size=_DIGEST_BYTES).digest()
    everyone = world.current().allgather(
        np.frombuffer(digest, np.uint8), "hvdsync.comparison.digest", group
    )
    everyone = everyone.reshape(-1, _DIGEST_BYTES)
    if (everyone == everyone[0]).all():
        return
    mine = (verbs.rank(), table, dict(labels or {}))
    found = _describe(verbs.allgather_object(mine, "hvdsync.comparison.facts", group))
    raise RankMismatch(
        f"rank {verbs.rank()} of {verbs.size()}: {subject} differ between ranks in {found}; "
        f"expected the same on every rank. {advice}"
    )


_Table = tuple[int, dict[str, str], dict[str, str]]


def _describe(tables: Sequence[_Table]) -> str:
    """The first fact that differs among (rank, values, labels), and what each rank has."""
    names = list(dict.fromkeys(name for _, values, _ in tables for name in values))
    unequal = [name for name in names if len({values.get(name) for _, values, _ in tables}) > 1]
    if not unequal:
        return "their order"
    first = unequal[0]
    ranks_of: dict[str, list[int]] = {}
    for rank, facts, labels in tables:
        value = f"{labels.get(first, '')} {facts.get(first, 'none')}".strip()
        shown = value if len(value) <= _LONGEST else value[:_LONGEST] + "..."
        ranks_of.setdefault(shown, []).append(rank)
    values = "; ".join(f"{listed(ranks)}: {value}" for value, ranks in ranks_of.items())
    others = f" (and {len(unequal) - 1} more)" if len(unequal) > 1 else ""
    return f"{first}{others}: {values}"


def listed(ranks: Sequence[int]) -> str:
    """Ranks as a sentence has them."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def installation(framework: str) -> str:
    """The versions that ranks must share; ``framework`` is ``torch`` or ``tensorflow``."""
    versions = {"Python": ".".join(platform.python_version_tuple()[:2]), "hvdsync": __version__}
    for package in (framework, "keras", "horovod"):
        for name in (package, f"{package}-cpu"):
            try:
                # Without the part behind "+", which tells builds for CPU and GPU apart.
                versions[package] = metadata.version(name).split("+")[0]
            except metadata.PackageNotFoundError:
                continue
            break
    return ", ".join(f"{package} {version}" for package, version in versions.items())


def note(fact: str, value: Any) -> None:
    """Keep a fact of this rank for the next comparison that takes :func:`noted` facts in.

    For objects that are made without a collective of their own, such as samplers. Values that
    were noted before are kept once.
    """
    values = _noted.setdefault(fact, [])
    if str(value) not in values and len(values) < _MOST_NOTED:
        values.append(str(value))


def noted() -> dict[str, str]:
    """What was noted since the last call, by name."""
    facts = {fact: ", ".join(values) for fact, values in _noted.items()}
    _noted.clear()
    return facts
