// Allgather and broadcast: what is only moved, of every type.

#include <algorithm>
#include <cstring>

#include "tests/contract/reduction.h"

namespace hvd::contract {

namespace {

/// How many rows each rank gives.
struct Rows {
  const char* name;
  std::function<std::int64_t(int rank)> of;
  Shape rest;  ///< the dimensions after the first
};

const std::vector<Rows>& all_rows() {
  static const std::vector<Rows> kRows{
      {"equal", [](int) { return 5; }, {}},
      {"one", [](int) { return 1; }, {}},
      {"different", [](int rank) { return rank * 3 + 1; }, {3}},
      {"some none", [](int rank) { return rank % 2 == 0 ? 0 : 7; }, {2, 2}},
      {"all none", [](int) { return 0; }, {4}},
      {"rows of nothing", [](int rank) { return rank + 2; }, {0, 3}},
      {"large", [](int rank) { return kLarge + rank; }, {}},
      {"about a vector", [](int rank) { return 63 + rank % 3; }, {}},
  };
  return kRows;
}

Shape with_rows(std::int64_t rows, const Shape& rest) {
  Shape shape{rows};
  shape.insert(shape.end(), rest.begin(), rest.end());
  return shape;
}

/// This rank's input of an allgather, and what everybody must get.
struct Gathering {
  Gathering(Context& context, DataType type, const Rows& rows, const Form& form, std::uint64_t salt)
      : dtype(type) {
    std::int64_t total = 0;
    for (const int rank : context.ranks_of(form.set)) {
      const Shape own = with_rows(rows.of(rank), rows.rest);
      const Block input = make_bytes(dtype, rank, count_of(own), salt);
      total += own.front();
      expected.insert(expected.end(), input.begin(), input.end());
      if (rank != context.rank) continue;
      before = input;
      memory = Memory(context, form.arena, input);
      tensor = {dtype, own, memory.data(), nullptr};
    }
    shape = with_rows(total, rows.rest);
  }
  void check(Context& context, const Made& made) const {
    context.expect(made.shape == shape,
                   "the shape is " + shape_text(made.shape) + ", not " + shape_text(shape));
    if (!context.expect(made.data.size() == expected.size(), "the result has another size")) return;
    const auto wrong = difference(dtype, expected, made.data.data());
    if (!wrong.empty()) context.fail(wrong);
    context.expect(before.empty() || std::memcmp(before.data(), memory.data(), before.size()) == 0,
                   "the input was changed");
  }
  DataType dtype;
  Memory memory;
  Tensor tensor;
  Block before, expected;
  Shape shape;
};

Call moving_call(const Context& context, OpKind kind, const Form& form, const std::string& name) {
  Call call;
  call.kind = kind;
  if (form.named) call.name = name;
  call.set = context.id_of(form.set);
  call.device = context.setting.device;
  return call;
}

void allgather_one(Context& context, DataType dtype, const Rows& rows, const Form& form) {
  context.need(OpKind::Allgather, dtype);
  if (!context.is_in(form.set)) return;
  std::vector<Gathering> gatherings;
  std::vector<Call> calls;
  for (std::size_t i = 0; i < (form.burst ? 3 : 1); ++i) {
    gatherings.emplace_back(context, dtype, i == 0 ? rows : all_rows()[i], form, i);
    calls.push_back(moving_call(context, OpKind::Allgather, form,
                                "allgather " + std::string(rows.name) + std::to_string(i)));
    calls.back().tensors = {gatherings.back().tensor};
  }
  const auto results = run_all(context, form, calls);
  for (std::size_t i = 0; i < calls.size(); ++i) gatherings[i].check(context, results[i].at(0));
}

void allgather_group(Context& context, const std::vector<DataType>& dtypes, const Form& form) {
  context.need(OpKind::Allgather);
  if (!context.is_in(form.set)) return;
  std::vector<Gathering> gatherings;
  Call call = moving_call(context, OpKind::Allgather, form,
                          "gathered group " + std::to_string(dtypes.size()));
  for (std::size_t i = 0; i < 6; ++i)
    for (const DataType dtype : dtypes) {
      gatherings.emplace_back(context, dtype, all_rows()[i], form, i);
      call.tensors.push_back(gatherings.back().tensor);
    }
  const Stats before = context.endpoint.stats();
  const auto results = run_all(context, form, {call}).front();
  const Stats after = context.endpoint.stats();
  if (!context.expect(results.size() == gatherings.size(),
                      "another number of results than of tensors"))
    return;
  for (std::size_t i = 0; i < gatherings.size(); ++i) gatherings[i].check(context, results[i]);
  context.equal(static_cast<std::int64_t>(after.tensors_fused - before.tensors_fused),
                static_cast<std::int64_t>(gatherings.size()),
                "the number of tensors that shared a batch");
}

void broadcast_one(Context& context, DataType dtype, int root, const Shape& shape,
                   const Form& form) {
  context.need(OpKind::Broadcast, dtype);
  const auto ranks = context.ranks_of(form.set);
  if (std::find(ranks.begin(), ranks.end(), root) == ranks.end() || !context.is_in(form.set))
    return;
  std::vector<Memory> memories;
  std::vector<Block> expected;
  std::vector<Call> calls;
  for (std::size_t i = 0; i < (form.burst ? 3 : 1); ++i) {
    const Shape own = i == 0 ? shape : Shape{static_cast<std::int64_t>(count_of(shape) % 50 + i)};
    expected.push_back(make_bytes(dtype, root, count_of(own), i));
    memories.emplace_back(context, form.arena, make_bytes(dtype, context.rank, count_of(own), i));
    calls.push_back(moving_call(context, OpKind::Broadcast, form,
                                "broadcast " + shape_text(shape) + std::to_string(i)));
    calls.back().root = root;
    calls.back().tensors = {{dtype, own, memories.back().data(), memories.back().data()}};
  }
  run_all(context, form, calls);
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const auto wrong = difference(dtype, expected[i], memories[i].data());
    if (!wrong.empty()) context.fail(wrong);
    context.expect(memories[i].margin_is_intact(), "bytes behind the buffer were written");
  }
}

}  // namespace

