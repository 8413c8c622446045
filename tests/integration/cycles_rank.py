"""Ranks that reduce one small tensor after another: cycles_rank.py FRAMEWORK COUNT.

Rank 0 says how many seconds they took.
"""

import sys
import time

framework, count = sys.argv[1], int(sys.argv[2])
if framework == "torch":
    from torch import ones

    import hvdsync.torch as hvd
else:
    from tensorflow import ones

    import hvdsync.tensorflow as hvd

hvd.init()
hvd.allreduce(ones(1), name="known")
started = time.perf_counter()
for turn in range(count):
    if hvd.rank() == turn % hvd.size():
        time.sleep(0.02)  # each is the last one in turn
    assert float(hvd.allreduce(ones(1), name="known", op=hvd.Sum)[0]) == hvd.size()
if hvd.rank() == 0:
    print(f"took {time.perf_counter() - started}")
