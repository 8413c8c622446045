"""MNIST on the actors of a Ray cluster, or of one that is started here for it:
pip install "hvdsync[ray]", then python examples/ray_mnist.py"""

import argparse

import hvdsync
from hvdsync.data import mnist

parser = argparse.ArgumentParser()
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--samples", type=int, default=60_000, help="train on the first so many")
parser.add_argument("--gpus", type=int, default=0, help="for each worker")


def train(arrays, epochs):
    """On each worker: learn from its own part of the arrays; worker 0 gives the model."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import hvdsync.torch as hvd
    from hvdsync.data import to_float

    hvd.init()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)
    x_train, y_train, x_test, y_test = arrays
    dataset = TensorDataset(
        torch.from_numpy(to_float(x_train)).flatten(1), torch.from_numpy(y_train).long()
    )
    loader = DataLoader(dataset, batch_size=64, sampler=hvd.DistributedSampler(dataset))

    model = torch.nn.Sequential(
        torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=hvd.scale_learning_rate(0.001, "sqrt"))
    model, optimizer = hvd.distribute(model, optimizer)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)

    mine = list(hvd.DistributedSampler(len(x_test), shuffle=False, uneven="exact"))
    with torch.no_grad():
        guesses = model(torch.from_numpy(to_float(x_test[mine])).flatten(1).to(device)).argmax(1)
    right = (guesses.cpu().numpy() == y_test[mine]).mean()
    accuracy = hvd.average_metrics({"accuracy": right}, weight=len(mine))["accuracy"]
    return accuracy, model.cpu().state_dict() if hvd.rank() == 0 else None


if __name__ == "__main__":
    args = parser.parse_args()
    data = mnist.load()
    train_size = args.samples
    arrays = (data.x_train[:train_size], data.y_train[:train_size], data.x_test, data.y_test)
    # On the cluster that RAY_ADDRESS names, else on one that is started for it.
    (accuracy, state), *_ = hvdsync.run(
        train, (arrays, args.epochs), np=args.workers, on="ray", gpus_per_rank=args.gpus
    )
    print(f"test accuracy {accuracy:.2%}, {sum(w.numel() for w in state.values()):,} parameters")