void add_gather_cases(Cases& cases, const Setting& setting) {
  const auto forms = pairwise_forms({.arena = setting.arena, .scaled = false, .placed = false});
  for (const DataType dtype : kAllTypes) {
    for (const Rows& rows : all_rows())
      for (const Form& form : forms) {
        const bool large = std::string(rows.name) == "large";
        if (large && form.set != static_cast<SetKind>(static_cast<int>(dtype) % 3)) continue;
        cases.push_back(
            {"allgather/" + std::string(type_name(dtype)) + "/" + rows.name + " " + text_of(form),
             [=, &rows](Context& context) { allgather_one(context, dtype, rows, form); }, true});
      }
    cases.push_back({"grouped allgather/" + std::string(type_name(dtype)), [=](Context& context) {
                       allgather_group(context, {dtype},
                                       forms[static_cast<std::size_t>(dtype) % forms.size()]);
                     }});
  }
  for (const Form& form : forms)
    cases.push_back({"grouped allgather/all types/" + text_of(form), [=](Context& context) {
                       allgather_group(context, {kAllTypes, kAllTypes + kTypes}, form);
                     }});
}

void add_broadcast_cases(Cases& cases, const Setting& setting) {
  const auto forms = pairwise_forms({.arena = setting.arena, .scaled = false, .placed = false});
  std::size_t turn = 0;
  for (const DataType dtype : kAllTypes)
    for (int root = 0; root < setting.size; ++root)
      for (const Shape& shape : all_shapes()) {
        const bool large = count_of(shape) >= static_cast<std::size_t>(kLarge);
        // Two of the forms with each type, root and shape: all of them with each type and with each
        // shape.
        for (int i = 0; i < (large ? 1 : 2); ++i) {
          const Form form = forms[turn++ % forms.size()];
          cases.push_back(
              {"broadcast/" + std::string(type_name(dtype)) + "/root " + std::to_string(root) +
                   " " + shape_text(shape) + " " + text_of(form),
               [=](Context& context) { broadcast_one(context, dtype, root, shape, form); }, true});
        }
      }
}

}  // namespace hvd::contract
