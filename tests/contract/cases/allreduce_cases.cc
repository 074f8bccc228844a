// Allreduce: every type with every reduction in every shape, in forms that meet pairwise; what is
// refused; groups; fusion.

#include <algorithm>

#include "tests/contract/reduction.h"
#include "tests/contract/refusal.h"

namespace hvd::contract {

namespace {

constexpr std::size_t kBurst = 4;

std::string pair_text(DataType dtype, ReduceOp op) {
  return std::string(type_name(dtype)) + " " + reduction_name(op);
}

void allreduce_one(Context& context, DataType dtype, ReduceOp op, const Shape& shape,
                   const Form& form) {
  context.need(OpKind::Allreduce, dtype, op);
  if (!context.is_in(form.set)) return;
  const Asked asked{dtype, op, form, context.ranks_of(form.set)};
  std::vector<Reducing> reducing;
  std::vector<Call> calls;
  for (std::size_t i = 0; i < (form.burst ? kBurst : 1); ++i) {
    // The neighbours of a large tensor are small.
    const Shape own = i == 0 ? shape : Shape{static_cast<std::int64_t>(count_of(shape) % 97 + i)};
    reducing.emplace_back(context, asked, own, count_of(shape) * 31 + i);
    calls.push_back(allreduce_call(
        context, asked,
        "allreduce " + pair_text(dtype, op) + shape_text(shape) + std::to_string(i)));
    calls.back().tensors = {reducing.back().tensor()};
  }
  run_all(context, form, calls);
  for (const Reducing& one : reducing) one.check(context);
}

/// Started four times: what is small goes another way from the third time on. In place once, which
/// changes the input.
void allreduce_again(Context& context, DataType dtype, ReduceOp op, const Form& form) {
  context.need(OpKind::Allreduce, dtype, op);
  if (!context.is_in(form.set)) return;
  const Asked asked{dtype, op, form, context.ranks_of(form.set)};
  std::vector<Reducing> reducing;
  std::vector<Again> operations;
  for (const Shape& shape : {Shape{kLarge}, Shape{}, Shape{3, 5, 7}, Shape{0}}) {
    reducing.emplace_back(context, asked, shape, count_of(shape));
    Call call = allreduce_call(context, asked, "again " + pair_text(dtype, op) + shape_text(shape));
    call.tensors = {reducing.back().tensor()};
    operations.push_back(context.endpoint.describe(call));
  }
  for (int round = 0; round < (form.in_place ? 1 : 4); ++round) {
    run_again(context, form, operations);
    for (const Reducing& one : reducing) one.check(context);
  }
}

/// A group is one batch for each of its types, whatever the timing.
void allreduce_group(Context& context, const std::vector<DataType>& dtypes, ReduceOp op,
                     const Form& form) {
  for (const DataType dtype : dtypes) context.need(OpKind::Allreduce, dtype, op);
  if (!context.is_in(form.set)) return;
  static const std::vector<Shape> kMembers{{33}, {}, {0}, {3, 5}, {257}};
  std::vector<Reducing> reducing;
  Call call;
  for (std::size_t i = 0; i < kMembers.size() * dtypes.size(); ++i) {
    const Asked asked{dtypes[i % dtypes.size()], op, form, context.ranks_of(form.set)};
    call = i == 0
               ? allreduce_call(context, asked,
                                "group " + std::string(reduction_name(op)) + type_name(asked.dtype))
               : call;
    reducing.emplace_back(context, asked, kMembers[i / dtypes.size()], i);
    call.tensors.push_back(reducing.back().tensor());
  }
  const Stats before = context.endpoint.stats();
  const Wait wait = form.burst ? context.endpoint.start(call) : Wait();
  form.burst ? wait() : context.endpoint.run(call);
  const Stats after = context.endpoint.stats();
  for (const Reducing& one : reducing) one.check(context);
  context.equal(static_cast<std::int64_t>(after.batches_run - before.batches_run),
                static_cast<std::int64_t>(dtypes.size()), "the number of batches of the group");
  context.equal(static_cast<std::int64_t>(after.tensors_fused - before.tensors_fused),
                static_cast<std::int64_t>(call.tensors.size()),
                "the number of tensors that shared a batch");
}

}  // namespace

void add_allreduce_cases(Cases& cases, const Setting& setting) {
  const auto forms = pairwise_forms({.arena = setting.arena});
  for (const DataType dtype : kAllTypes)
    for (const ReduceOp op : kAllReductions) {
      const std::string pair = "allreduce/" + pair_text(dtype, op) + "/";
      if (!allreduce_is_defined(dtype, op)) {
        cases.push_back({pair + "refused", [=](Context& context) {
                           check_refused_pair(context, OpKind::Allreduce, dtype, op);
                         }});
        continue;
      }
      for (std::size_t s = 0; s < all_shapes().size(); ++s)
        for (std::size_t f = 0; f < forms.size(); ++f) {
          const Shape& shape = all_shapes()[s];
          const Form form = forms[f];
          // The large one: three forms with each pair, and all over the pairs.
          const std::size_t turn =
              static_cast<std::size_t>(dtype) * 6 + static_cast<std::size_t>(op);
          if (count_of(shape) >= static_cast<std::size_t>(kLarge) && (f + turn) % forms.size() >= 3)
            continue;
          // Of what differs from Min and Max in the kernels alone, two forms with each shape.
          if (is_bitwise(op) && (f + s + turn) % forms.size() >= 2) continue;
          cases.push_back(
              {pair + shape_text(shape) + " " + text_of(form),
               [=](Context& context) { allreduce_one(context, dtype, op, shape, form); }, true});
        }
    }
  std::size_t turn = 0;
  for (const DataType dtype : kAllTypes)
    for (const ReduceOp op : kAllReductions) {
      if (!setting.front_door || !allreduce_is_defined(dtype, op)) continue;
      for (int i = 0; i < 2; ++i) {
        const Form form = forms[turn++ % forms.size()];
        cases.push_back({"allreduce/persistent " + pair_text(dtype, op) + " " + text_of(form),
                         [=](Context& context) { allreduce_again(context, dtype, op, form); }});
      }
    }
  if (!setting.arena)
    cases.push_back(
        {"allreduce/arena", [](Context&) { throw Skip{"arena memory: the ranks share none"}; }});
}

void add_grouped_allreduce_cases(Cases& cases, const Setting& setting) {
  const auto forms = pairwise_forms({.arena = setting.arena});
  std::size_t turn = 0;
  for (const ReduceOp op : kAllReductions) {
    std::vector<DataType> defined;
    for (const DataType dtype : kAllTypes) {
      if (!allreduce_is_defined(dtype, op)) continue;
      defined.push_back(dtype);
      for (std::size_t i = 0; i < 3; ++i) {
        const Form form = forms[turn++ % forms.size()];
        cases.push_back({"grouped allreduce/" + pair_text(dtype, op) + "/" + text_of(form),
                         [=](Context& context) { allreduce_group(context, {dtype}, op, form); }});
      }
    }
    // Under the name that groups of one type have had: as if the user had added tensors to them.
    cases.push_back({"grouped allreduce/more tensors " + std::string(reduction_name(op)),
                     [=](Context& context) {
                       allreduce_group(context, {DataType::Float32}, op, {});
                       allreduce_group(context, {DataType::Float32, DataType::Float64}, op, {});
                       allreduce_group(context, {DataType::Float32}, op, {});
                     }});
    for (const Form& form : forms)
      cases.push_back(
          {"grouped allreduce/all types " + std::string(reduction_name(op)) + "/" + text_of(form),
           [=](Context& context) { allreduce_group(context, defined, op, form); }});
  }
}

}  // namespace hvd::contract
