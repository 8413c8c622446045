"""Steps that ranks take alone, counted alike on all of them: a count in, nothing or an error out.

Framework-free; asked at each meeting of replicas.
"""

from __future__ import annotations

import numpy as np

from hvdsync.comm import verbs, world
from hvdsync.errors import RankMismatch


def refuse_different_steps(steps: int) -> None:
    """Raise :class:`RankMismatch` on every rank unless all have taken as many steps.

    On the wire: one all-gather of 8 bytes a rank.
    """
    comm = world.current()
    everyone = comm.allgather(np.array([steps], np.int64), "hvdsync.local_steps").tolist()
    if len(set(everyone)) == 1:
        return
    counts = ", ".join(f"rank {rank}: {count:,}" for rank, count in enumerate(everyone))
    raise RankMismatch(
        f"rank {verbs.rank()} of {verbs.size()}: ranks synchronise their replicas after different "
        f"numbers of optimizer steps ({counts}); expected the same on every rank. Take as many "
        "steps everywhere, as hvd.even_batches does. A GradScaler leaves out steps of one rank; "
        "bfloat16 needs none"
    )
