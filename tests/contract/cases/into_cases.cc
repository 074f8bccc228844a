// Allgather, alltoall and reducescatter into memory that exists: what comes is what the forms that
// make their output give, nothing else is written, and memory that does not fit is found on all
// ranks before anything is.

#include <algorithm>
#include <cstring>
#include <numeric>

#include "hvd/errors.h"
#include "hvd/hvd.h"
#include "tests/contract/reduction.h"
#include "tests/contract/refusal.h"

namespace hvd::contract {

namespace {

constexpr OpKind kKinds[] = {OpKind::Allgather, OpKind::Alltoall, OpKind::Reducescatter};
constexpr std::byte kOld{0xCD};

/// Rows of a tensor of two columns: how many go from one place of the set to another.
struct Amount {
  const char* name;
  std::function<std::int64_t(int from, int to)> rows;
};
const std::vector<Amount>& all_amounts() {
  static const std::vector<Amount> kAmounts{
      {"some", [](int from, int to) { return (from * 2 + to) % 3 + 1; }},
      {"some none", [](int from, int to) { return (from + to) % 2 == 0 ? 0 : from + 2; }},
      {"none", [](int, int) { return 0; }},
      {"many", [](int from, int to) { return kLarge / 4 + from + to; }},
  };
  return kAmounts;
}

/// This rank's part of one operation, and what it must bring.
class Into {
 public:
  Into(Context& context, OpKind kind, DataType dtype, const Amount& amount, const Form& form,
       std::uint64_t salt)
      : ranks_(context.ranks_of(form.set)), dtype_(dtype), kind_(kind) {
    const auto at = std::find(ranks_.begin(), ranks_.end(), context.rank);
    self_ = static_cast<int>(at - ranks_.begin());
    call.kind = kind;
    call.set = context.id_of(form.set);
    call.device = context.setting.device;
    call.into = true;
    if (form.named)
      call.name = std::string("into ") + std::string(name_of(kind)) + std::to_string(salt);
    kind == OpKind::Reducescatter ? ask_reduction(context, amount, form, salt)
                                  : ask_rows(context, amount, form, salt);
    output_ = Memory(context, form.arena, Block(expected_.bytes.size(), kOld));
    Tensor& tensor = call.tensors.front();
    tensor.output = output_.data();
    tensor.output_rows = static_cast<std::int64_t>(expected_.bytes.size() / row_bytes());
  }

  void check(Context& context, const Results& results) {
    const auto wrong = difference(expected_, output_.data());
    if (!wrong.empty()) context.fail(wrong);
    context.expect(output_.margin_is_intact(), "bytes behind the output were written");
    if (reducing_) reducing_->check_input(context);
    if (!reducing_ && !before_.empty())
      context.expect(std::memcmp(before_.data(), call.tensors.front().input, before_.size()) == 0,
                     "the input was changed");
    if (kind_ == OpKind::Alltoall)
      context.expect(results.at(0).received == received_,
                     "the received splits are " + shape_text(results.at(0).received));
    reset();
  }
  void reset() const {
    if (output_.data() != nullptr)
      std::memset(output_.data(), static_cast<int>(kOld), expected_.bytes.size());
  }
  [[nodiscard]] bool is_untouched() const {
    return std::all_of(output_.data(), output_.data() + expected_.bytes.size(),
                       [](std::byte byte) { return byte == kOld; });
  }

  Call call;

 private:
  [[nodiscard]] std::size_t row_bytes() const { return 2 * type_bytes(dtype_); }

