"""The few exact replacements that let Horovod 0.28.1 build and run with today's frameworks.

In: what Horovod is built for. Out: the replacements for that build.
"""

from __future__ import annotations

from packaging.version import Version

from hvdsync.tools.horovod_build.replacement import Replacement
from hvdsync.tools.horovod_build.reporting import EXPLAINING, LAUNCHING, SPEAKING
from hvdsync.tools.horovod_build.waiting import WAITING

#: Keys in ``metadata.json`` under which the answers to the launcher's questions are kept.
RECORD = "hvdsync"
#: Horovod's words for its questions, and the function of the extension that answers.
QUESTIONS = {
    "built with MPI": "mpi_built",
    "built with Gloo": "gloo_built",
    "built with NCCL": "nccl_built",
    "built with DDL": "ddl_built",
    "built with CCL": "ccl_built",
}

_RECORDED_ANSWERS = """\
    answered, answer = _recorded_answer(ext_base_name, fn_desc)
    if answered:
        if verbose:
            print('Extension {} {} {} (recorded when it was built).'.format(
                ext_base_name, 'was' if answer else 'was NOT', fn_desc))
        return answer

    def _target_fn(ext_base_name, fn, fn_desc, queue, verbose):
"""

_RECORD_READER = '''\
def _recorded_answer(ext_base_name, fn_desc):
    """(True, answer) when the build recorded it in metadata.json, else (False, None)."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = os.path.join(package, 'metadata.json')
    try:
        with open(path) as f:
            extensions = json.load(f)['hvdsync']['extensions']
        if ext_base_name not in extensions:
            # An extension that nobody built answers as one that cannot be imported.
            return fn_desc.startswith('built'), None
        return True, extensions[ext_base_name]['answers'][fn_desc]
    except (OSError, ValueError, KeyError, TypeError):
        return False, None


def _check_extension_lambda(ext_base_name, fn, fn_desc, verbose):
'''

_IF_VECTORS = "#if defined(__AVX__) && defined(__F16C__)\n"
_HALVES = (
    "Gloo adds halves one by one, in software, so that an all-reduce of them takes longer than one "
    "of float32; it has the processor's instructions for eight at a time in a file that is not "
    "built"
)

