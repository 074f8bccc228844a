#include "tests/support/programs/expectations.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

#include "tests/support/oracle/oracle.h"
#include "tests/support/programs/random_values.h"

namespace hvd::test {

namespace {

constexpr std::array kKindWords{"allreduce",     "allgather", "broadcast", "alltoall",
                                "reducescatter", "barrier",   "join",      "control"};

std::string word(OpKind kind) { return kKindWords[static_cast<std::size_t>(kind)]; }

std::string text(double number) {
  std::array<char, 40> buffer{};
  return {buffer.data(), std::to_chars(buffer.data(), buffer.data() + buffer.size(), number).ptr};
}

std::string text(const Shape& shape) {
  std::string all;
  for (const auto size : shape) all += (all.empty() ? "" : ", ") + std::to_string(size);
  return "[" + all + "]";
}

bool is_gather(OpKind kind) { return kind == OpKind::Allgather || kind == OpKind::Alltoall; }

/// The part of the shape that must be equal on all ranks.
Shape common_part(OpKind kind, Shape shape) {
  if (is_gather(kind) && !shape.empty()) shape[0] = -1;
  return shape;
}

using Calls = std::vector<const Call*>;

std::size_t first_difference(const Calls& calls) {
  std::size_t first = calls[0]->tensors.size();
  for (const Call* call : calls) {
    const std::size_t both = std::min(call->tensors.size(), calls[0]->tensors.size());
    for (std::size_t t = 0; t < both; ++t) {
      const TensorDraw& a = call->tensors[t];
      const TensorDraw& b = calls[0]->tensors[t];
      if (a.dtype == b.dtype &&
          common_part(call->kind, a.shape) == common_part(call->kind, b.shape))
        continue;
      first = std::min(first, t);
    }
    first = std::min(first, both);
  }
  return first;
}

std::string tensor_text(const Call& call, std::size_t index) {
  if (index >= call.tensors.size()) return std::to_string(call.tensors.size()) + " tensors";
  if (call.kind == OpKind::Control) return "ranks " + text(call.tensors[index].shape);
  const std::string what = std::string(oracle::type_name(call.tensors[index].dtype)) + " " +
                           text(call.tensors[index].shape);
  return call.tensors.size() == 1 ? what : "tensor " + std::to_string(index) + " is " + what;
}

/// "ranks 0-1: this; rank 2: that"
template <class Describe>
std::string grouped(const std::vector<int>& ranks, const Calls& calls, const Describe& describe) {
  std::vector<std::pair<std::string, std::vector<int>>> groups;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const std::string said = describe(*calls[i]);
    const auto same = std::find_if(groups.begin(), groups.end(),
                                   [&](const auto& group) { return group.first == said; });
    if (same != groups.end()) {
      same->second.push_back(ranks[i]);
    } else {
      groups.push_back({said, {ranks[i]}});
    }
  }
  std::string all;
  for (const auto& [said, who] : groups)
    all += (all.empty() ? "" : "; ") + ranks_text(who) + ": " + said;
  return all;
}

/// Empty if the ranks agree; otherwise what the message must have.
std::vector<std::string> disagreement(const std::vector<int>& ranks, const Calls& calls) {
  const Call& first = *calls[0];
  const auto differs = [&](auto&& of) {
    return std::any_of(calls.begin(), calls.end(),
                       [&](const Call* c) { return of(*c) != of(first); });
  };
  const auto other_dtypes = [&](const Call* call) {
    for (std::size_t t = 0; t < std::min(call->tensors.size(), first.tensors.size()); ++t)
      if (call->tensors[t].dtype != first.tensors[t].dtype) return true;
    return false;
  };
  const auto shapes = [](const Call& call) {
    std::vector<Shape> all;
    for (const auto& tensor : call.tensors) all.push_back(common_part(call.kind, tensor.shape));
    return all;
  };
  const auto tensor = [&, index = first_difference(calls)](const Call& call) {
    return tensor_text(call, index);
  };
  if (std::any_of(calls.begin(), calls.end(), other_dtypes))
    return {"the data type differs", grouped(ranks, calls, tensor)};
  if (differs(shapes)) return {"the shape differs", grouped(ranks, calls, tensor)};
  const auto scales = [](const Call& call) {
    return "prescale " + text(call.prescale) + ", postscale " + text(call.postscale);
  };
  if (differs(scales)) return {"the scale factors differ", grouped(ranks, calls, scales)};
  const bool reduces = first.kind == OpKind::Allreduce || first.kind == OpKind::Reducescatter;
  const auto op = [](const Call& call) { return std::string(oracle::reduction_name(call.op)); };
  if (reduces && differs(op)) return {"the reduce op differs", grouped(ranks, calls, op)};
  const auto root = [](const Call& call) { return "root " + std::to_string(call.root); };
  if ((first.kind == OpKind::Broadcast || first.kind == OpKind::Control) && differs(root))
    return {"the root rank differs", grouped(ranks, calls, root)};
  return {};
}

std::string name_text(const Call& call) {
  return call.name.empty() ? word(call.kind) + " '" + word(call.kind) + ".noname."
                           : word(call.kind) + " '" + call.name + "'";
}

std::size_t row_bytes(const TensorDraw& tensor) {
  std::int64_t elements = 1;
  for (std::size_t d = 1; d < tensor.shape.size(); ++d) elements *= tensor.shape[d];
  return static_cast<std::size_t>(elements) * element_bytes(tensor.dtype);
}

void append(Data& to, const Data& from, std::size_t begin, std::size_t size) {
  to.insert(to.end(), from.begin() + static_cast<std::ptrdiff_t>(begin),
            from.begin() + static_cast<std::ptrdiff_t>(begin + size));
}

std::shared_ptr<const oracle::Expected> exactly(DataType dtype, Data data) {
  return std::make_shared<const oracle::Expected>(
      oracle::Expected{dtype, std::move(data), {}, false});
}

struct Taking {
  const std::vector<int>& set;      // all its ranks
  const std::vector<int>& ranks;    // those that take part
  const Calls& calls;               // theirs
  std::vector<Expected*> expected;  // theirs
};

void reduce_all(const Taking& taking, std::size_t t) {
  const Call& first = *taking.calls[0];
  const TensorDraw& tensor = first.tensors[t];
  const auto count = static_cast<std::size_t>(element_count(tensor.shape));
  std::vector<Data> inputs;
  // what those who have joined count as, each in its place
  const Data zeros(count * element_bytes(tensor.dtype));
  std::size_t next = 0;
  for (const int rank : taking.set) {
    const bool takes_part = next < taking.ranks.size() && taking.ranks[next] == rank;
    inputs.push_back(takes_part ? input_of(*taking.calls[next], rank, t) : zeros);
    next += takes_part ? 1 : 0;
  }
  const oracle::Reduction reduction{tensor.dtype, first.op, first.prescale, first.postscale};
  auto result = oracle::reduced(reduction, inputs, /*any_order=*/false);
  if (first.kind == OpKind::Allreduce) {
    const auto all =
        result.cancels ? nullptr : std::make_shared<const oracle::Expected>(std::move(result));
    for (Expected* expected : taking.expected) expected->outputs.push_back(all);
    return;
  }
  const auto ranks = static_cast<std::int64_t>(taking.set.size());
  std::size_t at = 0;
  for (std::int64_t i = 0; i < ranks; ++i) {
    const std::int64_t rows = tensor.shape[0] / ranks + (i < tensor.shape[0] % ranks ? 1 : 0);
    const std::size_t bytes = static_cast<std::size_t>(rows) * row_bytes(tensor);
    Data own;
    append(own, result.bytes, at, bytes);
    at += bytes;
    taking.expected[static_cast<std::size_t>(i)]->outputs.push_back(
        exactly(tensor.dtype, std::move(own)));
  }
}

void exchange(const Taking& taking, std::size_t t) {
  const bool gathers = taking.calls[0]->kind == OpKind::Allgather;
  std::vector<Data> outputs(taking.ranks.size());
  for (Expected* expected : taking.expected) expected->rows.emplace_back();
  for (std::size_t from = 0; from < taking.ranks.size(); ++from) {
    const TensorDraw& tensor = taking.calls[from]->tensors[t];
    const Data input = input_of(*taking.calls[from], taking.ranks[from], t);
    std::int64_t begin = 0;
    for (std::size_t to = 0; to < taking.ranks.size(); ++to) {
      const std::int64_t rows = gathers ? tensor.shape[0] : tensor.splits[to];
      append(outputs[to], input, static_cast<std::size_t>(begin) * row_bytes(tensor),
             static_cast<std::size_t>(rows) * row_bytes(tensor));
      taking.expected[to]->rows.back().push_back(rows);
      if (!gathers) begin += rows;
    }
  }
  for (std::size_t i = 0; i < outputs.size(); ++i)
    taking.expected[i]->outputs.push_back(
        exactly(taking.calls[i]->tensors[t].dtype, std::move(outputs[i])));
}

void broadcast(const Taking& taking, std::size_t t) {
  const int root = taking.calls[0]->root;
  const auto place = static_cast<std::size_t>(
      std::find(taking.ranks.begin(), taking.ranks.end(), root) - taking.ranks.begin());
  const auto all =
      exactly(taking.calls[place]->tensors[t].dtype, input_of(*taking.calls[place], root, t));
  for (Expected* expected : taking.expected) expected->outputs.push_back(all);
}

void results(const Taking& taking) {
  const Call& first = *taking.calls[0];
  for (std::size_t t = 0; t < first.tensors.size(); ++t) {
    const bool present = std::any_of(taking.calls.begin(), taking.calls.end(),
                                     [&](const Call* call) { return call->tensors[t].present; });
    for (Expected* expected : taking.expected) expected->present.push_back(present);
    if (!present) {
      for (Expected* expected : taking.expected) expected->outputs.push_back(nullptr);
    } else if (first.kind == OpKind::Broadcast) {
      broadcast(taking, t);
    } else if (is_gather(first.kind)) {
      exchange(taking, t);
    } else {
      reduce_all(taking, t);
    }
  }
}

}  // namespace

