"""Replacements that make Horovod tell what goes wrong: pending tensors, mismatches, failed ranks.

In: C++ in ``sources``. Out: replacements; those of Python hand over to hvdsync, and leave Horovod
as it was where hvdsync is absent.
"""

from __future__ import annotations

from hvdsync.tools.horovod_build.replacement import Replacement, source

#: What makes Horovod say what it waits for, and what ranks disagree about.
SPEAKING = (
    Replacement(
        "horovod/common/common.h",
        "// Table storing Tensors to be reduced, keyed by unique name.\n",
        "// On a list of what is pending from its making to its end.\n"
        "class PendingMark;\n"
        "struct TensorTableEntry;\n"
        "std::shared_ptr<PendingMark> MarkPending(const TensorTableEntry& entry);\n\n"
        "// Table storing Tensors to be reduced, keyed by unique name.\n",
        why="a rank that waits must be able to say for which tensors",
    ),
    Replacement(
        "horovod/common/common.h",
        "  // Root rank for broadcast operation (relative to process set).\n",
        "  std::shared_ptr<PendingMark> pending_mark;\n"
        "  // Root rank for broadcast operation (relative to process set).\n",
        why="an operation is pending for as long as its entry lives, in whatever queue",
    ),
    Replacement(
        "horovod/common/common.cc",
        "  // Callback can be null if the rank sent Join request.\n",
        "  pending_mark.reset();\n  // Callback can be null if the rank sent Join request.\n",
        why="who is told that an operation is complete must not find it pending",
    ),
    Replacement(
        "horovod/common/common.cc",
        "#include <limits.h>\n\nnamespace horovod {\nnamespace common {\n",
        "#include <limits.h>\n\n#include <algorithm>\n#include <chrono>\n#include <list>\n"
        "#include <mutex>\n\nnamespace horovod {\nnamespace common {\n\n" + source("pending.cc"),
        why="reached from Python, it lists the tensors that this rank waits for",
    ),
    Replacement(
        "horovod/common/tensor_queue.cc",
        "  tensor_table_.emplace(e.tensor_name",
        "  e.pending_mark = MarkPending(e);\n  tensor_table_.emplace(e.tensor_name",
        why="an operation is pending from the moment that it is submitted",
    ),
    Replacement(
        "horovod/common/tensor_queue.cc",
        "    tensor_table_.emplace(entries[i].tensor_name",
        "    entries[i].pending_mark = MarkPending(entries[i]);\n"
        "    tensor_table_.emplace(entries[i].tensor_name",
        why="an operation is pending from the moment that it is submitted",
    ),
    Replacement(
        "horovod/common/controller.cc",
        "#include <atomic>\n",
        "#include <algorithm>\n#include <atomic>\n#include <map>\n#include <sstream>\n",
        why="what the replacement below needs",
    ),
    Replacement(
        "horovod/common/controller.cc",
        "Response Controller::ConstructResponse(",
        source("mismatch.cc") + "Response Controller::ConstructResponse(",
        why="an error about a tensor must say which one, and what each rank gave",
    ),
    Replacement(
        "horovod/common/controller.cc",
        "std::string error_message = error_message_stream.str();",
        "std::string error_message =\n"
        "        MismatchMessage(name, requests, GetGlobalRanks(), error_message_stream.str());",
        why="an error about a tensor must say which one, and what each rank gave",
    ),
    Replacement(
        "horovod/common/response_cache.h",
        "  DataType dtype;\n  std::vector<int64_t> shape;\n",
        "  DataType dtype;\n  int32_t root_rank = 0;\n  std::vector<int64_t> shape;\n",
        why="ranks that broadcast a known name from two roots wait for ever, or go on with two "
        "values: what is remembered of a name was compared without the root",
    ),
    Replacement(
        "horovod/common/response_cache.cc",
        "    return (cache_params.device == message.device() &&\n",
        "    return (cache_params.device == message.device() &&\n"
        "            cache_params.root_rank == message.root_rank() &&\n",
        why="the root of a broadcast is compared with the one remembered",
    ),
    Replacement(
        "horovod/common/response_cache.cc",
        "params.device = tensor_entry.device;",
        "params.device = tensor_entry.device;\n    params.root_rank = tensor_entry.root_rank;",
        why="the root of a broadcast is remembered",
        count=2,
    ),
)

