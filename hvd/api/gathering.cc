// Tested in tests/contract/cases/exchange_cases.cc, tests/contract/endpoint_front.cc

#include <cstring>
#include <optional>
#include <utility>

#include "hvd/api/buffers.h"
#include "hvd/api/world.h"
#include "hvd/base/text.h"
#include "hvd/routes.h"

namespace hvd {

namespace {

/// Makes `result` have `rows` rows of elements of so many bytes, and returns its memory.
void* make_rows(Gathered& result, std::int64_t rows, std::size_t element, ResultPool* pool) {
  result.shape.front() = rows;
  const std::size_t bytes = static_cast<std::size_t>(element_count(result.shape)) * element;
  result.data = ResultBytes(pool != nullptr ? pool->allocate(bytes) : nullptr, bytes);
  return result.data.data();
}

/// Rows of a tensor whose other dimensions are the input's.
struct Rows {
  Gathered result;
  std::size_t element;
  std::shared_ptr<ResultPool> pool;  // null for what is small
  static void* allocate(void* context, std::int64_t rows) {
    auto& self = *static_cast<Rows*>(context);
    return make_rows(self.result, rows, self.element, self.pool.get());
  }
};

/// None where it is negotiated.
std::optional<Gathered> run_by_rows(SmallCall& call, const Buffer& input) {
  const std::int64_t bytes =
      element_count(input.shape) * static_cast<std::int64_t>(element_bytes(input.dtype));
  if (!routes::may_repeat(call.kind, bytes)) return std::nullopt;
  Rows rows{{{}, input.shape},
            element_bytes(input.dtype),
            routes::is_at_slot(static_cast<std::size_t>(bytes), 1) ? nullptr : result_pool()};
  call.allocate = &Rows::allocate;
  call.context = &rows;
  if (!try_fast_path(call)) return std::nullopt;
  return std::move(rows.result);
}

/// A handle gives each `wait()` a result of its own.
Gathered copy_of(const Gathered& result) {
  const auto pool = result_pool();
  const std::size_t bytes = result.data.size();
  Gathered copy{ResultBytes(pool ? pool->allocate(bytes) : nullptr, bytes), result.shape};
  if (bytes > 0) std::memcpy(copy.data.data(), result.data.data(), bytes);
  return copy;
}

/// Throws InvalidArgument if there are no inputs, or they are on several devices, or on a GPU,
/// which cannot write to results on the host.
void check_devices(const std::vector<Buffer>& inputs, std::string_view what,
                   const std::string& name) {
  require_running();
  if (inputs.empty())
    throw InvalidArgument(formatted("{} '{}': an empty group of tensors", what, name));
  for (const auto& input : inputs)
    if (input.device != inputs.front().device)
      throw InvalidArgument(
          formatted("{} '{}': the tensors of a group must be on one device", what, name));
  if (inputs.front().device != Device())
    throw InvalidArgument(formatted(
        "{0} '{1}': the result of a buffer on a GPU needs memory there: use {0}_into, or tensors",
        what, name));
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
  check_devices(inputs, name_of(kind), options.name);
  submission = request(kind, options, Device());
  std::vector<std::size_t> elements;
  const auto counts = counts_of(options, inputs.size());
  for (const auto& given : inputs) {
    const Buffer input = dealt(given, options);
    made.results->push_back({{}, input.shape});
    elements.push_back(element_bytes(input.dtype));
    submission.tensors.push_back(
        {input.data, nullptr, input.dtype, input.shape, nullptr, true, counts});
  }
  submission.allocate = [results = made.results, elements, pool = result_pool()](
                            std::size_t index, std::int64_t rows) {
    return make_rows((*results)[index], rows, elements[index], pool.get());
  };
  return made;
}

Gathering exchanging(const Buffer& input, const AlltoallBufferOptions& options) {
  Gathering made = gathering(OpKind::Alltoall, {input}, options);
  made.submission.tensors.front().splits = splits_of(input, options);
  return made;
}

Exchanged exchanged(Gathered result, const HandleState& pending) {
  return {std::move(result.data), std::move(result.shape), pending.rows.front()};
}

Handle<std::vector<Gathered>> submit_only(Gathering made) {
  auto running = engine();
  auto pending = running->submit(std::move(made.submission));
  return {std::move(running), std::move(pending), [results = made.results] {
            std::vector<Gathered> copies;
            for (const auto& result : *results) copies.push_back(copy_of(result));
            return copies;
          }};
}

std::vector<Gathered> submit_and_wait(Gathering made) {
  submit_and_wait(std::move(made.submission));
  return std::move(*made.results);
}

/// Gathers or scatters one tensor, as a repeated small operation where it can.
template <class Options>
Gathered gather_one(OpKind kind, const Buffer& input, const Options& options) {
  if (is_on_host(input) && !input.shape.empty() && counts_of(options).empty()) {
    SmallCall call = small_call(kind, input, {}, options);
    if (auto result = run_by_rows(call, input)) return std::move(*result);
  }
  return std::move(submit_and_wait(gathering(kind, {input}, options)).front());
}

Handle<Gathered> first(const Handle<std::vector<Gathered>>& handle) {
  return handle.map<Gathered>(
      [](std::vector<Gathered> results) { return std::move(results.front()); });
}

}  // namespace

std::vector<std::int64_t> even_splits(std::int64_t rows, int ranks, std::string_view name) {
  if (rows % ranks != 0)
    throw InvalidArgument(
        formatted("alltoall '{}': {} rows cannot be divided evenly among {} ranks; give splits",
                  name, rows, ranks));
  return std::vector<std::int64_t>(static_cast<std::size_t>(ranks), rows / ranks);
}

std::vector<std::int64_t> splits_of(const Buffer& input, const AlltoallBufferOptions& options) {
  if (!options.splits.empty() || input.shape.empty()) return options.splits;
  return even_splits(input.shape.front(), options.process_set.size(), options.name);
}

Handle<Gathered> allgather_async(const Buffer& input, const AllgatherOptions& options) {
  const WorldScope scope(options.world);
  return first(submit_only(gathering(OpKind::Allgather, {input}, options)));
}
Gathered allgather(const Buffer& input, const AllgatherOptions& options) {
  const WorldScope scope(options.world);
  return gather_one(OpKind::Allgather, input, options);
}
Handle<std::vector<Gathered>> grouped_allgather_async(const std::vector<Buffer>& inputs,
                                                      const AllgatherOptions& options) {
  const WorldScope scope(options.world);
  return submit_only(gathering(OpKind::Allgather, inputs, options));
}
std::vector<Gathered> grouped_allgather(const std::vector<Buffer>& inputs,
                                        const AllgatherOptions& options) {
  const WorldScope scope(options.world);
  return submit_and_wait(gathering(OpKind::Allgather, inputs, options));
}

Handle<Gathered> reducescatter_async(const Buffer& input, const ReducescatterOptions& options) {
  const WorldScope scope(options.world);
  return first(submit_only(gathering(OpKind::Reducescatter, {input}, options)));
}
Gathered reducescatter(const Buffer& input, const ReducescatterOptions& options) {
  const WorldScope scope(options.world);
  return gather_one(OpKind::Reducescatter, input, options);
}
Handle<std::vector<Gathered>> grouped_reducescatter_async(const std::vector<Buffer>& inputs,
                                                          const ReducescatterOptions& options) {
  const WorldScope scope(options.world);
  return submit_only(gathering(OpKind::Reducescatter, inputs, options));
}
std::vector<Gathered> grouped_reducescatter(const std::vector<Buffer>& inputs,
                                            const ReducescatterOptions& options) {
  const WorldScope scope(options.world);
  return submit_and_wait(gathering(OpKind::Reducescatter, inputs, options));
}

Handle<Exchanged> alltoall_async(const Buffer& input, const AlltoallBufferOptions& options) {
  const WorldScope scope(options.world);
  Gathering made = exchanging(input, options);
  auto running = engine();
  auto pending = running->submit(std::move(made.submission));
  return {running, pending, [results = made.results, pending] {
            return exchanged(copy_of(results->front()), *pending);
          }};
}
Exchanged alltoall(const Buffer& input, const AlltoallBufferOptions& options) {
  const WorldScope scope(options.world);
  if (is_on_host(input) && !input.shape.empty()) {
    std::vector<std::int64_t> rows = splits_of(input, options);  // for each rank; then from each
    SmallCall call = small_call(OpKind::Alltoall, input, {}, options);
    call.splits = call.received = rows;
    if (auto result = run_by_rows(call, input))
      return {std::move(result->data), std::move(result->shape), std::move(rows)};
  }
  Gathering made = exchanging(input, options);
  const auto pending = submit_and_wait(std::move(made.submission));
  return exchanged(std::move(made.results->front()), *pending);
}

std::vector<Bytes> gather_bytes(Engine& running, const Bytes& mine, std::string_view name) {
  Bytes copy = mine;
  const Buffer buffer{copy.data(), DataType::UInt8, {static_cast<std::int64_t>(copy.size())}, {}};
  const Gathering made = gathering(OpKind::Allgather, {buffer},
                                   AllgatherOptions{.name = std::string(name), .process_set = {}});
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
