// Who waits for an operation is told so when the thread that performed it holds no tensor any more.

namespace {

thread_local std::vector<std::function<void()>>* postponed = nullptr;

} // namespace

Performing::Performing() { postponed = &calls_; }

Performing::~Performing() {
  postponed = nullptr;
  for (auto& call : calls_) {
    call();
  }
}

void AfterOperation(std::function<void()> call) {
  if (postponed == nullptr) {
    call();
  } else {
    postponed->push_back(std::move(call));
  }
}