#: Hooks of the launcher; what they do stands in ``hvdsync/comm/launch_failure.py``. Horovod goes on
#: as ever where that cannot be imported.
LAUNCHING = (
    Replacement(
        "horovod/runner/gloo_run.py",
        "    terminate_all_event = None if settings.elastic else threading.Event()\n",
        "    terminate_all_event = None if settings.elastic else threading.Event()\n"
        "    try:\n"
        "        from hvdsync.comm.launch_failure import Ranks\n"
        "        ranks = None if settings.elastic else Ranks(settings.num_proc)\n"
        "    except ImportError:\n"
        "        ranks = None\n",
        why="the launcher must know all ranks to say which failed first",
    ),
    Replacement(
        "horovod/runner/gloo_run.py",
        "        all_events = []\n",
        "        if ranks:\n"
        "            stderr = ranks.listen(slot_info, stderr)\n\n"
        "        all_events = []\n",
        why="the launcher must have the last words of the rank that failed first",
    ),
    Replacement(
        "horovod/runner/gloo_run.py",
        "        if exit_code != 0 and terminate_all_event:\n",
        "        if exit_code != 0 and ranks:\n"
        "            ranks.let_others_end()\n"
        "        if exit_code != 0 and terminate_all_event:\n",
        why="a rank that is ended at once cannot say what it knows of the failure, and a rank that "
        "has failed, but not yet ended, would seem to have been ended",
    ),
    Replacement(
        "horovod/runner/gloo_run.py",
        "    return _exec_command\n",
        "    _exec_command.ranks = ranks\n    return _exec_command\n",
        why="what starts the ranks is made in another place than what waits for them",
    ),
    Replacement(
        "horovod/runner/gloo_run.py",
        "    event = register_shutdown_event()\n    args_list",
        "    event = register_shutdown_event()\n"
        "    ranks = getattr(exec_command, 'ranks', None)\n"
        "    if ranks:\n"
        "        ranks.forward_signals(event)\n"
        "    args_list",
        why="ranks that save and end well when they are told to make a run that ended well",
    ),
    Replacement(
        "horovod/runner/gloo_run.py",
        "                                               block_until_all_done=True)\n",
        "                                               block_until_all_done=True)\n"
        "    if ranks:\n"
        "        ranks.raise_for_failure()\n",
        why="the launcher's last words, and its exit code, are those of the rank that failed first",
    ),
    Replacement(
        "horovod/runner/mpi_run.py",
        "        os.execve('/bin/sh', ['/bin/sh', '-c', mpirun_command], env)\n",
        "        try:\n"
        "            from hvdsync.comm.launch_mpi import run_mpirun\n"
        "        except ImportError:\n"
        "            os.execve('/bin/sh', ['/bin/sh', '-c', mpirun_command], env)\n"
        "        run_mpirun(mpirun_command, env, settings.num_proc)\n",
        why="mpirun names a failed rank, but its last words are far above",
    ),
    Replacement(
        "horovod/runner/launch.py",
        "    _run(args)\n\n\nif __name__",
        "    try:\n"
        "        _run(args)\n"
        "    except RuntimeError as error:\n"
        "        if not hasattr(error, 'exit_code'):\n"
        "            raise\n"
        "        sys.stdout.flush()\n"
        "        sys.stderr.write('{}\\n'.format(error))\n"
        "        sys.exit(error.exit_code)\n\n\nif __name__",
        why="the exit code of a run is that of the rank that failed first, and a traceback of the "
        "launcher says nothing of it",
    ),
    Replacement(
        "horovod/runner/common/util/safe_shell_exec.py",
        "    # Terminate children gracefully.\n",
        "    try:\n"
        "        from hvdsync.comm.launch_processes import end_command\n"
        "    except ImportError:\n"
        "        pass\n"
        "    else:\n"
        "        return end_command(p, GRACEFUL_TERMINATION_TIME_S)\n\n"
        "    # Terminate children gracefully.\n",
        why="a shell that starts its command in its own place was stopped before it was ended, and "
        "the exit code of any other was lost as often as not",
    ),
    Replacement(
        "horovod/runner/common/util/safe_shell_exec.py",
        "    middleman.start()\n",
        "    middleman.start()\n"
        "    if hasattr(stderr, 'command_started'):\n"
        "        stderr.command_started(middleman.pid)\n",
        why="signals to the launcher are passed on to the ranks below this process",
    ),
    Replacement(
        "horovod/runner/common/util/safe_shell_exec.py",
        "    stdout_fwd.join()\n    stderr_fwd.join()\n",
        "    limit = None\n"
        "    if hasattr(stderr, 'command_ended'):\n"
        "        limit = stderr.command_ended(middleman.exitcode)\n"
        "    stdout_fwd.join(limit)\n"
        "    stderr_fwd.join(limit)\n",
        why="the order in which ranks ended is that of their ends, not of their output's; and what "
        "a failed rank leaves running must not keep the launcher waiting",
    ),
)

#: Where an operation fails, hvdsync is asked what that means.
EXPLAINING = (
    Replacement(
        "horovod/torch/mpi_ops.py",
        '_NULL = ""\n',
        '_NULL = ""\n\n\n'
        "def _explained(error):\n"
        "    try:\n"
        "        from hvdsync.comm.failures import explain\n"
        "    except ImportError:\n"
        "        return HorovodInternalError(error)\n"
        "    return explain(error) or HorovodInternalError(error)\n",
        why="ranks that disagree are a mistake to be told, not a loss to recover from",
    ),
    Replacement(
        "horovod/torch/mpi_ops.py",
        "raise HorovodInternalError(e)",
        "raise _explained(e)",
        why="ranks that disagree are a mistake to be told, not a loss to recover from",
        count=11,
    ),
    Replacement(
        "horovod/tensorflow/mpi_ops.py",
        "_basics = _HorovodBasics(__file__, 'mpi_lib')\n",
        "try:\n"
        "    from hvdsync.comm.failures import Explained\n"
        "except ImportError:\n"
        "    pass\n"
        "else:\n"
        "    MPI_LIB = Explained(MPI_LIB)\n\n"
        "_basics = _HorovodBasics(__file__, 'mpi_lib')\n",
        why="ranks that disagree get the same error whatever the framework",
    ),
)
