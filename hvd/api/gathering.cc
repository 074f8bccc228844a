#include <optional>
#include <utility>

#include "hvd/api/buffers.h"
#include "hvd/base/text.h"

namespace hvd {

namespace {

/// Rows of a tensor whose other dimensions are the input's.
struct Rows {
  Gathered result;
  std::size_t element;
  static void* allocate(void* context, std::int64_t rows) {
    auto& self = *static_cast<Rows*>(context);
    self.result.shape.front() = rows;
    self.result.data.resize(static_cast<std::size_t>(element_count(self.result.shape)) * self.element);
    return self.result.data.data();
  }
};

/// None where it takes the long way.
std::optional<Gathered> run_by_rows(SmallCall& call, const Buffer& input) {
  Rows rows{{{}, input.shape}, element_bytes(input.dtype)};
  call.allocate = &Rows::allocate;
  call.context = &rows;
  if (!engine()->try_fast_path(call)) return std::nullopt;
  return std::move(rows.result);
}

/// Of one device, the first one's.
Device device_of(const std::vector<Buffer>& inputs, std::string_view what, const std::string& name) {
  if (inputs.empty()) throw InvalidArgument(formatted("{} '{}': an empty group of tensors", what, name));
  for (const auto& input : inputs)
    if (input.device != inputs.front().device)
      throw InvalidArgument(formatted("{} '{}': the tensors of a group must be on one device", what, name));
  return inputs.front().device;
}

/// A submission whose outputs are made when their sizes are known.
struct Gathering {
  Submission submission;
  std::shared_ptr<std::vector<Gathered>> results;
};

template <class Options>
Gathering gathering(OpKind kind, const std::vector<Buffer>& inputs, const Options& options) {
  Gathering made;
  made.results = std::make_shared<std::vector<Gathered>>();
  Submission& submission = made.submission;
  submission = request(kind, options, device_of(inputs, name_of(kind), options.name));
  std::vector<std::size_t> elements;
  for (const auto& input : inputs) {
    made.results->push_back({{}, input.shape});
    elements.push_back(element_bytes(input.dtype));
    submission.tensors.push_back({input.data, nullptr, input.dtype, input.shape, nullptr, true});
  }
  submission.allocate = [results = made.results, elements](std::size_t index, std::int64_t rows) {
    Gathered& result = (*results)[index];
    result.shape.front() = rows;
    result.data.resize(static_cast<std::size_t>(element_count(result.shape)) * elements[index]);
    return static_cast<void*>(result.data.data());
  };
  return made;
}

Gathering gathering(const std::vector<Buffer>& inputs, const AllgatherOptions& options) {
  return gathering(OpKind::Allgather, inputs, options);
}

Gathering scattering(const std::vector<Buffer>& inputs, const ReducescatterOptions& options) {
  return gathering(OpKind::Reducescatter, inputs, options);
}

Gathering exchanging(const Buffer& input, const AlltoallBufferOptions& options) {
  Gathering made = gathering(OpKind::Alltoall, {input}, options);
  made.submission.tensors.front().splits = splits_of(input, options);
  return made;
}

Exchanged exchanged(const Gathering& made, const HandleState& pending) {
  Gathered& result = made.results->front();
  return {result.data, result.shape, pending.rows.front()};
}

Handle<std::vector<Gathered>> submit_only(Gathering made) {
  auto running = engine();
  auto pending = running->submit(std::move(made.submission));
  return {std::move(running), std::move(pending), [results = made.results] { return *results; }};
}

std::vector<Gathered> submit_and_wait(Gathering made) {
  submit_and_wait(std::move(made.submission));
  return std::move(*made.results);
}

Handle<Gathered> first(const Handle<std::vector<Gathered>>& handle) {
  return handle.map<Gathered>([](std::vector<Gathered> results) { return std::move(results.front()); });
}

}  // namespace

std::vector<std::int64_t> even_splits(std::int64_t rows, int ranks, std::string_view name) {
  if (rows % ranks != 0)
    throw InvalidArgument(formatted("alltoall '{}': {} rows cannot be divided evenly among {} ranks; give splits", name, rows, ranks));
  return std::vector<std::int64_t>(static_cast<std::size_t>(ranks), rows / ranks);
}

std::vector<std::int64_t> splits_of(const Buffer& input, const AlltoallBufferOptions& options) {
  if (!options.splits.empty() || input.shape.empty()) return options.splits;
  return even_splits(input.shape.front(), options.process_set.size(), options.name);
}

Handle<Gathered> allgather_async(const Buffer& input, const AllgatherOptions& options) {
  return first(submit_only(gathering({input}, options)));
}
Gathered allgather(const Buffer& input, const AllgatherOptions& options) {
  if (is_on_host(input) && !input.shape.empty()) {
    SmallCall call = small_call(OpKind::Allgather, input, {}, options);
    if (auto result = run_by_rows(call, input)) return std::move(*result);
  }
  return std::move(submit_and_wait(gathering({input}, options)).front());
}
Handle<std::vector<Gathered>> grouped_allgather_async(const std::vector<Buffer>& inputs, const AllgatherOptions& options) {
  return submit_only(gathering(inputs, options));
}
std::vector<Gathered> grouped_allgather(const std::vector<Buffer>& inputs, const AllgatherOptions& options) {
  return submit_and_wait(gathering(inputs, options));
}

Handle<Gathered> reducescatter_async(const Buffer& input, const ReducescatterOptions& options) {
  return first(submit_only(scattering({input}, options)));
}
Gathered reducescatter(const Buffer& input, const ReducescatterOptions& options) {
  if (is_on_host(input) && !input.shape.empty()) {
    SmallCall call = small_call(OpKind::Reducescatter, input, {}, options);
    if (auto result = run_by_rows(call, input)) return std::move(*result);
  }
  return std::move(submit_and_wait(scattering({input}, options)).front());
}
Handle<std::vector<Gathered>> grouped_reducescatter_async(const std::vector<Buffer>& inputs, const ReducescatterOptions& options) {
  return submit_only(scattering(inputs, options));
}
std::vector<Gathered> grouped_reducescatter(const std::vector<Buffer>& inputs, const ReducescatterOptions& options) {
  return submit_and_wait(scattering(inputs, options));
}

Handle<Exchanged> alltoall_async(const Buffer& input, const AlltoallBufferOptions& options) {
  Gathering made = exchanging(input, options);
  auto running = engine();
  auto pending = running->submit(std::move(made.submission));
  return {running, pending, [made, pending] { return exchanged(made, *pending); }};
}
Exchanged alltoall(const Buffer& input, const AlltoallBufferOptions& options) {
  if (is_on_host(input) && !input.shape.empty()) {
    const auto splits = splits_of(input, options);
    SmallCall call = small_call(OpKind::Alltoall, input, {}, options);
    std::vector<std::int64_t> received(splits.size());
    call.splits = splits;
    call.received = received;
    if (auto result = run_by_rows(call, input)) return {std::move(result->data), std::move(result->shape), std::move(received)};
  }
  return alltoall_async(input, options).wait();
}

std::vector<Bytes> gather_bytes(Engine& running, const Bytes& mine, std::string_view name) {
  Bytes copy = mine;
  const Buffer buffer{copy.data(), DataType::UInt8, {static_cast<std::int64_t>(copy.size())}, {}};
  const Gathering made = gathering({buffer}, AllgatherOptions{.name = std::string(name), .process_set = {}});
  const auto pending = running.submit(made.submission, After::Wait);
  running.wait(*pending);
  std::vector<Bytes> all;
  auto from = made.results->front().data.begin();
  for (const auto rows : pending->rows.front()) {
    all.emplace_back(from, from + rows);
    from += rows;
  }
  return all;
}

}  // namespace hvd
