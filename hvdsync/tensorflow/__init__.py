"""The TensorFlow front door: ``import hvdsync.tensorflow as hvd``, not ``horovod.tensorflow``.

Horovod's names, mended for today's TensorFlow and Keras 3, and the verbs of all front doors.
"""

from hvdsync.comm import horovod as _horovod

_hvd = _horovod.load("tensorflow")

from horovod.tensorflow import (  # noqa: E402
    Adasum,
    Average,
    LocalGradientAggregationHelper,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    _executing_eagerly,  # not public, but scripts and Horovod's own tests ask it
    add_process_set,
    broadcast_global_variables,
    broadcast_object_fn,
    ccl_built,
    check_extension,
    check_num_rank_power_of_2,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    gpu_available,
    handle_average_backwards_compatibility,
    is_initialized,
    local_rank_op,
    local_size_op,
    mpi_built,
    mpi_enabled,
    mpi_ops,
    mpi_threads_supported,
    nccl_built,
    process_set_included_op,
    rank_op,
    refs_to_vars,
    remove_process_set,
    rocm_built,
    size_op,
    split_list,
    start_timeline,
    stop_timeline,
    util,
    vars_to_refs,
)

from hvdsync.checkpoint.preemption import Preemption  # noqa: E402
from hvdsync.comm.verbs import *  # noqa: E402
from hvdsync.data.sampler import DistributedSampler  # noqa: E402
from hvdsync.data.tf_dataset import shard  # noqa: E402
from hvdsync.guard.stragglers import Stragglers  # noqa: E402
from hvdsync.sync.compression.memory import ErrorFeedback  # noqa: E402
from hvdsync.sync.schedule import scale_learning_rate, warmup  # noqa: E402
from hvdsync.sync.update_rules import Asynchronous, DiLoCo, LocalSGD, Synchronous  # noqa: E402
from hvdsync.tensorflow import elastic  # noqa: E402
from hvdsync.tensorflow.checkpoint import Checkpoint, RandomState  # noqa: E402
from hvdsync.tensorflow.collectives import (  # noqa: E402
    allgather,
    allreduce,
    alltoall,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    reducescatter,
)
from hvdsync.tensorflow.compression import Compression  # noqa: E402
from hvdsync.tensorflow.functions import (  # noqa: E402
    allgather_object,
    broadcast_object,
    broadcast_variables,
)
from hvdsync.tensorflow.guard import Guard, check_replicas  # noqa: E402
from hvdsync.tensorflow.optimizer import DistributedOptimizer, distribute  # noqa: E402
from hvdsync.tensorflow.probe import CorruptionProbe  # noqa: E402
from hvdsync.tensorflow.runtime import (  # noqa: E402
    init,
    is_homogeneous,
    shutdown,
)
from hvdsync.tensorflow.sync_batch_norm import SyncBatchNormalization  # noqa: E402
from hvdsync.tensorflow.tape import (  # noqa: E402
    DistributedGradientTape,
    PartialDistributedGradientTape,
)
from hvdsync.tensorflow.uneven import even_batches  # noqa: E402
