// What ranks asked for under one name, where it differs: each value with the ranks that gave it.

namespace {

std::string ShapeOf(const Request& request) {
  // Ranks may gather different lengths along the first dimension.
  const bool gathers = request.request_type() == Request::ALLGATHER ||
                       request.request_type() == Request::ALLTOALL;
  std::ostringstream text;
  text << '[';
  const auto& shape = request.tensor_shape();
  for (size_t i = 0; i < shape.size(); ++i) {
    text << (i ? ", " : "");
    if (i == 0 && gathers) {
      text << "any";
    } else {
      text << shape[i];
    }
  }
  text << ']';
  return text.str();
}

std::string ReductionOf(const Request& request) {
  static const char* names[] = {"average", "sum", "adasum", "min", "max", "product"};
  std::ostringstream text;
  text << names[request.reduce_op()];
  if (request.prescale_factor() != 1.0) {
    text << " of values times " << request.prescale_factor();
  }
  if (request.postscale_factor() != 1.0) {
    text << ", then times " << request.postscale_factor();
  }
  return text.str();
}

// "operation ALLREDUCE on ranks 0, 2, but BROADCAST on rank 1"; empty when all ranks agree.
template <typename Describe>
std::string Difference(const char* what, const std::vector<Request>& requests,
                       const std::vector<int>& global_ranks, Describe describe) {
  std::map<int, std::string> by_rank;
  for (const auto& request : requests) {
    by_rank[global_ranks[request.request_rank()]] = describe(request);
  }
  // Values in the order of the first rank that gave each.
  std::vector<std::pair<std::string, std::vector<int>>> values;
  for (const auto& item : by_rank) {
    auto known = std::find_if(values.begin(), values.end(), [&](const auto& value) {
      return value.first == item.second;
    });
    if (known == values.end()) {
      known = values.insert(values.end(), {item.second, {}});
    }
    known->second.push_back(item.first);
  }
  if (values.size() < 2) {
    return "";
  }
  std::ostringstream text;
  text << what;
  for (const auto& value : values) {
    text << (&value == &values.front() ? " " : ", but ") << value.first
         << (value.second.size() == 1 ? " on rank " : " on ranks ");
    for (size_t i = 0; i < value.second.size(); ++i) {
      text << (i ? ", " : "") << value.second[i];
    }
  }
  return text.str();
}

// The error for one tensor: all that differs, or else Horovod's own sentence, after the name.
std::string MismatchMessage(const std::string& name, const std::vector<Request>& requests,
                            const std::vector<int>& ranks, const std::string& otherwise) {
  std::vector<std::string> differences{Difference(
      "operation", requests, ranks,
      [](const Request& r) { return Request::RequestType_Name(r.request_type()); })};
  if (differences[0].empty()) {
    // Between two kinds of operations nothing else can be compared.
    differences = {
        Difference("dtype", requests, ranks,
                   [](const Request& r) { return DataType_Name(r.tensor_type()); }),
        Difference("shape", requests, ranks, ShapeOf),
        Difference("reduction", requests, ranks, ReductionOf),
        Difference("root rank", requests, ranks,
                   [&](const Request& r) { return std::to_string(ranks[r.root_rank()]); }),
        Difference("device", requests, ranks,
                   [](const Request& r) { return r.device() == CPU_DEVICE_ID ? "CPU" : "GPU"; }),
    };
  }
  std::string text;
  for (const auto& difference : differences) {
    if (!difference.empty()) {
      text += (text.empty() ? "" : "; ") + difference;
    }
  }
  return text.empty() ? "Tensor '" + name + "': " + otherwise
                      : "Mismatched tensor '" + name + "': " + text + ".";
}

} // namespace

