"""Replacements that shorten waits: threads that sleep or spin, ranks that hold one another up.

And that end one that has no end, of processes that are forked at the wrong moment.

In: C++ in ``sources``. Out: replacements. What travels stays as it was.
"""

from __future__ import annotations

from hvdsync.tools.horovod_build.replacement import Replacement, source

_SLEPT = (
    "an operation waited for the end of a cycle of 1 ms, which is many times what a small one takes"
)
_SPUN = "a thread that waits in a loop takes the core from those that would end its wait"
_HOGGED = (
    "the thread that serves connections asked again and again for what another thread has locked, "
    "or has not made yet, and on a crowded machine kept that thread from its core meanwhile"
)
_LAST_HOLDER = (
    "Horovod's thread told that an operation was done before it let go of its tensors, and so was "
    "at times the last to hold one, which it frees with a thread state of Python that it makes "
    "for it; in Python 3.11 a process that is forked in that moment hangs (1 to 2 in 100 right "
    "after an all-reduce), and with it a DataLoader whose worker it was to be"
)
_HELD_UP = (
    "what says that a rank is ready to receive stood behind all that it sent on the same "
    "connection, so that as often as not only one of two ranks was sending"
)
_TURNED_AWAY = (
    "five ranks may wait to be let in by the launcher's servers; the others are turned away and "
    "come back after a second or more, which was 7 s of the start of 8 ranks on two cores"
)
_LET_IN = "    request_queue_size = 1024\n"


def _many_let_in(server: str, more: str) -> Replacement:
    start = f"class {server}({more}HTTPServer, object):\n"
    file = "horovod/runner/http/http_server.py"
    return Replacement(file, start, start + _LET_IN + "\n", why=_TURNED_AWAY)


def _received_first(file: str, send: str, receive: str) -> Replacement:
    return Replacement(file, send + receive, receive + send, why=_HELD_UP)


_LAUNCHER = (
    _many_let_in("RendezvousHTTPServer", "socketserver.ThreadingMixIn, "),
    _many_let_in("KVStoreHTTPServer", ""),
    Replacement(
        "horovod/runner/common/util/network.py",
        "class BasicService(object):\n",
        "class _Server(socketserver.ThreadingTCPServer):\n" + _LET_IN + "\n\n"
        "class BasicService(object):\n",
        why=_TURNED_AWAY,
    ),
    Replacement(
        "horovod/runner/common/util/network.py",
        "socketserver.ThreadingTCPServer(\n",
        "_Server(\n",
        why=_TURNED_AWAY,
    ),
)

# The queue wakes the thread that empties it.
_CYCLES = (
    Replacement(
        "horovod/common/tensor_queue.h",
        "#include <iostream>\n",
        "#include <chrono>\n#include <functional>\n#include <iostream>\n",
        why="what the replacement below needs",
    ),
    Replacement(
        "horovod/common/tensor_queue.h",
        "class TensorQueue {\npublic:\n",
        "// Lets the background thread begin its next cycle at once.\n"
        "void WantCycle();\n"
        "// Sleeps for so long, or until a cycle is wanted.\n"
        "void SleepBeforeCycle(std::chrono::steady_clock::duration longest);\n\n"
        "// While one lives, its thread performs an operation.\n"
        "class Performing {\npublic:\n"
        "  Performing();\n  ~Performing();\n\n"
        "private:\n  std::vector<std::function<void()>> calls_;\n};\n\n"
        "// Calls when this thread has performed its operation; at once where it performs none.\n"
        "void AfterOperation(std::function<void()> call);\n\n"
        "class TensorQueue {\npublic:\n"
        "  bool IsEmpty() const {\n"
        "    std::lock_guard<std::mutex> guard(mutex_);\n"
        "    return tensor_table_.empty();\n"
        "  }\n",
        why=_SLEPT,
    ),
    Replacement(
        "horovod/common/tensor_queue.cc",
        "#include <assert.h>\n\n"
        '#include "logging.h"\n\n'
        "namespace horovod {\nnamespace common {\n\n",
        "#include <assert.h>\n\n#include <condition_variable>\n\n"
        '#include "logging.h"\n\n'
        "namespace horovod {\nnamespace common {\n\n"
        + source("cycle.cc")
        + source("performing.cc"),
        why=_SLEPT,
    ),
    Replacement(
        "horovod/common/tensor_queue.cc",
        "std::move(e));\n  message_queue_.push(std::move(message));\n",
        "std::move(e));\n  message_queue_.push(std::move(message));\n  WantCycle();\n",
        why=_SLEPT,
    ),
    Replacement(
        "horovod/common/tensor_queue.cc",
        "    message_queue_.push(std::move(messages[i]));\n  }\n",
        "    message_queue_.push(std::move(messages[i]));\n  }\n  WantCycle();\n",
        why=_SLEPT,
    ),
    Replacement(
        "horovod/common/operations.cc",
        "  if (sleep_duration > std::chrono::steady_clock::duration::zero()) {\n"
        "    std::this_thread::sleep_for(sleep_duration);\n"
        "  }\n",
        "  SleepBeforeCycle(sleep_duration);\n",
        why=_SLEPT,
    ),
    Replacement(
        "horovod/common/operations.cc",
        "    should_shutdown |= response_list.shutdown();\n",
        "    should_shutdown |= response_list.shutdown();\n"
        "    // What some rank has not submitted is asked for again at once: over Gloo the\n"
        "    // question itself sleeps until all ranks answer, over MPI it would spin.\n"
        "    if (state.control_operation == LibType::GLOO &&\n"
        "        !process_set.tensor_queue.IsEmpty()) {\n"
        "      WantCycle();\n"
        "    }\n",
        why="a rank that sleeps while the last one submits the operation holds all of them up",
    ),
)

