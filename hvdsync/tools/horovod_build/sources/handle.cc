// Sleeps until an operation has ended. A handle that is not known is left to PollHandle to refuse.
void HandleManager::WaitForHandle(int handle) {
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, [this, handle] {
    auto found = results_.find(handle);
    return found == results_.end() || found->second != nullptr;
  });
}

