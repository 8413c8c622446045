"""One seed of a run in, another for each rank out: noise that differs between ranks and repeats."""

from __future__ import annotations

import numpy as np

from hvdsync.data.sampler import whole


def rank_seed(seed: int, rank: int | None = None, *, step: int = 0) -> int:
    """The seed of this rank's own noise (augmentation, dropout): 0..2**31-1.

    Different on every rank of a run, and the same in each run with the same ``seed``. It suits
    ``random.seed``, ``numpy.random.seed``, ``torch.manual_seed``, ``tf.random.set_seed`` and
    ``keras.random.SeedGenerator``. ``rank`` is by default this process's; ``step`` gives other
    noise to a run that begins anew in the middle. Nothing travels. Noise that must not change with
    the number of ranks is better drawn per sample, from the sample's index.
    """
    if rank is None:
        from hvdsync.comm import verbs

        rank = verbs.rank()
    key = (whole("step", step),) if step else ()
    first = np.random.SeedSequence(whole("seed", seed), spawn_key=key).generate_state(1)[0]
    return (int(first) + whole("rank", rank)) % 2**31
