"""MNIST with one process per GPU, or two on the CPU, that this script spawns itself; about 91 %:
python examples/pytorch_ddp_mnist.py            (--by-hand: the same with PyTorch alone)"""

import argparse
import socket

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import hvdsync.torch as hvd
from hvdsync.data import mnist, to_float


def train(rank, size, port, args):
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.set_num_threads(1)  # processes of one machine share its cores
    torch.manual_seed(0)
    model = torch.nn.Linear(784, 10).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if args.by_hand:
        where = f"tcp://127.0.0.1:{port}"  # rank 0 listens there
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, where, rank=rank, world_size=size)
        model = DistributedDataParallel(model)
    else:
        hvd.init(engine="ddp", rank=rank, size=size, master_address="127.0.0.1", master_port=port)
        model, optimizer = hvd.distribute(model, optimizer)

    data = mnist.load()
    # Each process has its subset: every size-th image, as many for all of them.
    mine = slice(rank, len(data.x_train) // size * size, size)
    images = torch.from_numpy(to_float(data.x_train[mine])).flatten(1)
    labels = torch.from_numpy(data.y_train[mine]).long()
    for epoch in range(args.epochs):
        for batch in torch.randperm(len(images)).split(64)[: args.steps]:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[batch].to(device)), labels[batch].to(device))
            loss.backward()  # when it returns, .grad holds the average over all processes
            optimizer.step()
        print(f"epoch {epoch + 1}, process {rank}: loss {loss.item():.4f}", flush=True)
    if rank == 0:
        plain = model.module if args.by_hand else model  # distribute gives the model itself back
        torch.save(plain.state_dict(), "pytorch-ddp-mnist.pt")
        guesses = plain(torch.from_numpy(to_float(data.x_test)).flatten(1).to(device)).argmax(1)
        print(f"test accuracy {(guesses.cpu().numpy() == data.y_test).mean():.2%}")
    del model  # before the group ends: DDP, holding it longer, may wait for it for ever
    dist.destroy_process_group() if args.by_hand else hvd.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, help="stop an epoch after so many")
    parser.add_argument("--by-hand", action="store_true")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    size = torch.cuda.device_count() or 2
    torch.multiprocessing.spawn(train, (size, port, parser.parse_args()), size)
