// The background thread's sleep between two cycles, which ends when something is submitted.

namespace {

struct NextCycle {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_wanted = false;
};

NextCycle& Next() {
  // Never freed: operations may still be submitted while the process ends.
  static auto* next = new NextCycle;
  return *next;
}

} // namespace

void WantCycle() {
  {
    std::lock_guard<std::mutex> guard(Next().mutex);
    Next().is_wanted = true;
  }
  Next().changed.notify_one();
}

void SleepBeforeCycle(std::chrono::steady_clock::duration longest) {
  std::unique_lock<std::mutex> lock(Next().mutex);
  Next().changed.wait_for(lock, longest, [] { return Next().is_wanted; });
  Next().is_wanted = false;
}