  void ask_rows(Context& context, const Amount& amount, const Form& form, std::uint64_t salt) {
    const int n = static_cast<int>(ranks_.size());
    expected_.dtype = dtype_;
    for (int from = 0; from < n; ++from) {
      std::vector<std::int64_t> splits;
      for (int to = 0; to < n; ++to)
        splits.push_back(kind_ == OpKind::Allgather ? (to == 0 ? amount.rows(from, 0) : 0)
                                                    : amount.rows(from, to));
      const std::int64_t rows = std::accumulate(splits.begin(), splits.end(), std::int64_t{0});
      const Block input = make_bytes(dtype_, ranks_[static_cast<std::size_t>(from)],
                                     static_cast<std::size_t>(rows) * 2, salt);
      const std::int64_t first =
          kind_ == OpKind::Allgather
              ? 0
              : std::accumulate(splits.begin(), splits.begin() + self_, std::int64_t{0});
      const std::int64_t count =
          kind_ == OpKind::Allgather ? rows : splits[static_cast<std::size_t>(self_)];
      received_.push_back(count);
      const auto begin = input.begin() +
                         static_cast<std::ptrdiff_t>(static_cast<std::size_t>(first) * row_bytes());
      expected_.bytes.insert(
          expected_.bytes.end(), begin,
          begin + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(count) * row_bytes()));
      if (from != self_) continue;
      before_ = input;
      input_ = Memory(context, form.arena, input);
      call.tensors = {{dtype_, {rows, 2}, input_.data(), nullptr}};
      if (kind_ == OpKind::Alltoall) call.splits = splits;
    }
  }

  void ask_reduction(Context& context, const Amount& amount, const Form& form, std::uint64_t salt) {
    const auto n = static_cast<std::int64_t>(ranks_.size());
    const std::int64_t rows = amount.rows(0, 0) * n + (amount.rows(0, 0) == 0 ? 0 : n / 2);
    const Asked asked{dtype_, ReduceOp::Sum, form, ranks_};
    reducing_ = std::make_shared<Reducing>(context, asked, Shape{rows, 2}, salt);
    call.op = ReduceOp::Sum;
    call.prescale = form.prescale();
    call.postscale = form.postscale();
    call.tensors = {reducing_->tensor()};
    const auto before =
        static_cast<std::ptrdiff_t>(self_ * (rows / n) + std::min<std::int64_t>(self_, rows % n));
    const auto own = static_cast<std::ptrdiff_t>(rows / n + (self_ < rows % n ? 1 : 0));
    const Expected& all = reducing_->expected();
    expected_.dtype = dtype_;
    const auto bytes = static_cast<std::ptrdiff_t>(row_bytes());
    expected_.bytes.assign(all.bytes.begin() + before * bytes,
                           all.bytes.begin() + (before + own) * bytes);
    if (all.bound.empty() || rows == 0) return;
    const auto bounds =
        static_cast<std::ptrdiff_t>(all.bound.size()) / static_cast<std::ptrdiff_t>(rows);
    expected_.bound.assign(all.bound.begin() + before * bounds,
                           all.bound.begin() + (before + own) * bounds);
  }

