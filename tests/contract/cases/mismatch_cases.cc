// Disagreements: raised on every rank of the set in the same round, with the name and what each
// group of ranks sent, for the first thing that differs in the order of docs/semantics.md,
// "Errors"; and the name works right after.

#include <algorithm>

#include "hvd/errors.h"
#include "tests/contract/reduction.h"
#include "tests/contract/refusal.h"

namespace hvd::contract {

namespace {

/// What ranks send, and how the text must say it.
struct Said {
  OpKind kind = OpKind::Allreduce;
  std::vector<std::pair<DataType, Shape>> tensors;
  ReduceOp op = ReduceOp::Sum;
  double prescale = 1;
  int root = 0;  ///< place in the set
  bool other_device = false;
  std::string text;
};

struct Disagreement {
  std::string name, what;  ///< `what` differs
  Said even, odd;          ///< places of the set
};

constexpr DataType kF32 = DataType::Float32;

namespace disagreements {

using Pair = std::pair<DataType, Shape>;

Said base() { return {.tensors = {{kF32, {17, 3}}}, .text = "float32 [17, 3]"}; }
template <class Change>
Said with(Change change) {
  Said said = base();
  change(said);
  return said;
}
template <class Change>
Said of(OpKind kind, Change change) {
  Said said = base();
  said.kind = kind;
  change(said);
  return said;
}
void nothing(Said& /*said*/) {}
auto tensor(DataType dtype, Shape shape) {
  return [=](Said& said) {
    said.tensors = {{dtype, shape}};
    said.text = std::string(type_name(dtype)) + " " + shape_text(shape);
  };
}
auto scale(const char* text, double factor) {
  return [=](Said& said) {
    said.prescale = factor;
    said.text = text;
  };
}
auto reduce(ReduceOp op) {
  return [=](Said& said) {
    said.op = op;
    said.text = reduction_name(op);
  };
}
auto group(std::vector<Pair> tensors, const char* text) {
  return [=](Said& said) {
    said.tensors = tensors;
    said.text = text;
  };
}

std::vector<Disagreement> about_allreduce() {
  const Pair a{kF32, {3}}, b{kF32, {4}}, c{DataType::Int32, {4}};
  return {
      {"allreduce dtype", "the data type", base(), with(tensor(DataType::Float64, {17, 3}))},
      {"allreduce shape", "the shape", base(), with(tensor(kF32, {18, 3}))},
      {"allreduce dimensions", "the shape", with(tensor(kF32, {17, 1311})),
       with(tensor(kF32, {17, 23, 57}))},
      {"allreduce scales", "the scale factors", with(scale("prescale 1, postscale 1", 1)),
       with(scale("prescale 2, postscale 1", 2))},
      {"allreduce op", "the reduce op", with(reduce(ReduceOp::Sum)), with(reduce(ReduceOp::Max))},
      {"group size", "the shape", with(group({a, b}, "2 tensors")),
       with(group({a, b, b}, "tensor 2 is float32 [4]"))},
      {"group member shape", "the shape", with(group({a, b}, "tensor 1 is float32 [4]")),
       with(group({a, a}, "tensor 1 is float32 [3]"))},
      {"group member dtype", "the data type", with(group({a, b}, "tensor 1 is float32 [4]")),
       with(group({a, c}, "tensor 1 is int32 [4]"))},
      {"order: dtype, shape", "the data type", base(), with(tensor(DataType::Float64, {18, 3}))},
      {"order: shape, scales", "the shape", base(), with([](Said& said) {
         tensor(kF32, {18, 3})(said), said.prescale = 2;
       })},
      {"order: scales, op", "the scale factors", with(scale("prescale 1, postscale 1", 1)),
       with([](Said& said) {
         reduce(ReduceOp::Max)(said), scale("prescale 2, postscale 1", 2)(said);
       })},
  };
}

std::vector<Disagreement> about_other_operations() {
  return {
      {"allgather dtype", "the data type", of(OpKind::Allgather, nothing),
       of(OpKind::Allgather, tensor(DataType::Int32, {17, 3}))},
      {"allgather dimension 1", "the shape", of(OpKind::Allgather, nothing),
       of(OpKind::Allgather, tensor(kF32, {5, 4}))},
      {"allgather dimensions", "the shape", of(OpKind::Allgather, nothing),
       of(OpKind::Allgather, tensor(kF32, {17}))},
      {"broadcast dtype", "the data type", of(OpKind::Broadcast, nothing),
       of(OpKind::Broadcast, tensor(DataType::Int32, {17, 3}))},
      {"broadcast shape", "the shape", of(OpKind::Broadcast, nothing),
       of(OpKind::Broadcast, tensor(kF32, {3, 17}))},
      {"broadcast root", "the root rank",
       of(OpKind::Broadcast, [](Said& said) { said.text = "root"; }),
       of(OpKind::Broadcast, [](Said& said) { said.root = 1, said.text = "root"; })},
      {"order: shape, root", "the shape", of(OpKind::Broadcast, nothing),
       of(OpKind::Broadcast, [](Said& said) { tensor(kF32, {3})(said), said.root = 1; })},
      {"alltoall dimension 1", "the shape", of(OpKind::Alltoall, tensor(kF32, {0, 3})),
       of(OpKind::Alltoall, tensor(kF32, {0, 4}))},
      {"alltoall dtype", "the data type", of(OpKind::Alltoall, tensor(kF32, {0, 3})),
       of(OpKind::Alltoall, tensor(DataType::Bool, {0, 3}))},
      {"reducescatter shape", "the shape", of(OpKind::Reducescatter, nothing),
       of(OpKind::Reducescatter, tensor(kF32, {18, 3}))},
      {"reducescatter op", "the reduce op", of(OpKind::Reducescatter, reduce(ReduceOp::Sum)),
       of(OpKind::Reducescatter, reduce(ReduceOp::Average))},
      {"reducescatter scales", "the scale factors",
       of(OpKind::Reducescatter, scale("prescale 1, postscale 1", 1)),
       of(OpKind::Reducescatter, scale("prescale 2, postscale 1", 2))},
  };
}

std::vector<Disagreement> about_operation_and_device() {
  return {
      {"operation", "the operation", with([](Said& said) { said.text = "allreduce"; }),
       of(OpKind::Broadcast, [](Said& said) { said.text = "broadcast"; })},
      {"order: dtype, operation", "the data type", base(),
       of(OpKind::Broadcast, tensor(DataType::Int32, {17, 3}))},
      {"order: operation, shape", "the operation",
       with([](Said& said) { said.text = "allreduce"; }),
       of(OpKind::Broadcast, [](Said& said) { tensor(kF32, {3})(said), said.text = "broadcast"; })},
      {"device", "the device", with([](Said& said) { said.text = "cuda"; }),
       with([](Said& said) { said.other_device = true, said.text = "cpu"; })},
      {"order: op, device", "the reduce op", with(reduce(ReduceOp::Sum)),
       with([](Said& said) { reduce(ReduceOp::Max)(said), said.other_device = true; })},
  };
}

std::vector<Disagreement> all() {
  std::vector<Disagreement> list = about_allreduce();
  for (const auto& more : {about_other_operations(), about_operation_and_device()})
    list.insert(list.end(), more.begin(), more.end());
  return list;
}

}  // namespace disagreements

/// "ranks 0, 2: float32 [17, 3]"
std::string group_text(const std::vector<int>& ranks, const std::string& said) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  // every second rank, or neighbours: never more than two in a row
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const bool follows = i > 0 && ranks[i] == ranks[i - 1] + 1;
    text += (i == 0 ? "" : follows ? "-" : ", ") + std::to_string(ranks[i]);
  }
  return text + ": " + said;
}

