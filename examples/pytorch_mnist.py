"""MNIST with PyTorch on several workers, to about 97 % test accuracy:
horovodrun -np 2 python examples/pytorch_mnist.py"""

import argparse

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hvdsync.torch as hvd
from hvdsync.data import mnist, to_float

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--steps", type=int, help="stop an epoch after so many")
args = parser.parse_args()

hvd.init()
torch.set_num_threads(1)  # workers of one machine share its cores
torch.manual_seed(0)

data = mnist.load()
train = TensorDataset(
    torch.from_numpy(to_float(data.x_train)).flatten(1),
    torch.from_numpy(data.y_train).long(),
)
# Each worker reads its own part of every epoch, in a new order each time.
loader = DataLoader(train, batch_size=64, sampler=hvd.DistributedSampler(train))

model = torch.nn.Sequential(torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
# Workers together take a batch that is size() times as large: the step may be larger too.
optimizer = torch.optim.Adam(model.parameters(), lr=hvd.scale_learning_rate(0.001, "sqrt"))
# The one call: equal replicas from now on, and gradients averaged over the workers.
model, optimizer = hvd.distribute(model, optimizer)
# Worker 0 alone writes; plain torch.load opens the model.pt in the folder of each step.
checkpoint = hvd.Checkpoint("checkpoints/pytorch-mnist")

for epoch in range(args.epochs):
    for step, (images, labels) in enumerate(loader):
        if step == args.steps:
            break
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    checkpoint.save(epoch + 1, model=model, optimizer=optimizer)
    if hvd.rank() == 0:  # one worker speaks for all
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)

# "exact": each of the 10,000 test images is counted by one worker, whatever their number.
mine = list(hvd.DistributedSampler(len(data.x_test), shuffle=False, uneven="exact"))
with torch.no_grad():
    guesses = model(torch.from_numpy(to_float(data.x_test[mine])).flatten(1)).argmax(1)
right = (guesses.numpy() == data.y_test[mine]).mean()
accuracy = hvd.average_metrics({"accuracy": right}, weight=len(mine))["accuracy"]
if hvd.rank() == 0:
    print(f"test accuracy {accuracy:.2%}")