  std::vector<int> ranks_;
  DataType dtype_;
  OpKind kind_;
  int self_ = 0;
  Memory input_, output_;
  Block before_;
  std::shared_ptr<Reducing> reducing_;
  Expected expected_;
  std::vector<std::int64_t> received_;
};

/// Four times: what is small and comes back goes another way from the third time on.
void write_into(Context& context, OpKind kind, DataType dtype, const Amount& amount,
                const Form& form, bool persistent = false) {
  context.need(kind, dtype);
  if (!context.is_in(form.set)) return;
  std::vector<Into> all;
  std::vector<Call> calls;
  for (std::size_t i = 0; i < (form.burst ? 3 : 1); ++i) {
    all.emplace_back(context, kind, dtype, i == 0 ? amount : all_amounts()[i - 1], form, i);
    calls.push_back(all.back().call);
  }
  std::vector<Again> operations;
  for (const Call& call : calls)
    if (persistent) operations.push_back(context.endpoint.describe(call));
  for (int round = 0; round < 4; ++round) {
    const auto results =
        persistent ? run_again(context, form, operations) : run_all(context, form, calls);
    for (std::size_t i = 0; i < all.size(); ++i) all[i].check(context, results[i]);
  }
}

/// Some ranks have memory for the result, others have it made; and the next time the other way
/// round.
void mixed(Context& context, OpKind kind) {
  context.need(kind);
  Into into(context, kind, DataType::Float32, all_amounts().front(), {}, 7);
  for (int round = 0; round < 8; ++round) {
    Call call = into.call;
    call.into = (context.rank + round / 4) % 2 == 0;
    const auto results = context.endpoint.run(call);
    if (call.into) {
      into.check(context, results);
    } else {
      context.equal(results.at(0).shape.front(), into.call.tensors.front().output_rows,
                    "the number of rows");
    }
  }
}

/// One rank's memory has a row too many: all learn of it, nothing is written, and then it works.
void does_not_fit(Context& context, OpKind kind, SetKind set) {
  context.need(kind);
  if (!context.is_in(set)) return;
  const auto ranks = context.ranks_of(set);
  Into into(context, kind, DataType::Float32, all_amounts().front(), {.set = set}, 9);
  const std::int64_t rows = into.call.tensors.front().output_rows;
  into.check(context, context.endpoint.run(into.call));
  Call wrong = into.call;
  const Memory larger(context, false, Block(static_cast<std::size_t>(rows + 1) * 8, kOld));
  if (context.rank == ranks.back()) {
    wrong.tensors.front().output = larger.data();
    wrong.tensors.front().output_rows = rows + 1;
  }
  for (int round = 0; round < 2; ++round) {
    try {
      context.endpoint.run(wrong);
      context.fail("no disagreement was found");
    } catch (const Mismatch& error) {
      const std::string text = error.what();
      for (const std::string& word :
           {"'" + wrong.name + "'", std::string("does not have as many rows as come"),
            "rank " + std::to_string(ranks.back()) + ": ", std::string("the output has ")})
        context.expect(contains(text, word), "the text does not say '" + word + "': " + text);
    }
    context.expect(into.is_untouched(), "something was written");
  }
  into.check(context, context.endpoint.run(into.call));
}

/// What each rank gives is part of where the result goes.
void overlapping(Context& context) {
  if (!context.setting.front_door)
    throw Skip{"hvd/hvd.h copies what overlaps: seen by the instances of processes"};
  const auto n = static_cast<std::size_t>(context.size);
  for (const bool arena : {false, true}) {
    if (arena && !context.setting.arena) continue;
    for (const std::size_t rows : {std::size_t{3}, std::size_t{40000}}) {
      const std::size_t own = rows * 4;
      Block expected;
      for (int rank = 0; rank < context.size; ++rank) {
        const Block input = make_bytes(DataType::Float32, rank, rows, 5);
        expected.insert(expected.end(), input.begin(), input.end());
      }
      const Memory memory(context, arena, Block(own * n, kOld));
      auto* const mine = memory.data() + static_cast<std::size_t>(context.rank) * own;
      std::memcpy(mine, expected.data() + static_cast<std::size_t>(context.rank) * own, own);
      const Buffer whole{
          memory.data(), DataType::Float32, {static_cast<std::int64_t>(rows * n)}, {}};
      allgather_into(whole, {mine, DataType::Float32, {static_cast<std::int64_t>(rows)}, {}},
                     {.name = "own place"});
      const auto gathered = difference(DataType::Float32, expected, memory.data());
      if (!gathered.empty()) context.fail("allgather: " + gathered);
      alltoall_into(whole, whole, {.name = "own memory"});
      Block exchanged;
      for (std::size_t from = 0; from < n; ++from) {
        const auto part = expected.begin() +
                          static_cast<std::ptrdiff_t>(static_cast<std::size_t>(context.rank) * own);
        exchanged.insert(exchanged.end(), part, part + static_cast<std::ptrdiff_t>(own));
      }
      const auto wrong = difference(DataType::Float32, exchanged, memory.data());
      if (!wrong.empty()) context.fail("alltoall: " + wrong);
    }
  }
}

/// What the rank can see by itself.
void refused(Context& context) {
  if (!context.setting.front_door)
    throw Skip{"what hvd/hvd.h checks before the engine: seen by the instances of processes"};
  const Memory memory(context, false, Block(400));
  const std::int64_t n = context.size;
  const Buffer input{memory.data(), DataType::Float32, {2 * n, 2}, {}};
  const auto output = [&](Shape shape, DataType dtype = DataType::Float32, Device device = {}) {
    return Buffer{memory.data() + 200, dtype, std::move(shape), device};
  };
  const int culprit = context.size - 1;
  const auto refuses = [&](const Buffer& to, const std::vector<std::string>& words) {
    for (const char* name : {"", "into"}) {
      check_refused_call(
          context, culprit, [&] { allgather_into(to, input, {.name = name}); }, words);
      check_refused_call(
          context, culprit, [&] { allgather_into_async(to, input, {.name = name}); }, words);
      check_refused_call(
          context, culprit, [&] { alltoall_into(to, input, {.name = name, .splits = {}}); }, words);
      check_refused_call(
          context, culprit, [&] { alltoall_into_async(to, input, {.name = name, .splits = {}}); },
          words);
      check_refused_call(
          context, culprit,
          [&] { reducescatter_into(to, input, {.name = name, .op = ReduceOp::Sum}); }, words);
      check_refused_call(
          context, culprit,
          [&] { reducescatter_into_async(to, input, {.name = name, .op = ReduceOp::Sum}); }, words);
    }
  };
  refuses(output({2, 2}, DataType::Int32), {"int32", "float32"});
  refuses(output({2, 2}, DataType::Float32, {DeviceKind::Cuda, 1}), {"cuda:1", "cpu"});
  refuses(output({2, 3}), {"[2, 3]"});
  refuses(output({4}), {"[4]"});
  refuses(output({}), {"[]"});
  refuses(output({0, 2}), {"the output has 0 rows"});
  refuses(output({-1, 2}), {"negative"});
  check_refused_call(context, culprit,
                     [&] {
                       reducescatter_into(output({3, 2}), input, {.op = ReduceOp::Sum});
                     },
                     {"just 2"});
  Buffer nowhere = output({2 * n * n, 2});
  nowhere.data = nullptr;
  check_refused_call(context, culprit, [&] { allgather_into(nowhere, input); }, {"null pointer"});
  check_refused_call(
      context, culprit,
      [&] {
        alltoall_into(output({2 * n, 2}), input, {.name = "", .splits = {1, 2, 3, 4, 5}});
      },
      {"splits"});
}

}  // namespace