void check_disagreement(Context& context, const Disagreement& about, SetKind set) {
  for (const Said* said : {&about.even, &about.odd})
    for (const auto& [dtype, shape] : said->tensors) context.need(said->kind, dtype, said->op);
  if (about.odd.other_device && context.setting.device.kind == DeviceKind::Cpu)
    throw Skip{"one kind of device: none can differ"};
  const auto ranks = context.ranks_of(set);
  if (ranks.size() < 2 || !context.is_in(set)) return;
  const auto place =
      static_cast<std::size_t>(std::find(ranks.begin(), ranks.end(), context.rank) - ranks.begin());
  std::vector<int> groups[2];
  for (std::size_t i = 0; i < ranks.size(); ++i) groups[i % 2].push_back(ranks[i]);
  const Said& mine = place % 2 == 0 ? about.even : about.odd;
  std::vector<Memory> memories;
  Call call;
  call.kind = mine.kind;
  call.name = "disagreement about " + about.name;
  call.set = context.id_of(set);
  call.op = mine.op;
  call.prescale = mine.prescale;
  call.root = ranks[static_cast<std::size_t>(mine.root)];
  call.device = mine.other_device ? Device{} : context.setting.device;
  for (const auto& [dtype, shape] : mine.tensors) {
    memories.emplace_back(context, false, Block(count_of(shape) * type_bytes(dtype)));
    call.tensors.push_back({dtype, shape, memories.back().data(), memories.back().data()});
  }
  for (int round = 0; round < 2; ++round) {
    const Stats before = context.endpoint.stats();
    try {
      context.endpoint.run(call);
      context.fail("no disagreement was found");
    } catch (const Mismatch& error) {
      const std::string text = error.what();
      std::vector<std::string> words{"'" + call.name + "'", about.what + " differ"};
      if (about.even.text == "root") {
        words.push_back(group_text(groups[0], "root " + std::to_string(ranks[0])));
        words.push_back(group_text(groups[1], "root " + std::to_string(ranks[1])));
      } else {
        words.push_back(group_text(groups[0], about.even.text));
        words.push_back(group_text(groups[1], about.odd.text));
      }
      for (const auto& word : words)
        context.expect(contains(text, word), "the text does not say '" + word + "': " + text);
    }
    const Stats after = context.endpoint.stats();
    context.equal(static_cast<std::int64_t>(after.batches_run),
                  static_cast<std::int64_t>(before.batches_run), "batches_run after it");
    // otherwise there was no agreement at all
    const bool agreed = about.even.kind == about.odd.kind;
    context.equal(static_cast<std::int64_t>(after.negotiation_rounds - before.negotiation_rounds),
                  agreed ? 1 : 0, "rounds that it took");
  }
  const Asked asked{kF32, ReduceOp::Sum, {.set = set}, ranks};
  const Reducing reducing(context, asked, {19}, 4);
  Call corrected = allreduce_call(context, asked, call.name);
  corrected.tensors = {reducing.tensor()};
  context.endpoint.run(corrected);
  reducing.check(context);
}

}  // namespace

void add_mismatch_cases(Cases& cases, const Setting& setting) {
  if (setting.size < 2) return;
  for (const Disagreement& about : disagreements::all())
    for (const SetKind set : {SetKind::Global, SetKind::Late}) {
      // it takes the engine a second to be sure
      const bool slow = about.even.kind != about.odd.kind;
      if (set == SetKind::Late && (slow || setting.size < 3)) continue;
      cases.push_back({"mismatch/" + about.name + text_of({.set = set}),
                       [=](Context& context) { check_disagreement(context, about, set); }});
    }
}

}  // namespace hvd::contract
