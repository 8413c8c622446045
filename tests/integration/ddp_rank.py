"""A rank of a process group whose last member does what it is told to, at the third step.

ddp_rank.py REASON: "raise" ends that rank, "late" keeps it away for longer than the limit; what the
others then get from the verb that they wait in is printed.
"""

import sys
import threading

import torch

import hvdsync.torch as hvd
from hvdsync.errors import HvdsyncError

reason = sys.argv[1]
hvd.init(engine="ddp", wait_limit=4)
model = torch.nn.Linear(3, 1)
model, optimizer = hvd.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
for step in range(3):
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    if step == 2 and hvd.rank() == hvd.size() - 1:
        if reason == "raise":
            raise ValueError("its own mistake")
        # Until the launcher ends this process, because the others have.
        threading.Event().wait(60)
    try:
        hvd.average_metrics({"step": step})
    except HvdsyncError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(1)
