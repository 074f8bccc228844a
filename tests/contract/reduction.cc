#include "tests/contract/reduction.h"

#include <algorithm>
#include <cstring>

namespace hvd::contract {

namespace {

Values values_of(const Context& context, const Asked& asked) {
  if (asked.exact) return Values::Exact;
  if (asked.form.scales != Scales::None) return Values::Limited;
  // The sum of an average of int64 may wrap in NCCL (ops/gpu/nccl/reduction_plan.h).
  const bool may_wrap =
      context.setting.any_order && asked.dtype == DataType::Int64 && asked.op == ReduceOp::Average;
  return may_wrap ? Values::Limited : Values::Full;
}

}  // namespace

Reducing::Reducing(Context& context, const Asked& asked, Shape shape, std::uint64_t salt)
    : in_place_(asked.form.in_place) {
  const std::size_t count = count_of(shape);
  const Values values = values_of(context, asked);
  const auto is_absent = [&](int rank) {
    return std::find(asked.absent.begin(), asked.absent.end(), rank) != asked.absent.end();
  };
  std::string key = context.setting.name + type_name(asked.dtype) + reduction_name(asked.op) + " " +
                    std::to_string(count) + " " + std::to_string(salt) + " " +
                    std::to_string(static_cast<int>(values)) +
                    text_of({.scales = asked.form.scales});
  for (const int rank : asked.ranks) key += (is_absent(rank) ? " -" : " ") + std::to_string(rank);
  const auto worked = worked_out(key, [&] {
    Worked made;
    for (const int rank : asked.ranks)
      made.inputs.push_back(is_absent(rank)
                                ? Block(count * type_bytes(asked.dtype))
                                : make_values(asked.dtype, asked.op, values, rank,
                                              static_cast<int>(asked.ranks.size()), count, salt));
    const oracle::Reduction how{asked.dtype, asked.op, asked.form.prescale(),
                                asked.form.postscale()};
    // Adasum keeps the places of ranks that have joined among its pairs.
    const auto domains = context.setting.domains_of(
        asked.ranks, asked.op == ReduceOp::Adasum ? std::vector<int>{} : asked.absent);
    made.expected = context.setting.any_order ? reduced(how, made.inputs, true)
                                              : reduced_by_domains(how, made.inputs, domains);
    return made;
  });
  expected_ = worked->expected;
  const auto place =
      std::find(asked.ranks.begin(), asked.ranks.end(), context.rank) - asked.ranks.begin();
  before_ = worked->inputs.at(static_cast<std::size_t>(place));
  input_ = Memory(context, asked.form.arena, before_);
  if (!in_place_)
    output_ = Memory(context, asked.form.arena, Block(before_.size(), std::byte{0xCD}));
  tensor_ = {asked.dtype, std::move(shape), input_.data(),
             in_place_ ? input_.data() : output_.data()};
}

Block Reducing::result() const {
  const auto* data = static_cast<const std::byte*>(tensor_.output);
  return data == nullptr ? Block() : Block(data, data + before_.size());
}

void Reducing::check(Context& context) const {
  const auto wrong = difference(expected_, static_cast<const std::byte*>(tensor_.output));
  if (!wrong.empty()) context.fail(shape_text(tensor_.shape) + ": " + wrong);
  context.expect(output_.margin_is_intact(),
                 shape_text(tensor_.shape) + ": bytes behind the output were written");
  if (!in_place_) check_input(context);
}

void Reducing::check_input(Context& context) const {
  const bool same =
      before_.empty() || std::memcmp(input_.data(), before_.data(), before_.size()) == 0;
  context.expect(same, shape_text(tensor_.shape) + ": the input was changed");
  context.expect(input_.margin_is_intact(),
                 shape_text(tensor_.shape) + ": bytes behind the input were written");
}

Call allreduce_call(const Context& context, const Asked& asked, std::string name) {
  Call call;
  call.kind = OpKind::Allreduce;
  if (asked.form.named) call.name = std::move(name);
  call.set = context.id_of(asked.form.set);
  call.op = asked.op;
  call.prescale = asked.form.prescale();
  call.postscale = asked.form.postscale();
  call.device = context.setting.device;
  return call;
}

std::vector<Results> run_all(Context& context, const Form& form, const std::vector<Call>& calls) {
  std::vector<Results> results(calls.size());
  if (!form.burst) {
    for (std::size_t i = 0; i < calls.size(); ++i) results[i] = context.endpoint.run(calls[i]);
    return results;
  }
  const bool reversed = form.named && context.rank % 2 == 1;
  std::vector<Wait> waits(calls.size());
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const std::size_t at = reversed ? calls.size() - 1 - i : i;
    waits[at] = context.endpoint.start(calls[at]);
  }
  for (std::size_t i = 0; i < calls.size(); ++i) results[i] = waits[i]();
  return results;
}

std::vector<Results> run_again(Context& context, const Form& form,
                               const std::vector<Again>& operations) {
  std::vector<Results> results(operations.size());
  const std::size_t n = operations.size();
  const auto turned = static_cast<std::size_t>(context.rank);
  for (std::size_t i = 0; i < n; ++i) {
    const std::size_t number = form.burst ? (i + turned) % n : i;
    operations[number].start();
    if (!form.burst) results[number] = operations[number].wait();
  }
  for (std::size_t i = 0; form.burst && i < n; ++i) {
    const std::size_t number = (i + 2 * turned + 1) % n;
    results[number] = operations[number].wait();
  }
  return results;
}

void check_unnamed(Context& context) {
  if (!context.endpoint.supports(OpKind::Allreduce, DataType::Float32, ReduceOp::Sum,
                                 context.setting.device))
    return;
  const Asked asked{
      DataType::Float32, ReduceOp::Sum, {.named = false}, context.ranks_of(SetKind::Global)};
  const Reducing reducing(context, asked, {5}, 77);
  Call call = allreduce_call(context, asked, "");
  call.tensors = {reducing.tensor()};
  context.endpoint.run(call);
  reducing.check(context);
}

}  // namespace hvd::contract
