"""One rank has nobody to differ from: nothing is read. The room imports no framework."""

import subprocess
import sys

from hvdsync.guard import replicas
from hvdsync.guard.guard import Guard


def never():
    raise AssertionError("one rank has nothing to compare")


def test_with_one_rank_nothing_is_read():
    assert replicas.compare(never) is None
    replicas.check(never)


def test_with_one_rank_a_guard_reads_nothing_and_repairs_nothing():
    guard = Guard(every=1, on_divergence="repair")
    assert guard._check(never, never) is False
    assert guard.repairs == 0


def test_ranks_are_listed_as_a_sentence_has_them():
    assert replicas.listed([2]) == "rank 2"
    assert replicas.listed([0, 1, 3]) == "ranks 0, 1, 3"


def test_importing_the_room_imports_no_framework():
    code = (
        "import sys, hvdsync.guard.guard, hvdsync.guard.replicas, hvdsync.guard.keras_state;"
        "sys.exit(', '.join(sys.modules.keys() & {'torch', 'tensorflow', 'keras', 'horovod'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == ""
