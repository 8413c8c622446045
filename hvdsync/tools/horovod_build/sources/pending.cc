// What this rank has submitted and what is not complete: a list that each entry of the tensor
// table is on for as long as it lives, and a C function that writes it as text.

namespace {

struct PendingOperation {
  int32_t process_set_id;
  std::string name;
  std::chrono::steady_clock::time_point since;
};

struct PendingOperations {
  std::mutex mutex;
  // In order of submission, so that the oldest come first.
  std::list<PendingOperation> operations;
};

PendingOperations& Pending() {
  // Never freed: operations may still end while the process does.
  static auto* pending = new PendingOperations;
  return *pending;
}

} // namespace

class PendingMark {
public:
  explicit PendingMark(const TensorTableEntry& entry) {
    PendingOperation operation{entry.process_set_id, entry.tensor_name,
                               std::chrono::steady_clock::now()};
    std::lock_guard<std::mutex> guard(Pending().mutex);
    auto& operations = Pending().operations;
    place_ = operations.insert(operations.end(), std::move(operation));
  }

  ~PendingMark() {
    std::lock_guard<std::mutex> guard(Pending().mutex);
    Pending().operations.erase(place_);
  }

  PendingMark(const PendingMark&) = delete;
  PendingMark& operator=(const PendingMark&) = delete;

private:
  std::list<PendingOperation>::iterator place_;
};

std::shared_ptr<PendingMark> MarkPending(const TensorTableEntry& entry) {
  return std::make_shared<PendingMark>(entry);
}

// Writes one line for each pending operation, "<process set>\t<milliseconds since it was
// submitted>\t<name>\n": at most capacity - 1 bytes and a NUL. Returns the bytes that all lines
// need, without the NUL.
extern "C" int horovod_pending_tensors(char* out, int capacity) {
  std::ostringstream lines;
  {
    std::lock_guard<std::mutex> guard(Pending().mutex);
    auto now = std::chrono::steady_clock::now();
    for (const auto& operation : Pending().operations) {
      auto age = std::chrono::duration_cast<std::chrono::milliseconds>(now - operation.since);
      std::string name = operation.name;
      std::replace(name.begin(), name.end(), '\n', ' ');
      lines << operation.process_set_id << '\t' << age.count() << '\t' << name << '\n';
    }
  }
  const std::string text = lines.str();
  if (out != nullptr && capacity > 0) {
    const size_t length = std::min(text.size(), static_cast<size_t>(capacity - 1));
    std::memcpy(out, text.data(), length);
    out[length] = '\0';
  }
  return static_cast<int>(text.size());
}

