// Calls that are wrong by themselves: refused at the call, on that rank alone, without a trace.

#include "hvd/errors.h"
#include "hvd/hvd.h"
#include "tests/contract/reduction.h"
#include "tests/contract/refusal.h"

namespace hvd::contract {

namespace {

struct Wrong {
  std::string name;
  OpKind kind;
  Shape shape;
  std::vector<std::string> words;
  std::function<void(Context&, Call&)> spoil = [](Context&, Call&) {};
};

std::vector<Wrong> all_wrongs() {
  const auto splits = [](std::function<std::vector<std::int64_t>(int)> make) {
    return [=](Context& context, Call& call) { call.splits = make(context.size); };
  };
  const auto filled = [](std::int64_t rows) {
    return [=](int n) { return std::vector<std::int64_t>(static_cast<std::size_t>(n), rows); };
  };
  return {
      {"allgather of a scalar", OpKind::Allgather, {}, {"scalar"}},
      {"alltoall of a scalar", OpKind::Alltoall, {}, {"scalar"}},
      {"reducescatter of a scalar", OpKind::Reducescatter, {}, {"scalar"}},
      {"too many splits", OpKind::Alltoall, {6}, {"splits"}, splits([filled](int n) {
         return filled(0)(n + 1);
       })},
      {"splits beyond the rows", OpKind::Alltoall, {6}, {"splits"}, splits(filled(7))},
      {"a negative split", OpKind::Alltoall, {6}, {"splits"}, splits(filled(-1))},
      {"an unknown set",
       OpKind::Allreduce,
       {6},
       {"12345"},
       [](Context&, Call& call) { call.set = 12345; }},
      {"a negative set",
       OpKind::Allreduce,
       {6},
       {"-1"},
       [](Context&, Call& call) { call.set = -1; }},
      {"a root outside the world",
       OpKind::Broadcast,
       {6},
       {"root"},
       [](Context& context, Call& call) { call.root = context.size; }},
      {"a negative root",
       OpKind::Broadcast,
       {6},
       {"root"},
       [](Context&, Call& call) { call.root = -1; }},
  };
}

Call call_of(Context& context, const Wrong& wrong, const Memory& memory) {
  Call call;
  call.kind = wrong.kind;
  call.device = context.setting.device;
  call.tensors = {{DataType::Float32, wrong.shape, memory.data(), memory.data()}};
  wrong.spoil(context, call);
  return call;
}

void check_wrong(Context& context, const Wrong& wrong) {
  context.need(wrong.kind);
  const Memory memory(context, false, Block(24));
  Call call = call_of(context, wrong, memory);
  for (int culprit = 0; culprit < context.size; ++culprit)
    for (const char* name : {"", "wrong"}) {
      call.name = name;
      check_refused(context, culprit, call, wrong.words);
    }
}

/// The name in flight on rank 0 alone, so that it cannot be over: its other half comes after the
/// refusal.
void check_duplicate(Context& context) {
  const Asked asked{DataType::Float32, ReduceOp::Sum, {}, context.ranks_of(SetKind::Global)};
  const Reducing reducing(context, asked, {9}, 8);
  Call call = allreduce_call(context, asked, "twice");
  call.tensors = {reducing.tensor()};
  Wait first;
  if (context.rank == 0) first = context.endpoint.start(call);
  check_refused_call(context, 0,
                     [&] {
                       try {
                         context.endpoint.start(call);
                       } catch (const DuplicateName&) {
                         throw;
                       } catch (const InvalidArgument& error) {
                         context.fail(std::string("not a DuplicateName: ") + error.what());
                         throw;
                       }
                     },
                     {"twice"});
  if (context.rank == 0) {
    first();
  } else {
    context.endpoint.run(call);
  }
  reducing.check(context);
}

void check_outside_of_set(Context& context) {
  const Memory memory(context, false, Block(24));
  Call call;
  call.device = context.setting.device;
  call.set = context.late_set;
  call.tensors = {{DataType::Float32, {6}, memory.data(), memory.data()}};
  check_refused(context, 0, call, {"rank 0 is not in process set"});
  call.kind = OpKind::Broadcast;
  call.root = 0;
  check_refused(context, context.size - 1, call, {"root rank 0 is not in process set"});
}

void check_front_door(Context& context) {
  if (!context.setting.front_door)
    throw Skip{"what hvd/hvd.h checks before the engine: seen by the instances of processes"};
  const Memory memory(context, false, Block(24));
  const Buffer six{memory.data(), DataType::Float32, {6}, {}},
      five{memory.data(), DataType::Float32, {5}, {}};
  const Buffer device{memory.data(), DataType::Float32, {6}, {DeviceKind::Cuda, 0}},
      whole{memory.data(), DataType::Int32, {6}, {}};
  const int culprit = context.size - 1;
  check_refused_call(context, culprit, [&] { allreduce(six, five); }, {"[6]", "[5]"});
  check_refused_call(context, culprit, [&] { allreduce(six, whole); }, {"int32"});
  check_refused_call(context, culprit, [&] { grouped_allreduce({}, {}); }, {"0 inputs"});
  check_refused_call(context, culprit, [&] { grouped_allreduce({six, six}, {six}); }, {"2 inputs"});
  check_refused_call(context, culprit,
                     [&] {
                       grouped_allreduce({six, device}, {six, device});
                     },
                     {"one device"});
  check_refused_call(context, culprit, [&] { grouped_allgather({}); }, {"empty group"});
  check_refused_call(context, culprit, [&] { allgather(device); }, {"allgather_into"});
  check_refused_call(context, culprit,
                     [&] {
                       grouped_reducescatter_async({device, device});
                     },
                     {"reducescatter_into"});
  check_refused_call(context, culprit, [&] { alltoall(device, {.splits = {6}}); },
                     {"alltoall_into"});
  check_refused_call(context, culprit, [&] { add_process_set({}); }, {"distinct ranks"});
  check_refused_call(context, culprit, [&] { add_process_set({0, 0}); }, {"distinct ranks"});
  check_refused_call(context, culprit, [&] { add_process_set({context.size}); },
                     {"distinct ranks"});
  check_refused_call(context, culprit, [&] { remove_process_set(global_process_set()); },
                     {"global"});
}

}  // namespace

void add_local_error_cases(Cases& cases, const Setting& setting) {
  for (const Wrong& wrong : all_wrongs())
    cases.push_back(
        {"refused/" + wrong.name, [=](Context& context) { check_wrong(context, wrong); }});
  if (setting.size > 1) {
    const Wrong uneven{"rows that cannot be divided",
                       OpKind::Alltoall,
                       {static_cast<std::int64_t>(setting.size) + 1},
                       {"evenly"}};
    cases.push_back(
        {"refused/" + uneven.name, [=](Context& context) { check_wrong(context, uneven); }});
    cases.push_back({"refused/a name in flight", check_duplicate});
    cases.push_back({"refused/outside of the set", check_outside_of_set});
  }
  cases.push_back({"refused/front door", check_front_door});
}

}  // namespace hvd::contract
