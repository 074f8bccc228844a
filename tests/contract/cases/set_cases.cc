// Process sets, barriers, joining, shutting down.

#include <algorithm>

#include "hvd/errors.h"
#include "tests/contract/reduction.h"
#include "tests/contract/refusal.h"

namespace hvd::contract {

namespace {

struct InSet {
  Reducing reducing;
  Call call;
};

InSet make_in_set(Context& context, SetKind set, const std::string& name, std::uint64_t salt) {
  const Asked asked{DataType::Float32, ReduceOp::Sum, {.set = set}, context.ranks_of(set)};
  InSet made{Reducing(context, asked, {101}, salt), allreduce_call(context, asked, name)};
  made.call.tensors = {made.reducing.tensor()};
  return made;
}

/// All three sets at once under the same names, with barriers between, in another order on odd
/// ranks.
void overlapping_sets(Context& context) {
  std::vector<SetKind> sets{SetKind::Global, SetKind::Early, SetKind::Late};
  if (context.rank % 2 == 1) std::reverse(sets.begin(), sets.end());
  std::vector<InSet> all;
  for (const SetKind set : sets)
    for (int i = 0; i < 5; ++i)
      if (context.is_in(set))
        all.push_back(
            make_in_set(context, set, "shared " + std::to_string(i),
                        static_cast<std::uint64_t>(i) * 10 + static_cast<std::uint64_t>(set)));
  std::vector<Wait> waits;
  for (const InSet& one : all) waits.push_back(context.endpoint.start(one.call));
  context.endpoint.barrier(0);
  for (const Wait& wait : waits) wait();
  for (const InSet& one : all) one.reducing.check(context);
  for (const SetKind set : {SetKind::Early, SetKind::Late})
    if (context.is_in(set)) context.endpoint.barrier(context.id_of(set));
}

void made_and_removed(Context& context) {
  const std::vector<int> last{context.size - 1};
  const int made = context.endpoint.add_set(last);
  context.expect(made > context.late_set, "the id of a set was used again");
  const int saved = std::exchange(context.late_set, made);
  const Asked asked{DataType::Float32, ReduceOp::Average, {.set = SetKind::Late}, last};
  if (context.rank == last.front()) {
    const Reducing reducing(context, asked, {12}, 6);
    Call call = allreduce_call(context, asked, "alone");
    call.tensors = {reducing.tensor()};
    context.endpoint.run(call);
    reducing.check(context);
  }
  context.endpoint.remove_set(made);
  const Memory memory(context, false, Block(48));
  Call call = allreduce_call(context, asked, "gone");
  call.tensors = {{DataType::Float32, {12}, memory.data(), memory.data()}};
  context.late_set = saved;
  check_refused(context, last.front(), call, {"there is no process set"});
}

/// Rank r does r allreduces and joins: the k-th counts the ranks below k as zeros, and the last
/// rank is the last to join.
void join_one_by_one(Context& context, DataType dtype, ReduceOp op) {
  context.need(OpKind::Allreduce, dtype, op);
  const auto ranks = context.ranks_of(SetKind::Global);
  for (int turn = 0; turn < context.rank; ++turn) {
    const std::vector<int> absent(ranks.begin(), ranks.begin() + turn + 1);
    const Asked asked{dtype, op, {}, ranks, absent};
    const Reducing reducing(context, asked, {37}, static_cast<std::uint64_t>(turn));
    Call call = allreduce_call(context, asked, "while others have joined " + std::to_string(turn));
    call.tensors = {reducing.tensor()};
    context.endpoint.run(call);
    reducing.check(context);
  }
  context.equal(context.endpoint.join(0), context.size - 1, "the rank that joined last");
  check_unnamed(context);
}

/// Rank 0 has joined; what cannot do without it fails on the others, and works afterwards. The
/// ranks meet in another set of all of them, so that the others join only when rank 0 has tried
/// what it may no longer do.
void missed(Context& context, OpKind kind, bool into) {
  context.need(kind);
  const int meeting = context.endpoint.add_set(context.ranks_of(SetKind::Global));
  const Memory memory(context, false, Block(static_cast<std::size_t>(context.size) * 4));
  Call call;
  call.kind = kind;
  call.name = "missed";
  call.device = context.setting.device;
  call.root = context.size - 1;
  call.tensors = {{DataType::Float32, {context.size}, memory.data(), memory.data()}};
  const auto n = static_cast<std::int64_t>(context.size);
  const Memory result(context, false, Block(static_cast<std::size_t>(n * n) * 4));
  if (into) {
    call.into = true;
    call.tensors.front().output = result.data();
    call.tensors.front().output_rows = kind == OpKind::Allgather  ? n * n
                                       : kind == OpKind::Alltoall ? n
                                                                  : 1;
  }
  std::function<int()> joining;
  try {
    if (context.rank == 0) {
      joining = start_join(context.endpoint.engine(), 0);
      context.endpoint.start(call);
      context.fail("a rank that has joined may submit");
    } else {
      context.endpoint.run(call);
      context.fail("it did without a rank that has joined");
    }
  } catch (const Joined& error) {
    context.expect(contains(error.what(), "'missed'") && contains(error.what(), "0"),
                   std::string("the text is ") + error.what());
  }
  context.endpoint.barrier(meeting);
  context.rank == 0 ? joining() : context.endpoint.join(0);
  context.endpoint.remove_set(meeting);
  context.endpoint.run(call);
  check_unnamed(context);
}

}  // namespace

void add_set_cases(Cases& cases, const Setting& /*setting*/) {
  for (int i = 0; i < 10; ++i)
    cases.push_back({"sets/overlapping, at once " + std::to_string(i), overlapping_sets});
  cases.push_back({"sets/made and removed", made_and_removed});
  cases.push_back({"sets/different lists", [](Context& context) {
                     if (context.size < 2) return;
                     try {
                       context.endpoint.add_set({context.rank == 0 ? 0 : 1});
                       context.fail("no disagreement was found");
                     } catch (const Mismatch&) {
                     }
                     check_unnamed(context);
                   }});
  cases.push_back({"barrier", [](Context& context) {
                     for (int i = 0; i < 20; ++i) context.endpoint.barrier(0);
                   }});
}

void add_join_cases(Cases& cases, const Setting& setting) {
  for (const ReduceOp op : kAllReductions)
    for (const DataType dtype : kAllTypes)
      if (allreduce_is_defined(dtype, op))
        cases.push_back({std::string("join/") + type_name(dtype) + " " + reduction_name(op),
                         [=](Context& context) { join_one_by_one(context, dtype, op); }});
  if (setting.size < 2) return;
  for (const OpKind kind :
       {OpKind::Allgather, OpKind::Broadcast, OpKind::Alltoall, OpKind::Reducescatter})
    for (const bool into : {false, true}) {
      if (into && kind == OpKind::Broadcast) continue;
      cases.push_back({"join/missed by operation " + std::to_string(static_cast<int>(kind)) +
                           (into ? " into" : ""),
                       [=](Context& context) { missed(context, kind, into); }});
    }
}

void run_shutdown_cell(Context& context) {
  Wait pending;
  const InSet made = make_in_set(context, SetKind::Global, "pending at shutdown", 1);
  if (context.rank == 0 && context.size > 1) pending = context.endpoint.start(made.call);
  float never = 0;
  std::function<int()> unsent;  // a recv of what nobody sends
  if (context.rank == 0)
    unsent = context.endpoint.start_recv({DataType::Float32, {1}, &never, context.size - 1, 99});
  context.endpoint.shutdown();
  for (int again = 0; unsent && again < 2; ++again) try {
      unsent();
      context.fail("a recv that was pending at shutdown() did not fail");
    } catch (const Shutdown&) {
    } catch (const RankFailed& error) {  // of a world that its sender has left before
      if (std::string_view(error.what()).find("has left the world") == std::string_view::npos)
        throw;
    }
  if (!pending) return;
  for (int again = 0; again < 2; ++again) try {
      pending();
      context.fail("what was pending at shutdown() did not fail");
    } catch (const Shutdown&) {
    } catch (const RankFailed& error) {
      if (std::string_view(error.what()).find("has left the world") == std::string_view::npos)
        throw;
    }
}

}  // namespace hvd::contract
