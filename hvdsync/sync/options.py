"""Options that the front doors share: a user's arguments go in, checked ones or an error come out.

Horovod's wrappers of gradients take the same ones in every framework; so does ``distribute``.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from hvdsync.sync.compression import CastCompressor, NoneCompressor, describe
from hvdsync.sync.compression.exchange import BucketCompressor
from hvdsync.sync.compression.topk import TopK
from hvdsync.sync.update_rules import Asynchronous, DiLoCo, LocalRule, LocalSGD, Synchronous


def check_gradient_options(
    *,
    averages: bool,
    predivide: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    passes: int = 1,
) -> int | Sequence[Sequence[Any]] | None:
    """``groups``, with Horovod's older ``num_groups`` taken into account.

    ``averages`` says whether the reduction is an average. Called by the function that the user
    calls. Raises ``ValueError`` for options out of range or that do not go together.
    """
    if predivide != 1.0 and not averages:
        raise ValueError(
            f"gradient_predivide_factor is {predivide}; it splits an average, so it needs "
            "op=Average"
        )
    if num_groups:
        warnings.warn("num_groups is now called groups", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if isinstance(groups, int) and groups < 1:
        raise ValueError(
            f"groups is {groups}; expected a positive integer, or lists of what travels together"
        )
    if passes < 1:
        raise ValueError(f"backward_passes_per_step is {passes}; expected 1 or more")
    return groups


def check_compression(
    compression: Any,
    *,
    engine: str = "horovod",
    adds: bool = True,
    elastic: bool = False,
    momentum: float = 0.0,
) -> None:
    """Raise ``ValueError`` for a compressor that makes no sense with the rest, with the reason.

    ``adds`` says whether the reduction is a sum or an average, ``elastic`` whether ranks may come
    and go; ``momentum`` is the optimizer's.
    """
    if not isinstance(compression, BucketCompressor):
        return
    name = describe(compression)
    if not adds and name != "float16":
        raise ValueError(
            f"compression is {name}, which adds up what ranks send, but op is another reduction: "
            "Adasum, for one, weighs each rank's whole gradients. Give op=Average or Sum, or "
            "Compression.none or .fp16"
        )
    if not compression.keeps_error:
        return
    if engine == "ddp":
        raise ValueError(
            f"compression is {name}, which remembers what it did not send of each tensor; "
            "engine='ddp' has buckets of its own, where only none, fp16 and bf16 fit. Give "
            "engine='horovod'"
        )
    if elastic:
        raise ValueError(
            f"compression is {name}, which remembers what it did not send; in an elastic job that "
            "is lost with a worker, and no commit goes back to it. Give none, fp16 or bf16"
        )
    if isinstance(compression, TopK) and compression.momentum and momentum:
        raise ValueError(
            f"compression is {name} and the optimizer has momentum {momentum} too: it would count "
            "twice. Give the optimizer none, or topk none"
        )


def momentum_of(optimizer: Any) -> float:
    """The momentum of an optimizer of any framework; the largest, if its groups differ."""
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        return float(getattr(optimizer, "momentum", 0.0) or 0.0)
    return max((float(group.get("momentum", 0.0)) for group in groups), default=0.0)


def option_facts(optimizer: Any, **options: Any) -> dict[str, Any]:
    """What ranks must have in common of an optimizer and its options, by name.

    For :func:`hvdsync.comm.comparison.require_equal`: lists count by their length, and objects
    that say nothing of themselves by their class.
    """
    facts: dict[str, Any] = {"class": type(optimizer).__name__}
    for name, value in options.items():
        if value is None or isinstance(value, bool | int | float | str):
            facts[name] = value
        elif isinstance(value, Sequence):
            facts[name] = f"{len(value)} of them"
        else:
            facts[name] = describe(value)
    return facts


def check_engine(engine: str, *, offered: Sequence[str] = ("horovod",)) -> None:
    """Raise ``ValueError`` for an engine that a front door's ``distribute`` does not offer."""
    if engine not in offered:
        listed = " or ".join(map(repr, offered))
        reason = "; DistributedDataParallel is PyTorch's own" if engine == "ddp" else ""
        raise ValueError(f"distribute: engine is {engine!r}; expected {listed}{reason}")


def check_combination(
    update: Any,
    *,
    engine: str = "horovod",
    compression: Any = NoneCompressor,
    averages: bool = True,
    everyone: bool = True,
    elastic: bool = False,
) -> LocalRule | Asynchronous | None:
    """``update`` if each rank takes steps alone by it; None where gradients are averaged.

    ``averages`` says whether the reduction is an average, ``everyone`` whether it is over all
    ranks, ``elastic`` whether ranks may come and go. Raises ``ValueError``, with the reason, for a
    combination that makes no sense.
    """
    if update is None or isinstance(update, Synchronous):
        return None
    if not isinstance(update, LocalRule | Asynchronous):
        raise ValueError(
            f"update is {update!r}; expected None, Synchronous(), LocalSGD(period), "
            "DiLoCo(period) or Asynchronous()"
        )
    name = type(update).__name__
    if engine == "ddp":
        raise ValueError(
            f"update={name} with engine='ddp': DistributedDataParallel averages gradients in every "
            "backward pass, which is what such a rule spares; use engine='horovod'"
        )
    if not averages:
        reason = (
            "gradients are not reduced at all"
            if isinstance(update, Asynchronous)
            else "the parameters of ranks that train alone have a mean and no sum"
        )
        raise ValueError(f"update={name} with an op that is no average: {reason}; use op=Average")
    if not everyone:
        raise ValueError(
            f"update={name} with a process set: replicas meet over all ranks; use the global one"
        )
    if elastic:
        raise ValueError(
            f"update={name} in an elastic job: a rank that is lost between two meetings takes its "
            "steps with it; use update=Synchronous(), or a fixed number of ranks"
        )
    if isinstance(update, Asynchronous) and compression is not NoneCompressor:
        raise ValueError(
            f"update=Asynchronous with compression={describe(compression)}: what steps changed in "
            "the parameters travels, and nothing of it may be lost; use Compression.none"
        )
    if isinstance(update, LocalSGD) and compression is not NoneCompressor:
        raise ValueError(
            f"update=LocalSGD with compression={describe(compression)}: parameters themselves "
            "travel, and what a step changed in them would be rounded away; use DiLoCo, which "
            "sends differences, or Compression.none"
        )
    if isinstance(update, DiLoCo) and not (
        compression is NoneCompressor or isinstance(compression, CastCompressor)
    ):
        raise ValueError(
            f"update=DiLoCo with compression={describe(compression)}: its error feedback is that "
            "of the gradients of each step, and between meetings none travel; use "
            "Compression.fp16, .bf16 or .none"
        )
    return update
