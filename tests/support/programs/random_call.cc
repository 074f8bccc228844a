#include "tests/support/programs/random_call.h"

#include <algorithm>

#include "tests/support/programs/expectations.h"

namespace hvd::test {

namespace {

const std::vector<double> kScales{1, 1, 1, 1, 0.5, 2, -1.5, 0.1, 3};
const std::vector<Shape> kShapes{{},     {0},     {1},       {2},       {7},      {33},
                                 {3, 5}, {17, 3}, {5, 1, 2}, {2, 0, 3}, {64, 33}, {9, 1}};
const std::vector<Shape> kMedium{{4099}, {20, 211}, {9001, 1}, {30011}, {3, 10007}, {64, 1027}};
const std::vector<Shape> kLarge{{30011}, {173, 211}, {70003}, {64, 1027}};

bool by_rows(OpKind kind) {
  return kind == OpKind::Allgather || kind == OpKind::Alltoall || kind == OpKind::Reducescatter;
}

DataType draw_dtype(Random& random, OpKind kind, ReduceOp op) {
  while (true)
    if (const auto dtype = static_cast<DataType>(random.below(kDataTypes));
        is_defined(kind, dtype, op))
      return dtype;
}

Shape draw_shape(Random& random, OpKind kind, const CallLimits& limits) {
  while (true) {
    Shape shape =
        limits.large_tensors && random.one_in(25) ? random.pick(kLarge) : random.pick(kShapes);
    if (!shape.empty() || !by_rows(kind)) return shape;
  }
}

std::vector<std::int64_t> draw_splits(Random& random, std::int64_t rows, std::size_t ranks) {
  std::vector<std::int64_t> splits;
  if (random.one_in(3) && rows % static_cast<std::int64_t>(ranks) == 0)
    return std::vector(ranks, rows / static_cast<std::int64_t>(ranks));
  for (std::size_t i = 0; i < ranks; ++i) {
    splits.push_back(random.one_in(4) ? 0 : random.below(static_cast<int>(rows) + 1));
    rows -= splits.back();
  }
  random.shuffle(splits);
  return splits;
}

void draw_own(Random& random, Call& call, std::size_t ranks) {
  const bool can_be_absent = call.kind == OpKind::Allreduce && random.one_in(6);
  for (auto& tensor : call.tensors) {
    if (call.kind == OpKind::Allgather || call.kind == OpKind::Alltoall) {
      if (tensor.shape[0] < 100 && !random.one_in(3)) tensor.shape[0] = random.below(9);
      if (call.kind == OpKind::Alltoall)
        tensor.splits = draw_splits(random, tensor.shape[0], ranks);
    }
    tensor.present = !can_be_absent || random.one_in(2);
    tensor.in_place = random.one_in(2);
    tensor.allocated = random.one_in(2);
    tensor.place = random.one_in(3) ? Place::Arena : Place::Heap;
  }
}

std::vector<int> some_of(Random& random, std::vector<int> ranks) {
  random.shuffle(ranks);
  ranks.resize(static_cast<std::size_t>(random.between(1, static_cast<int>(ranks.size()) - 1)));
  return ranks;
}

bool spoil_call(Random& random, Call& call, int how, const std::vector<int>& set) {
  const auto at =
      call.tensors.empty()
          ? 0
          : static_cast<std::size_t>(random.below(static_cast<int>(call.tensors.size())));
  switch (how) {
    case 0: {
      if (call.tensors.empty()) return false;
      const auto was = call.tensors[at].dtype;
      const auto other = draw_dtype(random, call.kind, call.op);
      call.tensors[at].dtype = other;
      return other != was;
    }
    case 1: {
      if (call.tensors.empty()) return false;
      Shape& shape = call.tensors[at].shape;
      const bool first_counts = call.kind != OpKind::Allgather && call.kind != OpKind::Alltoall;
      if (shape.empty() || random.one_in(3)) {
        shape.push_back(random.between(1, 2));
      } else if (const std::size_t d =
                     static_cast<std::size_t>(random.below(static_cast<int>(shape.size())));
                 d > 0 || first_counts) {
        ++shape[d];
      } else {
        return false;
      }
      return true;
    }
    case 2:
      if (!reduces(call.kind)) return false;
      (random.one_in(2) ? call.prescale : call.postscale) += 0.25;
      return true;
    case 3: {
      if (!reduces(call.kind)) return false;
      const auto was = call.op;
      for (int tries = 0; tries < 10 && call.op == was; ++tries) {
        const auto other = static_cast<ReduceOp>(random.below(6));
        const auto good = [&](const TensorDraw& tensor) {
          return is_defined(call.kind, tensor.dtype, other);
        };
        if (std::all_of(call.tensors.begin(), call.tensors.end(), good)) call.op = other;
      }
      return call.op != was;
    }
    case 4: {
      const int was = call.root;
      if (call.kind == OpKind::Broadcast) call.root = random.pick(set);
      return call.root != was;
    }
    default:
      if (call.tensors.size() < 2) return false;
      call.tensors.pop_back();
      return true;
  }
}

}  // namespace

Op draw_op(Random& random, OpKind kind, int set, const std::vector<int>& ranks, int world,
           std::string name, const CallLimits& limits) {
  Call call;
  call.value_seed = random.next();
  call.kind = kind;
  call.name = std::move(name);
  call.set = set;
  if (reduces(kind)) {
    do call.op = static_cast<ReduceOp>(random.below(6));
    while (kind == OpKind::Reducescatter && call.op != ReduceOp::Sum &&
           call.op != ReduceOp::Average);
    call.prescale = random.pick(kScales);
    call.postscale = random.pick(kScales);
  }
  if (kind == OpKind::Broadcast) call.root = random.pick(ranks);
  if (kind != OpKind::Barrier) {
    const int tensors = random.one_in(3) ? random.between(1, limits.largest_group) : 1;
    const auto dtype = draw_dtype(random, kind, call.op);
    const bool mixed = random.one_in(4);
    for (int t = 0; t < tensors; ++t) {
      auto& tensor = call.tensors.emplace_back();
      tensor.dtype = mixed ? draw_dtype(random, kind, call.op) : dtype;
      tensor.shape = draw_shape(random, kind, limits);
    }
  }
  Op op;
  op.calls.resize(static_cast<std::size_t>(world));
  for (const int rank : ranks) {
    auto& own = op.calls[static_cast<std::size_t>(rank)];
    own = call;
    draw_own(random, *own, ranks.size());
  }
  return op;
}

Op draw_steady_op(Random& random, OpKind kind, int set, const std::vector<int>& ranks, int world,
                  std::string name) {
  Op op = draw_op(random, kind, set, ranks, world, std::move(name), {1, false});
  if (kind == OpKind::Barrier) return op;
  TensorDraw alike = op.calls[static_cast<std::size_t>(ranks.front())]->tensors.front();
  if (!random.one_in(3)) alike.shape = random.pick(kMedium);
  if (kind == OpKind::Alltoall) alike.splits = draw_splits(random, alike.shape[0], ranks.size());
  for (const int rank : ranks) {
    auto& own = op.calls[static_cast<std::size_t>(rank)]->tensors.front();
    own.shape = alike.shape;
    own.splits = alike.splits;
    own.present = true;
  }
  return op;
}

bool spoil(Random& random, Op& op, const std::vector<int>& ranks) {
  std::vector<int> callers;
  for (const int rank : ranks)
    if (op.calls[static_cast<std::size_t>(rank)]) callers.push_back(rank);
  if (callers.size() < 2) return false;
  const int how = random.below(6);
  bool spoilt = false;
  for (const int rank : some_of(random, callers))
    spoilt = spoil_call(random, *op.calls[static_cast<std::size_t>(rank)],
                        random.one_in(8) ? random.below(6) : how, ranks) ||
             spoilt;
  return spoilt;
}

const std::vector<OpKind> kRefuseScalars{OpKind::Allgather, OpKind::Alltoall,
                                         OpKind::Reducescatter};

Step draw_refusal(Random& random, int rank, int world, const std::vector<SetDraw>& sets) {
  Step step;
  step.kind = Step::Kind::Refused;
  step.refusal.kind = Expected::Kind::InvalidArgument;
  const auto refused = [&](OpKind kind, int set, const std::string& why) {
    const auto& members = sets[static_cast<std::size_t>(set)].ranks;
    const std::string name = random.one_in(3) ? "" : "refused";
    step.refused = *draw_op(random, kind, set, members, world, name, {2, false})
                        .calls[static_cast<std::size_t>(members[0])];
    step.refusal.fragments = {why, "'" + name + "'"};
  };
  switch (random.below(6)) {
    case 0: {
      int id = random.one_in(2) ? -1 : static_cast<int>(sets.size()) + 5;
      for (std::size_t i = 0; i < sets.size(); ++i)
        if (sets[i].removed) id = static_cast<int>(i);
      refused(OpKind::Broadcast, 0, "there is no process set " + std::to_string(id));
      step.refused.set = id;
      break;
    }
    case 1:
      for (std::size_t i = 0; i < sets.size(); ++i) {
        const auto& ranks = sets[i].ranks;
        if (sets[i].removed || std::find(ranks.begin(), ranks.end(), rank) != ranks.end()) continue;
        refused(OpKind::Allgather, static_cast<int>(i),
                "rank " + std::to_string(rank) + " is not in process set " + std::to_string(i));
        return step;
      }
      [[fallthrough]];
    case 2: {
      const int root = random.one_in(2) ? -1 : world;
      refused(OpKind::Broadcast, 0, "root rank " + std::to_string(root) + " is not in");
      step.refused.root = root;
      break;
    }
    case 3: {
      refused(OpKind::Alltoall, 0, "splits");
      auto& tensor = step.refused.tensors.back();
      const int how = random.below(3);
      if (how == 0) tensor.splits.push_back(0);
      if (how == 1) tensor.splits.back() = tensor.shape[0] + 1;
      if (how == 2) tensor.splits.front() = -1;
      break;
    }
    case 4:
      refused(random.pick(kRefuseScalars), 0, "a scalar");
      step.refused.tensors.back().shape.clear();
      break;
    default: {
      refused(random.one_in(4) ? OpKind::Reducescatter : OpKind::Allreduce, 0, "is not supported");
      auto& tensor = step.refused.tensors.back();
      do {
        tensor.dtype = static_cast<DataType>(random.below(kDataTypes));
        step.refused.op = static_cast<ReduceOp>(random.below(6));
      } while (is_defined(step.refused.kind, tensor.dtype, step.refused.op));
    }
  }
  return step;
}

}  // namespace hvd::test