# Who waits for a handle sleeps until it is done, and it is done when no tensor is held for it.
_HANDLES = (
    Replacement(
        "horovod/torch/handle_manager.h",
        "#include <atomic>\n",
        "#include <atomic>\n#include <condition_variable>\n",
        why="what the replacement below needs",
    ),
    Replacement(
        "horovod/torch/handle_manager.h",
        "  bool PollHandle(int handle);\n",
        "  bool PollHandle(int handle);\n  void WaitForHandle(int handle);\n",
        why=_SPUN,
    ),
    Replacement(
        "horovod/torch/handle_manager.h",
        "  std::mutex mutex_;\n",
        "  std::mutex mutex_;\n  std::condition_variable done_;\n",
        why=_SPUN,
    ),
    Replacement(
        "horovod/torch/handle_manager.cc",
        "  std::lock_guard<std::mutex> guard(mutex_);\n"
        "  results_[handle] = std::make_shared<Status>(status);\n",
        "  AfterOperation([this, handle, status] {\n"
        "    std::lock_guard<std::mutex> guard(mutex_);\n"
        "    results_[handle] = std::make_shared<Status>(status);\n"
        "    done_.notify_all();\n"
        "  });\n",
        why=_LAST_HOLDER,
    ),
    Replacement(
        "horovod/torch/handle_manager.cc",
        '#include "handle_manager.h"\n',
        '#include "handle_manager.h"\n#include "../common/tensor_queue.h"\n',
        why="what the replacement above needs",
    ),
    Replacement(
        "horovod/common/operations.cc",
        "        PerformOperation(response, process_set);\n",
        "        {\n"
        "          Performing performing;\n"
        "          PerformOperation(response, process_set);\n"
        "        }\n",
        why=_LAST_HOLDER,
    ),
    Replacement(
        "horovod/torch/handle_manager.cc",
        "  results_.clear();\n",
        "  results_.clear();\n  done_.notify_all();\n",
        why="who waits for a handle that is no more must be told so",
    ),
    Replacement(
        "horovod/torch/handle_manager.cc",
        "std::shared_ptr<Status> HandleManager::ReleaseHandle(",
        source("handle.cc") + "std::shared_ptr<Status> HandleManager::ReleaseHandle(",
        why=_SPUN,
    ),
    Replacement(
        "horovod/torch/mpi_ops_v2.cc",
        "      py::gil_scoped_release release_python_gil;\n      std::this_thread::yield();\n",
        "      py::gil_scoped_release release_python_gil;\n"
        "      handle_manager.WaitForHandle(handle);\n",
        why=_SPUN,
    ),
)

_GLOO = (
    Replacement(
        "third_party/gloo/gloo/transport/tcp/pair.cc",
        "#include <sstream>\n",
        "#include <sstream>\n#include <thread>\n",
        why="what the replacements below need",
    ),
    Replacement(
        "third_party/gloo/gloo/transport/tcp/pair.cc",
        "  if (!lock) {\n    return;\n  }\n",
        "  if (!lock) {\n    std::this_thread::yield();\n    return;\n  }\n",
        why=_HOGGED,
    ),
    Replacement(
        "third_party/gloo/gloo/transport/tcp/pair.cc",
        "    handleReadWrite(events);\n    return;\n",
        "    handleReadWrite(events);\n"
        "    // A message that has begun, and whose buffer may not be there yet.\n"
        "    const bool waits = rx_.nread == sizeof(rx_.preamble);\n"
        "    lock.unlock();\n"
        "    if (waits) {\n"
        "      std::this_thread::yield();\n"
        "    }\n"
        "    return;\n",
        why=_HOGGED,
    ),
    _received_first(
        "third_party/gloo/gloo/alltoallv.cc",
        "    in->send(\n"
        "        sendRank, slot, inOffsetPerRank[sendRank], inLengthPerRank[sendRank]);\n",
        "    out->recv(\n"
        "        recvRank, slot, outOffsetPerRank[recvRank], outLengthPerRank[recvRank]);\n",
    ),
    _received_first(
        "third_party/gloo/gloo/allgatherv.cc",
        "    out->send(sendRank, slot, byteOffsets[sendIndex], byteCounts[sendIndex]);\n",
        "    out->recv(recvRank, slot, byteOffsets[recvIndex], byteCounts[recvIndex]);\n",
    ),
    _received_first(
        "third_party/gloo/gloo/allgatherv.cc",
        "      out->send(sendRank, slot, byteOffsets[sendIndex], byteCounts[sendIndex]);\n",
        "      out->recv(recvRank, slot, byteOffsets[recvIndex], byteCounts[recvIndex]);\n",
    ),
)

WAITING = (*_LAUNCHER, *_CYCLES, *_HANDLES, *_GLOO)
