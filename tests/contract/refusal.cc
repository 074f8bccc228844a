#include "tests/contract/refusal.h"

#include "tests/contract/reduction.h"

namespace hvd::contract {

bool contains(const std::string& text, const std::string& word) {
  return text.find(word) != std::string::npos;
}

void check_refused_call(Context& context, int culprit, const std::function<void()>& call,
                        const std::vector<std::string>& words) {
  if (context.rank == culprit) {
    const Stats before = context.endpoint.stats();
    try {
      call();
      context.fail("the call was not refused");
    } catch (const InvalidArgument& error) {
      for (const auto& word : words)
        context.expect(contains(error.what(), word),
                       std::string("the refusal does not say '") + word + "': " + error.what());
    } catch (const std::exception& error) {
      context.fail(std::string("refused with something else than InvalidArgument: ") +
                   error.what());
    }
    const Stats after = context.endpoint.stats();
    context.equal(static_cast<std::int64_t>(after.tensors_submitted),
                  static_cast<std::int64_t>(before.tensors_submitted),
                  "tensors_submitted after the refusal");
    context.equal(static_cast<std::int64_t>(after.negotiation_rounds),
                  static_cast<std::int64_t>(before.negotiation_rounds),
                  "negotiation_rounds after the refusal");
    context.equal(static_cast<std::int64_t>(after.bytes_zero_copy),
                  static_cast<std::int64_t>(before.bytes_zero_copy),
                  "bytes_zero_copy after the refusal");
  }
  check_unnamed(context);
}

void check_refused(Context& context, int culprit, const Call& call,
                   const std::vector<std::string>& words) {
  check_refused_call(
      context, culprit, [&] { context.endpoint.start(call); }, words);
}

void check_refused_pair(Context& context, OpKind kind, DataType dtype, ReduceOp op) {
  if (context.endpoint.supports(kind, dtype, op, context.setting.device)) {
    context.fail("a backend says that it does what is not defined");
    return;
  }
  Memory memory(context, false, Block(4 * type_bytes(dtype)));
  Memory good(context, false, Block(16));
  const Tensor bad{dtype, {4}, memory.data(), memory.data()};
  Call call;
  call.kind = kind;
  call.op = op;
  call.device = context.setting.device;
  const int culprit = static_cast<int>(dtype) % context.size;
  for (const char* name : {"", "refused"}) {
    call.name = name;
    call.tensors = {bad};
    check_refused(context, culprit, call,
                  {name, type_name(dtype), reduction_name(op), "not supported"});
    call.tensors = {{DataType::Float32, {4}, good.data(), good.data()}, bad};
    if (context.endpoint.supports(kind, DataType::Float32, op, context.setting.device))
      check_refused(context, culprit, call,
                    {name, type_name(dtype), reduction_name(op), "not supported"});
  }
  // The name is free.
  if (kind != OpKind::Allreduce) return;
  const Asked asked{DataType::Float32, ReduceOp::Sum, {}, context.ranks_of(SetKind::Global)};
  const Reducing reducing(context, asked, {6}, 5);
  Call after = allreduce_call(context, asked, "refused");
  after.tensors = {reducing.tensor()};
  context.endpoint.run(after);
  reducing.check(context);
}

}  // namespace hvd::contract
