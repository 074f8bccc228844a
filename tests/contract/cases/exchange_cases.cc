// Alltoall and reducescatter: every rank gets rows of its own.

#include <algorithm>
#include <cstring>
#include <numeric>

#include "tests/contract/reduction.h"
#include "tests/contract/refusal.h"

namespace hvd::contract {

namespace {

/// How many rows rank `from` sends to rank `to` (places in the set), and how many it keeps to
/// itself.
struct Splits {
  const char* name;
  std::function<std::int64_t(int from, int to)> rows;
  std::function<std::int64_t(int from)> unsent;
  bool given = true;  ///< otherwise none are, and the rows are divided evenly
};

const std::vector<Splits>& all_splits() {
  const auto none = [](int) { return 0; };
  static const std::vector<Splits> kSplits{
      {"even", [](int, int) { return 3; }, none, false},
      {"even, nothing", [](int, int) { return 0; }, none, false},
      {"even splits", [](int, int) { return 2; }, none},
      {"uneven", [](int from, int to) { return (from * 2 + to * 3) % 5 + 1; }, none},
      {"some none", [](int from, int to) { return (from + to) % 2 == 0 ? 0 : from + 2; }, none},
      {"one gives all", [](int from, int to) { return from == 0 ? to + 1 : 0; }, none},
      {"one gets all", [](int from, int to) { return to == 0 ? from + 1 : 0; }, none},
      {"nothing", [](int, int) { return 0; }, none},
      {"unsent tail", [](int from, int to) { return (from + to) % 3; },
       [](int from) { return from + 4; }},
      {"all unsent", [](int, int) { return 0; }, [](int) { return 6; }},
      {"large", [](int from, int to) { return from == to ? kLarge : 1; }, none},
  };
  return kSplits;
}

/// The rows that place `from` of the set holds, with those that it does not send.
std::vector<std::int64_t> splits_of(const Splits& splits, int from, int ranks) {
  std::vector<std::int64_t> rows;
  for (int to = 0; to < ranks; ++to) rows.push_back(splits.rows(from, to));
  return rows;
}

void alltoall_one(Context& context, DataType dtype, const Splits& splits, const Shape& rest,
                  const Form& form) {
  context.need(OpKind::Alltoall, dtype);
  if (!context.is_in(form.set)) return;
  const auto ranks = context.ranks_of(form.set);
  const int n = static_cast<int>(ranks.size());
  const int self =
      static_cast<int>(std::find(ranks.begin(), ranks.end(), context.rank) - ranks.begin());
  const std::size_t row_bytes = count_of(rest) * type_bytes(dtype);
  Call call;
  call.kind = OpKind::Alltoall;
  call.set = context.id_of(form.set);
  call.device = context.setting.device;
  Block expected, before;
  std::vector<std::int64_t> received;
  for (int from = 0; from < n; ++from) {
    const auto rows = splits_of(splits, from, n);
    const std::int64_t sent = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
    const Block input =
        make_bytes(dtype, ranks[static_cast<std::size_t>(from)],
                   static_cast<std::size_t>(sent + splits.unsent(from)) * count_of(rest), 3);
    const auto begin = static_cast<std::size_t>(
                           std::accumulate(rows.begin(), rows.begin() + self, std::int64_t{0})) *
                       row_bytes;
    received.push_back(rows[static_cast<std::size_t>(self)]);
    expected.insert(
        expected.end(), input.begin() + static_cast<std::ptrdiff_t>(begin),
        input.begin() + static_cast<std::ptrdiff_t>(
                            begin + static_cast<std::size_t>(received.back()) * row_bytes));
    if (from != self) continue;
    before = input;
    Shape shape{sent + splits.unsent(from)};
    shape.insert(shape.end(), rest.begin(), rest.end());
    call.tensors = {{dtype, shape, nullptr, nullptr}};
    if (splits.given) call.splits = rows;
  }
  const Memory memory(context, form.arena, before);
  call.tensors.front().input = memory.data();
  std::vector<Call> calls(form.burst ? 3 : 1, call);
  for (std::size_t i = 0; i < calls.size() && form.named; ++i)
    calls[i].name = "alltoall " + std::to_string(i);
  for (const auto& results : run_all(context, form, calls)) {
    const Made& made = results.at(0);
    context.expect(
        made.received == received,
        "the received splits are " + shape_text(made.received) + ", not " + shape_text(received));
    Shape shape{std::accumulate(received.begin(), received.end(), std::int64_t{0})};
    shape.insert(shape.end(), rest.begin(), rest.end());
    context.expect(made.shape == shape,
                   "the shape is " + shape_text(made.shape) + ", not " + shape_text(shape));
    if (!context.expect(made.data.size() == expected.size(), "the result has another size"))
      continue;
    const auto wrong = difference(dtype, expected, made.data.data());
    if (!wrong.empty()) context.fail(wrong);
  }
  context.expect(before.empty() || std::memcmp(before.data(), memory.data(), before.size()) == 0,
                 "the input was changed");
}

/// First dimensions against `n` ranks: divisible, not, fewer than there are ranks, none, large.
std::vector<Shape> scattered_shapes(std::int64_t n) {
  return {{2 * n}, {3 * n + 1, 3}, {n + n / 2 + 1, 2, 5}, {n / 2}, {1, 17}, {0, 4},
          {2, 0},  {kLarge}};
}

/// What of the whole result this rank keeps: the first `rows % n` ranks get one row more.
void check_scattered(Context& context, const Reducing& whole, const std::vector<int>& ranks,
                     const Made& made) {
  const auto n = static_cast<std::int64_t>(ranks.size());
  const auto self = static_cast<std::int64_t>(std::find(ranks.begin(), ranks.end(), context.rank) -
                                              ranks.begin());
  const std::int64_t rows = whole.shape().front();
  const std::int64_t first = self * (rows / n) + std::min(self, rows % n);
  Shape shape = whole.shape();
  shape.front() = rows / n + (self < rows % n ? 1 : 0);
  context.expect(made.shape == shape,
                 "the shape is " + shape_text(made.shape) + ", not " + shape_text(shape));
  const Expected& all = whole.expected();
  const std::size_t row = rows == 0 ? 0 : all.bytes.size() / static_cast<std::size_t>(rows);
  const auto begin = static_cast<std::ptrdiff_t>(static_cast<std::size_t>(first) * row);
  const auto end =
      begin + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(shape.front()) * row);
  Expected own{all.dtype, Block(all.bytes.begin() + begin, all.bytes.begin() + end), {}};
  if (!all.bound.empty()) {
    const auto each = static_cast<std::ptrdiff_t>(all.bytes.size() / all.bound.size());
    own.bound = {all.bound.begin() + begin / each, all.bound.begin() + end / each};
  }
  if (!context.expect(made.data.size() == own.bytes.size(), "the result has another size")) return;
  const auto wrong = difference(own, made.data.data());
  if (!wrong.empty()) context.fail(shape_text(whole.shape()) + ": " + wrong);
  whole.check_input(context);
}

/// The tensors of `shapes`, alone one after the other, or as a group.
void reducescatter(Context& context, const std::vector<DataType>& dtypes, ReduceOp op,
                   const std::vector<Shape>& shapes, const Form& form, bool grouped) {
  for (const DataType dtype : dtypes) context.need(OpKind::Reducescatter, dtype, op);
  if (!context.is_in(form.set)) return;
  std::vector<Reducing> reducing;
  std::vector<Call> calls;
  const auto ranks = context.ranks_of(form.set);
  for (const DataType dtype : dtypes)
    for (const Shape& shape : shapes) {
      const Asked asked{dtype, op, form, ranks};
      reducing.emplace_back(context, asked, shape, 1000 + reducing.size());
      if (calls.empty() || !grouped) {
        calls.push_back(allreduce_call(
            context, asked, "scatter " + std::to_string(calls.size()) + (grouped ? " group" : "")));
        calls.back().kind = OpKind::Reducescatter;
      }
      calls.back().tensors.push_back(reducing.back().tensor());
    }
  const Stats before = context.endpoint.stats();
  Results results;
  for (auto& some : run_all(context, form, calls))
    std::move(some.begin(), some.end(), std::back_inserter(results));
  const Stats after = context.endpoint.stats();
  if (!context.expect(results.size() == reducing.size(),
                      "another number of results than of tensors"))
    return;
  for (std::size_t i = 0; i < reducing.size(); ++i)
    check_scattered(context, reducing[i], ranks, results[i]);
  if (grouped)
    context.equal(static_cast<std::int64_t>(after.tensors_fused - before.tensors_fused),
                  static_cast<std::int64_t>(reducing.size()),
                  "the number of tensors that shared a batch");
}

}  // namespace