Data input_of(const Call& call, int rank, std::size_t tensor) {
  const TensorDraw& draw = call.tensors[tensor];
  const auto count = static_cast<std::size_t>(element_count(draw.shape));
  if (!draw.present) return Data(count * element_bytes(draw.dtype));
  return random_values(call.value_seed + 1000 * tensor, rank, draw.dtype, count);
}

bool is_defined(OpKind kind, DataType dtype, ReduceOp op) {
  if (kind == OpKind::Reducescatter)
    return (op == ReduceOp::Sum || op == ReduceOp::Average) && dtype != DataType::Bool;
  return kind != OpKind::Allreduce || oracle::allreduce_is_defined(dtype, op);
}

void fill_expectations(Op& op, const std::vector<int>& set) {
  op.expected.assign(op.calls.size(), {});
  std::vector<int> ranks, joined;
  Calls calls;
  std::vector<Expected*> expected;
  for (const int rank : set) {
    const auto& call = op.calls[static_cast<std::size_t>(rank)];
    (call ? ranks : joined).push_back(rank);
    if (!call) continue;
    calls.push_back(&*call);
    expected.push_back(&op.expected[static_cast<std::size_t>(rank)]);
  }
  if (calls.empty()) return;
  const Call& first = *calls[0];
  auto fragments = disagreement(ranks, calls);
  auto kind = fragments.empty() ? Expected::Kind::Result : Expected::Kind::Mismatch;
  if (fragments.empty() && !joined.empty() && first.kind != OpKind::Allreduce &&
      first.kind != OpKind::Barrier) {
    kind = Expected::Kind::Joined;
    fragments = {ranks_text(joined) + (joined.size() == 1 ? " has joined" : " have joined")};
  }
  for (Expected* one : expected) {
    one->kind = kind;
    if (kind == Expected::Kind::Result) continue;
    one->fragments = fragments;
    one->fragments.push_back(name_text(first));
  }
  if (kind == Expected::Kind::Result && first.kind < OpKind::Barrier)
    results({set, ranks, calls, expected});
}

std::string ranks_text(const std::vector<int>& ranks) {
  std::string all;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const std::size_t begin = i;
    while (i + 1 < ranks.size() && ranks[i + 1] == ranks[i] + 1) ++i;
    all += (all.empty() ? "" : ", ") + std::to_string(ranks[begin]) +
           (i > begin ? "-" + std::to_string(ranks[i]) : "");
  }
  return (ranks.size() == 1 ? "rank " : "ranks ") + all;
}

}  // namespace hvd::test
