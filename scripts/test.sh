#!/usr/bin/env bash
# Runs every suite in turn and stops at the first that fails; needs what scripts/setup.sh test made.
#
#   scripts/test.sh                 all suites
#   scripts/test.sh unit torch-mpi  these only (names as printed)
#   scripts/test.sh faults          each fault in each framework and world; not among "all"
#   scripts/test.sh slurm           jobs on a Slurm of one node (make test-slurm); not among "all"
#
# SLOW=1                            the slowest tests too, as CI runs them: killed, joined and
#                                   resumed runs of every framework, Spark and Ray
# MATRIX=1                          also the combinations whose parts others test, and four ranks
#                                   of every framework: some hours
# PYTEST_ARGS='-k broadcast -x'     more arguments for every pytest
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PWD/.venv/bin:$PATH
asked=("$@")
known=()
read -ra pytest_args <<< "${PYTEST_ARGS:-}"
if [[ -n ${MATRIX:-} ]]; then
    SLOW=1
elif [[ -n ${SLOW:-} ]]; then
    pytest_args+=(-m "not matrix")
else
    pytest_args+=(-m "not matrix and not slow")
fi

# Several ranks share the cores of a small machine: one thread each, and Open MPI must be told that
# this is meant. It also asks whether root, as in a container, is meant.
export OMP_NUM_THREADS=1 TF_CPP_MIN_LOG_LEVEL=3
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
if [[ $(id -u) == 0 ]]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi

suite() { # NAME COMMAND...
    local name=$1 start=$SECONDS
    shift
    known+=("$name")
    if ((${#asked[@]})) && [[ " ${asked[*]} " != *" $name "* ]]; then return; fi
    echo
    echo "== $name: $*"
    if ! "$@"; then
        echo "== $name FAILED after $((SECONDS - start)) s. Again, alone: scripts/test.sh $name" >&2
        exit 1
    fi
    echo "== $name passed in $((SECONDS - start)) s"
}

ranks() { # HOROVODRUN_ARGUMENTS... -- PYTEST_ARGUMENTS...
    # Rank 0's lines look as they do without a launcher; the others' keep their prefix.
    local launcher=()
    while [[ $1 != -- ]]; do launcher+=("$1"); shift; done
    shift
    horovodrun "${launcher[@]}" scripts/pytest_rank.sh "$@" "${pytest_args[@]}" 2>&1 |
        sed -uE 's/^\[0\]<std(out|err)>://; s/^\[1,0\]<std(out|err)>: ?//'
}

# Suites that are left out unless everything is to run, or they are asked for by name.
at_length() { [[ -n ${SLOW:-} ]] || ((${#asked[@]})); }
in_the_matrix() { [[ -n ${MATRIX:-} ]] || ((${#asked[@]})); }

# Packages that nothing else needs, half a gigabyte of them.
clusters() { scripts/add_extras.sh spark ray manifests && one tests/clusters; }

one() { python -m pytest -q "$@" "${pytest_args[@]}"; }

suite unit one tests/unit
suite torch-1 one tests/parallel/torch
suite torch ranks --gloo -np 2 -- tests/parallel/torch
suite torch-ddp ranks --gloo -np 2 -- tests/parallel/ddp
if at_length; then
    suite torch-ddp-4 ranks --gloo -np 4 -- tests/parallel/ddp
    # What does not ask for Horovod's own operations is the same with either engine.
    ENGINE=ddp suite torch-verbs-ddp ranks --gloo -np 2 -- \
        tests/parallel/torch/test_{verbs,state,guard,checkpoint,data,parity,uneven}.py \
        -k "not join_is_refused"
fi
if in_the_matrix; then
    # Checkpoints have one writer among any number of ranks; and who is slow cannot be told where
    # ranks outnumber cores.
    suite torch-4 ranks --gloo -np 4 -- tests/parallel/torch \
        -k "not (test_checkpoint or test_stragglers) or one_rank_writes"
elif at_length; then
    # What two ranks cannot show.
    suite torch-4 ranks --gloo -np 4 -- tests/parallel/torch/test_{parity,guard,probe,verbs,waits,host_memory}.py
fi
# Read whole: a reader that leaves early would break the writer's pipe.
if command -v mpirun >/dev/null && [[ $(horovodrun --check-build) == *'[X] MPI'* ]]; then
    # What travels, and how; the rest is the same whatever carries it.
    torch_mpi=(tests/parallel/torch/test_{parity,verbs,waits,compression,shared_parameters,asynchronous}.py)
    if at_length; then torch_mpi=(tests/parallel/torch); fi
    suite torch-mpi ranks --mpi -np 2 -- "${torch_mpi[@]}"
    suite tensorflow-mpi ranks --mpi -np 2 -- tests/parallel/tensorflow/test_asynchronous.py
    for backend in tensorflow torch; do
        KERAS_BACKEND=$backend suite "keras-$backend-mpi" ranks --mpi -np 2 -- tests/parallel/keras/test_asynchronous.py
    done
    if at_length; then
        suite torch-mpi-4 ranks --mpi -np 4 -- tests/parallel/torch/test_{shared_parameters,asynchronous}.py
    fi
else
    echo "== those over MPI left out: Horovod was built without MPI, or there is no mpirun"
fi
suite tensorflow-1 one tests/parallel/tensorflow/test_parity.py
suite tensorflow ranks --gloo -np 2 -- tests/parallel/tensorflow
if in_the_matrix; then
    suite tensorflow-4 ranks --gloo -np 4 -- tests/parallel/tensorflow/test_parity.py -k "not eager"
fi
KERAS_BACKEND=tensorflow suite keras-tensorflow-1 one tests/parallel/keras/test_parity.py
KERAS_BACKEND=tensorflow suite keras-tensorflow ranks --gloo -np 2 -- tests/parallel/keras
KERAS_BACKEND=torch suite keras-torch-1 one tests/parallel/keras/test_parity.py
# Callbacks, data and saving are Keras's own, and the same on both backends.
keras_torch=(tests/parallel/keras/test_{parity,optimizer,nonfinite,checkpoint,mismatch}.py)
if at_length; then keras_torch+=(tests/parallel/keras/test_{guard,compression,update_rules,probe}.py); fi
if [[ -n ${MATRIX:-} ]]; then keras_torch=(tests/parallel/keras); fi
KERAS_BACKEND=torch suite keras-torch ranks --gloo -np 2 -- "${keras_torch[@]}"
if in_the_matrix; then
    KERAS_BACKEND=tensorflow suite keras-tensorflow-4 ranks --gloo -np 4 -- tests/parallel/keras/test_parity.py
    KERAS_BACKEND=torch suite keras-torch-4 ranks --gloo -np 4 -- tests/parallel/keras/test_parity.py
fi
suite integration one tests/integration
# Spark, Ray and what checks manifests are half a gigabyte to download.
if at_length; then
    suite clusters clusters
fi
if [[ " ${asked[*]} " == *" slurm "* ]]; then
    suite slurm one tests/slurm
fi
if [[ " ${asked[*]} " == *" faults "* ]]; then
    suite faults python -m pytest -q tests/integration/test_faults.py
fi

for name in "${asked[@]}"; do
    if [[ " ${known[*]} " != *" $name "* ]]; then
        echo "no suite is named $name; there are: ${known[*]}" >&2
        exit 2
    fi
done