void add_alltoall_cases(Cases& cases, const Setting& setting) {
  const auto forms = pairwise_forms({.arena = setting.arena, .scaled = false, .placed = false});
  for (const DataType dtype : kAllTypes)
    for (const Splits& splits : all_splits())
      for (const Form& form : forms) {
        const Shape rest = form.named ? Shape{} : Shape{2, 3};
        if (std::string(splits.name) == "large" &&
            (!form.named || form.set != static_cast<SetKind>(static_cast<int>(dtype) % 3)))
          continue;
        cases.push_back(
            {"alltoall/" + std::string(type_name(dtype)) + "/" + splits.name + " " + text_of(form),
             [=, &splits](Context& context) { alltoall_one(context, dtype, splits, rest, form); },
             true});
      }
}

void add_reducescatter_cases(Cases& cases, const Setting& setting) {
  const auto forms = pairwise_forms({.arena = setting.arena, .placed = false});
  for (const ReduceOp op : kAllReductions) {
    const std::string name = std::string("/") + reduction_name(op);
    std::vector<DataType> defined;
    for (const DataType dtype : kAllTypes) {
      const std::string pair = type_name(dtype) + name;
      if ((op != ReduceOp::Sum && op != ReduceOp::Average) || !allreduce_is_defined(dtype, op)) {
        cases.push_back({"reducescatter/" + pair + "/refused", [=](Context& context) {
                           check_refused_pair(context, OpKind::Reducescatter, dtype, op);
                         }});
        continue;
      }
      defined.push_back(dtype);
      for (const Form& form : forms)
        for (const Shape& all : scattered_shapes(setting.size)) {
          const bool large = count_of(all) >= static_cast<std::size_t>(kLarge);
          if (large && form.scales != static_cast<Scales>(static_cast<int>(dtype) % 4)) continue;
          cases.push_back({"reducescatter/" + pair + "/" + shape_text(all) + " " + text_of(form),
                           [=](Context& context) {
                             const auto ranks =
                                 static_cast<std::int64_t>(context.ranks_of(form.set).size());
                             const auto shapes = scattered_shapes(setting.size);
                             // The same kind of first dimension for the ranks of the set.
                             const auto at =
                                 std::find(shapes.begin(), shapes.end(), all) - shapes.begin();
                             reducescatter(context, {dtype}, op,
                                           {scattered_shapes(ranks)[static_cast<std::size_t>(at)]},
                                           form, false);
                           },
                           true});
        }
      cases.push_back({"reducescatter/" + pair + "/several in flight", [=](Context& context) {
                         auto shapes = scattered_shapes(setting.size);
                         shapes.pop_back();
                         reducescatter(context, {dtype}, op, shapes, {.burst = true}, false);
                       }});
    }
    if (defined.empty()) continue;
    for (const Form& form : forms)
      cases.push_back(
          {"grouped reducescatter/all types" + name + " " + text_of(form), [=](Context& context) {
             auto shapes = scattered_shapes(setting.size);
             shapes.pop_back();
             reducescatter(context, defined, op, shapes, form, true);
           }});
  }
}

}  // namespace hvd::contract
