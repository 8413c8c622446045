"""MNIST with PyTorch, where no worker waits for another: each applies its own updates to shared
parameters at once. horovodrun --mpi -np 2 python examples/pytorch_async_mnist.py"""

import argparse
import time

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hvdsync.torch as hvd
from hvdsync.data import mnist, to_float

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--steps", type=int, help="stop an epoch after so many")
parser.add_argument("--staleness", type=int, help="steps that a worker may be ahead of the slowest")
parser.add_argument("--slow", type=float, default=0, help="seconds that worker 0 sleeps per step")
args = parser.parse_args()

hvd.init()
torch.set_num_threads(1)  # workers of one machine share its cores
torch.manual_seed(0)

data = mnist.load()
train = TensorDataset(
    torch.from_numpy(to_float(data.x_train)).flatten(1),
    torch.from_numpy(data.y_train).long(),
)
loader = DataLoader(train, batch_size=64, sampler=hvd.DistributedSampler(train))

model = torch.nn.Sequential(torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
# The rate of one worker: what all of them do adds up.
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# The one call: from the first step on the parameters are shared, in windows of MPI.
rule = hvd.Asynchronous(staleness=args.staleness)
model, optimizer = hvd.distribute(model, optimizer, update=rule)

for epoch in range(args.epochs):
    started = time.perf_counter()
    for step, (images, labels) in enumerate(loader):
        if step == args.steps:
            break
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()  # pushes what this step changed, and takes what the others have
        time.sleep(args.slow * (hvd.rank() == 0))
    # Each worker at its own pace, until here: now all have the same model.
    print(f"epoch {epoch + 1}: {time.perf_counter() - started:.1f} s", flush=True)
    optimizer.synchronize_replicas()

mine = list(hvd.DistributedSampler(len(data.x_test), shuffle=False, uneven="exact"))
with torch.no_grad():
    guesses = model(torch.from_numpy(to_float(data.x_test[mine])).flatten(1)).argmax(1)
right = (guesses.numpy() == data.y_test[mine]).mean()
accuracy = hvd.average_metrics({"accuracy": right}, weight=len(mine))["accuracy"]
if hvd.rank() == 0:
    print(f"test accuracy {accuracy:.2%}")
