"""The Keras front door: ``import hvdsync.keras as hvd`` in place of ``horovod.keras`` and
``horovod.tensorflow.keras``.

Runs on Keras's TensorFlow and PyTorch backends, whichever ``keras.backend.backend()`` names.
"""

from hvdsync.checkpoint.preemption import Preemption
from hvdsync.comm.verbs import *
from hvdsync.data.sampler import DistributedSampler
from hvdsync.data.tf_dataset import shard
from hvdsync.guard.stragglers import Stragglers
from hvdsync.keras import callbacks, elastic
from hvdsync.keras._backend import backend as _backend
from hvdsync.keras.checkpoint import Checkpoint, RandomState
from hvdsync.keras.functions import (
    allgather,
    allgather_object,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_object,
    broadcast_variables,
    load_model,
    reducescatter,
)
from hvdsync.keras.guard import Guard, check_replicas
from hvdsync.keras.optimizer import (
    DistributedOptimizer,
    PartialDistributedOptimizer,
    distribute,
)
from hvdsync.keras.probe import CorruptionProbe
from hvdsync.keras.runtime import init, shutdown
from hvdsync.keras.sync_batch_norm import SyncBatchNormalization
from hvdsync.keras.uneven import even_batches
from hvdsync.sync.compression.memory import ErrorFeedback
from hvdsync.sync.schedule import scale_learning_rate, warmup
from hvdsync.sync.update_rules import Asynchronous, DiLoCo, LocalSGD, Synchronous

_hvd = _backend.hvd

Compression = _backend.Compression
Adasum = _hvd.Adasum
Average = _hvd.Average
Max = _hvd.Max
Min = _hvd.Min
Product = _hvd.Product
Sum = _hvd.Sum
ProcessSet = _hvd.ProcessSet
add_process_set = _hvd.add_process_set
ccl_built = _hvd.ccl_built
cuda_built = _hvd.cuda_built
ddl_built = _hvd.ddl_built
global_process_set = _hvd.global_process_set
gloo_built = _hvd.gloo_built
gloo_enabled = _hvd.gloo_enabled
is_initialized = _hvd.is_initialized
mpi_built = _hvd.mpi_built
mpi_enabled = _hvd.mpi_enabled
mpi_threads_supported = _hvd.mpi_threads_supported
nccl_built = _hvd.nccl_built
remove_process_set = _hvd.remove_process_set
rocm_built = _hvd.rocm_built
start_timeline = _hvd.start_timeline
stop_timeline = _hvd.stop_timeline
