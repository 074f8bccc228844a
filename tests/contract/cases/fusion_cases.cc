// Fusion: tensors in flight share batches where the threshold allows it, and their bits do not
// depend on that.

#include "tests/contract/reduction.h"

namespace hvd::contract {

namespace {

/// The same tensors as a group (one batch), and each by itself: the results go into the notebook,
/// or are compared with it.
void bitwise(Context& context, DataType dtype, ReduceOp op, bool grouped) {
  context.need(OpKind::Allreduce, dtype, op);
  // NCCL's order of summing depends on where in a buffer an element lies: values for which that
  // does not matter.
  const Asked asked{
      dtype, op, {.named = true}, context.ranks_of(SetKind::Global), {}, context.setting.any_order};
  if (context.setting.any_order && op == ReduceOp::Average)
    throw Skip{"nccl: an average's rounding depends on how it is fused"};
  std::vector<Reducing> reducing;
  std::vector<Call> calls;
  for (std::size_t i = 0; i < 8; ++i) {
    const std::string name = std::string("bits ") + type_name(dtype) + reduction_name(op) +
                             (grouped ? "" : std::to_string(i));
    reducing.emplace_back(context, asked, Shape{static_cast<std::int64_t>(i * 211 + 1)}, i);
    if (calls.empty() || !grouped) calls.push_back(allreduce_call(context, asked, name));
    calls.back().tensors.push_back(reducing.back().tensor());
  }
  const Stats before = context.endpoint.stats();
  run_all(context, {.burst = true}, calls);
  const auto fused =
      static_cast<std::int64_t>(context.endpoint.stats().tensors_fused - before.tensors_fused);
  if (grouped) context.equal(fused, 8, "the number of tensors that shared a batch");
  if (!context.setting.fuses) context.equal(fused, 0, "the number of tensors that shared a batch");
  for (std::size_t i = 0; i < reducing.size(); ++i) {
    const std::string key = std::string(type_name(dtype)) + reduction_name(op) + std::to_string(i);
    const Block bits = reducing[i].result();
    const auto& first = context.notebook.try_emplace(key, bits).first->second;
    context.expect(first == bits,
                   "tensor " + std::to_string(i) + " has other bits than in another batch");
  }
}

/// Submits `count` small tensors at once, behind one of `first` elements. Returns how many shared a
/// batch, of this rank.
std::uint64_t run_burst(Context& context, const std::string& name, std::size_t count,
                        std::int64_t first) {
  const Asked asked{
      DataType::Float32, ReduceOp::Sum, {}, context.ranks_of(SetKind::Global), {}, true};
  std::vector<Reducing> reducing;
  std::vector<Call> calls;
  for (std::size_t i = 0; i < count; ++i) {
    reducing.emplace_back(context, asked, Shape{i == 0 ? first : 100}, i);
    calls.push_back(allreduce_call(context, asked, name + " " + std::to_string(i)));
    calls.back().tensors = {reducing.back().tensor()};
  }
  const Stats before = context.endpoint.stats();
  std::vector<Wait> waits;
  for (const Call& call : calls) waits.push_back(context.endpoint.start(call));
  for (const Wait& wait : waits) wait();
  for (const Reducing& one : reducing) one.check(context);
  return context.endpoint.stats().tensors_fused - before.tensors_fused;
}

/// A large tensor holds up the small ones behind it, which are then agreed and fused. Whether they
/// come in time is the machine's. The ranks of several domains need not see the same: all do the
/// same rounds.
void in_flight(Context& context) {
  context.need(OpKind::Allreduce);
  if (context.size == 1)
    throw Skip{"a world of one agrees at once: nothing waits that could be fused, but groups"};
  std::uint64_t fused = 0;
  for (int round = 0; round < 40; ++round) fused += run_burst(context, "in flight", 9, 1 << 19);
  context.expect(fused > 0, "in 40 rounds nothing was fused");
}

/// So many small tensors at once, whose names come back: what is in flight and not waited for
/// travels together.
void burst(Context& context) {
  context.need(OpKind::Allreduce);
  if (context.size == 1)
    throw Skip{"a world of one agrees at once: nothing waits that could be fused, but groups"};
  constexpr std::size_t kTensors = 50;
  constexpr int kRounds = 20;
  std::uint64_t fused = 0;
  for (int round = 0; round < kRounds; ++round) fused += run_burst(context, "burst", kTensors, 100);
  context.expect(fused > kTensors,
                 "of 20 bursts of 50 tensors " + std::to_string(fused) + " shared a batch");
}

}  // namespace

void add_fusion_cases(Cases& cases, const Setting& setting) {
  for (const DataType dtype : kAllTypes)
    for (const ReduceOp op : kAllReductions)
      for (const bool grouped : {true, false})
        if (allreduce_is_defined(dtype, op) && (setting.fuses || !grouped))
          cases.push_back({std::string("bitwise/") + type_name(dtype) + " " + reduction_name(op) +
                               (grouped ? " as a group" : " singly"),
                           [=](Context& context) { bitwise(context, dtype, op, grouped); }});
  if (setting.fuses) cases.push_back({"fusion/in flight", in_flight});
  if (setting.fuses && setting.device.kind == DeviceKind::Cpu)
    cases.push_back({"fusion/burst", burst});
}

}  // namespace hvd::contract