#: Applied to every build.
ALWAYS = (
    *SPEAKING,
    *LAUNCHING,
    *EXPLAINING,
    *WAITING,
    Replacement(
        "CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        "set(CMAKE_CXX_STANDARD 17)",
        why="the headers of today's PyTorch and TensorFlow are C++17 at least",
    ),
    Replacement(
        "third_party/gloo/gloo/CMakeLists.txt",
        '  "${CMAKE_CURRENT_SOURCE_DIR}/types.cc"\n',
        '  "${CMAKE_CURRENT_SOURCE_DIR}/math.cc"\n  "${CMAKE_CURRENT_SOURCE_DIR}/types.cc"\n',
        why=_HALVES,
    ),
    Replacement(
        "third_party/gloo/gloo/math.cc", "#if GLOO_USE_AVX\n", _IF_VECTORS, why=_HALVES, count=2
    ),
    Replacement("third_party/gloo/gloo/math.h", "#if GLOO_USE_AVX\n", _IF_VECTORS, why=_HALVES),
    Replacement(
        "horovod/torch/CMakeLists.txt",
        "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        "import sysconfig; print(sysconfig.get_path('include'))",
        why="Python 3.12 has no distutils",
    ),
    Replacement(
        "horovod/runner/js_run.py",
        "from distutils.spawn import find_executable",
        "from shutil import which as find_executable",
        why="Python 3.12 has no distutils, and horovodrun always imports this file",
    ),
    Replacement(
        "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        "",
        why="it includes a header that TensorFlow's package no longer brings; all it holds is the "
        "optional XLA path of GPUs",
    ),
    Replacement(
        "horovod/common/ops/cuda/CMakeLists.txt",
        "set(CMAKE_CUDA_STANDARD 11)",
        "set(CMAKE_CUDA_STANDARD 17)",
        why="the headers of CUDA 13 need C++17",
    ),
    Replacement(
        "setup.py",
        "else 'RelWithDebInfo'",
        "else 'Release'",
        why="without debug information the build takes two thirds of the time and a twentieth of "
        "the space",
    ),
    Replacement(
        "setup.py",
        "'-DPYTHON_EXECUTABLE:FILEPATH=' + sys.executable]\n",
        "'-DPYTHON_EXECUTABLE:FILEPATH=' + sys.executable]\n"
        "        cmake_args += os.environ.get('HVDSYNC_CMAKE_ARGS', '').splitlines()\n",
        why="setup.py has no other way to hand options to CMake: run paths that are relative, so "
        "that a cached wheel serves another environment, and no search for a CUDA not wanted",
    ),
    Replacement(
        "setup.py",
        "cmake_build_args = ['--config', config]\n",
        "cmake_build_args = ['--config', config]\n"
        "        cmake_build_args += os.environ.get('HVDSYNC_CMAKE_BUILD_ARGS', '').splitlines()\n",
        why="only the extension's own target is built, not the second copy of Gloo (and of the "
        "CUDA kernels) for an ABI that is not used",
    ),
    Replacement(
        "horovod/runner/mpi_run.py",
        "_OMPI_FLAGS = ['-mca pml ob1', '-mca btl ^openib']\n",
        "_OMPI_FLAGS = ['--mca pml ob1', '--mca btl ^openib']\n"
        "if 'OMPI_MCA_mpi_yield_when_idle' not in os.environ:\n"
        "    _OMPI_FLAGS.append('--mca mpi_yield_when_idle 1')\n",
        why="Open MPI 5 reads long options with two dashes only, Open MPI 4 reads both; and a rank "
        "that waits must leave its core to the others: with more ranks than cores an all-reduce "
        "takes 30 times as long when it does not",
    ),
    Replacement(
        "horovod/runner/mpi_run.py",
        "'-mca ",
        "'--mca ",
        why="Open MPI 5 reads long options with two dashes only; Open MPI 4 reads both",
        count=4,
    ),
    Replacement(
        "horovod/runner/mpi_run.py",
        "['-bind-to none', '-map-by slot']",
        "['--bind-to none', '--map-by slot']",
        why="Open MPI 5 reads long options with two dashes only; Open MPI 4 and MPICH read both",
    ),
    Replacement(
        "horovod/common/util.py",
        "    def _target_fn(ext_base_name, fn, fn_desc, queue, verbose):\n",
        _RECORDED_ANSWERS,
        why="horovodrun imports TensorFlow or PyTorch in a child, seconds long, only to ask what "
        "is known since the build",
    ),
    Replacement(
        "horovod/common/util.py",
        "def _check_extension_lambda(ext_base_name, fn, fn_desc, verbose):\n",
        _RECORD_READER,
        why="reads what the replacement above answers with",
    ),
)


#: Applied to builds for a PyTorch with CUDA whose GPU tensors are to go through the CPU.
STAGED = (
    Replacement(
        "cmake/Modules/FindPytorch.cmake",
        "print(True if ((torch.version.cuda is not None) and (CUDA_HOME is not None)) else False)",
        "print(False)",
        why="PyTorch takes any nvcc on PATH, or a folder /usr/local/cuda without one, for a wish; "
        "the build then needs the whole toolkit, or fails",
    ),
    Replacement(
        "horovod/torch/mpi_ops_v2.cc",
        "/*non_blocking=*/true",
        "/*non_blocking=*/false",
        why="without CUDA's events nothing else waits for the copy of a GPU tensor, and what is "
        "reduced may be a half of it",
        count=8,
    ),
)


def torch_cxx_standard(torch_version: str) -> int:
    """C++ standard that the headers of this PyTorch need: 17, or 20 since 2.14."""
    return 20 if Version(torch_version).release >= (2, 14) else 17


def replacements_for(
    torch_version: str | None = None, *, staged: bool = False
) -> tuple[Replacement, ...]:
    """All replacements for one build; ``torch_version`` is None when PyTorch is not built for.

    ``staged``: this PyTorch can have GPU tensors, and the build has no GPU operations.
    """
    if torch_version is None:
        return ALWAYS
    standard = torch_cxx_standard(torch_version)
    return (
        *ALWAYS,
        *(STAGED if staged else ()),
        Replacement(
            "horovod/torch/CMakeLists.txt",
            "set(CMAKE_CXX_STANDARD 14)",
            f"set(CMAKE_CXX_STANDARD {standard})",
            why=f"the headers of PyTorch {torch_version} need C++{standard}",
        ),
    )
