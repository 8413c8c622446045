"""MNIST out of a Spark DataFrame, trained by tasks of a Spark job and scored as a DataFrame:
pip install "hvdsync[spark]", then python examples/spark_mnist.py"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.functions import udf

import hvdsync
from hvdsync.data import mnist

parser = argparse.ArgumentParser()
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--samples", type=int, default=60_000, help="train on the first so many")
parser.add_argument("--parquet", help="a folder that all workers see; the default is of this host")


def network():
    import torch

    return torch.nn.Sequential(torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))


def images(rows):
    """Images as bytes, as PyTorch takes them."""
    import torch

    pixels = np.frombuffer(b"".join(rows), np.uint8).reshape(-1, 784)
    return torch.from_numpy(pixels.astype(np.float32) / 255)


def train(folder, epochs):
    """On each worker: learn from its own part of the files; worker 0 gives the model back."""
    import pyarrow.parquet
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import hvdsync.torch as hvd
    from hvdsync.data import shard_files

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(hvd.rank())
    files = shard_files(list(Path(folder).glob("part-*.parquet")), shuffle=False)
    table = pa.concat_tables(pyarrow.parquet.read_table(file) for file in files)
    labels = torch.from_numpy(table["label"].to_numpy().copy())
    loader = DataLoader(
        TensorDataset(images(table["image"].to_pylist()), labels), batch_size=64, shuffle=True
    )

    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=hvd.scale_learning_rate(0.001, "sqrt"))
    model, optimizer = hvd.distribute(model, optimizer)
    for epoch in range(epochs):
        # Partitions need not be equal: all workers end an epoch after the same step.
        for x, y in hvd.even_batches(loader):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)
    return model.state_dict() if hvd.rank() == 0 else None


def scorer(state):
    """A function of a column for Spark's tasks, which need neither hvdsync nor Horovod."""
    models = []

    def guess(image):
        import torch

        if not models:  # once in each task
            models.append(network())
            models[0].load_state_dict(state)
        with torch.no_grad():
            return int(models[0](images([image])).argmax())

    return udf(guess, "long")


def frame(spark, pixels, labels):
    rows = {"image": [image.tobytes() for image in pixels], "label": labels.astype(np.int64)}
    return spark.createDataFrame(pa.table(rows))


if __name__ == "__main__":
    args = parser.parse_args()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # of Spark's tasks
    # spark-submit may have named another master.
    spark = SparkSession.builder.config("spark.master", f"local[{args.workers}]").getOrCreate()
    data = mnist.load()
    with tempfile.TemporaryDirectory() as temporary:
        folder = f"{args.parquet or temporary}/mnist"
        pictures = frame(spark, data.x_train[: args.samples], data.y_train[: args.samples])
        pictures.repartition(args.workers).write.parquet(folder, mode="overwrite")
        # One task of Spark for each worker; the list has what each of them returned.
        state, *_ = hvdsync.run(train, (folder, args.epochs), np=args.workers, on="spark")

    test = frame(spark, data.x_test, data.y_test)
    scored = test.withColumn("guess", scorer(state)("image")).select("label", "guess").cache()
    right = scored.where("label = guess").count()
    scored.where("label != guess").groupBy("label", "guess").count().orderBy(
        "count", ascending=False
    ).show(3)
    print(f"test accuracy {right / scored.count():.2%}")
    spark.stop()
