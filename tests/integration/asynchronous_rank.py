"""A rank that trains asynchronously beside one that ends: early and well, or by an error."""

import sys

import torch

import hvdsync.torch as hvd

hvd.init()
model = torch.nn.Linear(200, 200, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
model, optimizer = hvd.distribute(model, optimizer, update=hvd.Asynchronous())


def train(steps):
    for _ in range(steps):
        model.weight.grad = torch.full_like(model.weight, -1.0)
        optimizer.step()


train(5)
if hvd.rank() == 1:
    if sys.argv[1] == "raise":
        raise KeyError("the cause")
    print("ends early", flush=True)
else:
    train(300 if sys.argv[1] == "end" else 10**9)
    print(f"moved by {model.weight.max().item():g}", flush=True)