void add_into_cases(Cases& cases, const Setting& setting) {
  const auto forms = pairwise_forms({.arena = setting.arena, .scaled = false, .placed = false});
  for (const OpKind kind : kKinds) {
    const std::string name = std::string(name_of(kind)) + " into/";
    std::size_t turn = 0;
    for (const DataType dtype : kAllTypes) {
      if (kind == OpKind::Reducescatter && dtype == DataType::Bool) continue;
      for (const Amount& amount : all_amounts())
        for (int i = 0; i < 3; ++i) {
          const Form form = forms[turn++ % forms.size()];
          cases.push_back(
              {name + std::string(type_name(dtype)) + "/" + amount.name + " " + text_of(form),
               [=, &amount](Context& context) { write_into(context, kind, dtype, amount, form); },
               true});
        }
    }
    for (std::size_t i = 0; setting.front_door && i < forms.size(); ++i) {
      const Amount& amount = all_amounts()[i % all_amounts().size()];
      const Form form = forms[i];
      const DataType dtype = i % 2 == 0 ? DataType::Float32 : DataType::Int16;
      cases.push_back({name + "persistent " + amount.name + " " + text_of(form),
                       [=, &amount](Context& context) {
                         write_into(context, kind, dtype, amount, form, true);
                       }});
    }
    cases.push_back({name + "on some ranks", [=](Context& context) { mixed(context, kind); }});
    if (kind == OpKind::Reducescatter || setting.size == 1) continue;
    for (const SetKind set : {SetKind::Global, SetKind::Early, SetKind::Late}) {
      if (set != SetKind::Global && setting.size < 3) continue;
      cases.push_back({name + "does not fit" + text_of({.set = set}),
                       [=](Context& context) { does_not_fit(context, kind, set); }});
    }
  }
  cases.push_back({"into/overlapping", overlapping});
  cases.push_back({"into/refused", refused});
}

}  // namespace hvd::contract
