"""``python -m hvdsync.train``, and then: are the weights of all ranks the same, bit for bit?"""

import hashlib

from hvdsync.comm import verbs
from hvdsync.train import loop
from hvdsync.train.cli import main

train = loop.Loop.run


def fingerprint(model):
    if hasattr(model, "get_weights"):
        arrays = model.get_weights()
    else:
        arrays = [tensor.numpy() for tensor in model.state_dict().values()]
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def train_and_compare(self):
    summary = train(self)
    everyone = verbs.allgather_object(fingerprint(self._worker.model))
    if verbs.rank() == 0:
        print(f"{len(everyone)} ranks hold {len(set(everyone))} different model(s)", flush=True)
    return summary


loop.Loop.run = train_and_compare
main()
