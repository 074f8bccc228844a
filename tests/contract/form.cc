#include "tests/contract/form.h"

#include <array>
#include <cstring>
#include <set>
#include <stdexcept>

namespace hvd::contract {

namespace {

constexpr std::size_t kMargin = 16;
constexpr std::byte kMarginByte{0xA5};

constexpr std::size_t kColumns = 6;
using Row = std::array<int, kColumns>;

/// Greedy: each row is the one of the whole product that adds the most pairs.
std::vector<Row> pairwise_rows(const Row& levels) {
  std::vector<Row> product{{}};
  for (std::size_t column = 0; column < kColumns; ++column) {
    std::vector<Row> longer;
    for (Row row : product)
      for (row[column] = 0; row[column] < levels[column]; ++row[column]) longer.push_back(row);
    product = std::move(longer);
  }
  using Pair = std::array<int, 4>;
  const auto pairs_of = [](const Row& row) {
    std::vector<Pair> pairs;
    for (int a = 0; a < static_cast<int>(kColumns); ++a)
      for (int b = a + 1; b < static_cast<int>(kColumns); ++b)
        pairs.push_back({a, row[static_cast<std::size_t>(a)], b, row[static_cast<std::size_t>(b)]});
    return pairs;
  };
  std::set<Pair> covered;
  std::vector<Row> rows;
  while (true) {
    std::size_t most = 0;
    Row best{};
    for (const Row& row : product) {
      std::size_t fresh = 0;
      for (const Pair& pair : pairs_of(row)) fresh += covered.contains(pair) ? 0 : 1;
      if (fresh > most) {
        most = fresh;
        best = row;
      }
    }
    if (most == 0) return rows;
    rows.push_back(best);
    for (const Pair& pair : pairs_of(best)) covered.insert(pair);
  }
}

}  // namespace

std::string text_of(const Form& form) {
  static constexpr const char* kScales[] = {"", " prescaled", " postscaled", " scaled"};
  static constexpr const char* kSets[] = {"", " early set", " late set"};
  return std::string(form.in_place ? "in place" : "out of place") + (form.arena ? " arena" : "") +
         (form.burst ? " burst" : "") + (form.named ? "" : " unnamed") +
         kScales[static_cast<int>(form.scales)] + kSets[static_cast<int>(form.set)];
}

std::vector<Form> pairwise_forms(const Columns& columns) {
  std::vector<Form> forms;
  for (const Row& row : pairwise_rows(
           {columns.placed ? 2 : 1, columns.arena ? 2 : 1, 2, 2, columns.scaled ? 4 : 1, 3}))
    forms.push_back({row[0] == 1, row[1] == 1, row[2] == 1, row[3] == 0,
                     static_cast<Scales>(row[4]), static_cast<SetKind>(row[5])});
  return forms;
}

const std::vector<Shape>& all_shapes() {
  static const std::vector<Shape> kShapes{{0},   {},    {1},       {7},       {15},    {16},
                                          {17},  {31},  {33},      {63},      {64},    {65},
                                          {127}, {129}, {3, 5, 7}, {2, 0, 3}, {kLarge}};
  return kShapes;
}

Memory::Memory(Context& context, bool arena, const Block& content) : bytes_(content.size()) {
  if (content.empty()) return;
  const std::size_t bytes = bytes_ + kMargin;
  if (arena && !context.setting.is_alone(context.rank)) {
    owner_ = context.endpoint.allocate_shared(bytes);
    if (!owner_) throw std::runtime_error("allocate_shared gives nothing");
  } else {
    owner_ = std::shared_ptr<std::byte[]>(new std::byte[bytes]);
  }
  data_ = static_cast<std::byte*>(owner_.get());
  std::memcpy(data_, content.data(), bytes_);
  std::memset(data_ + bytes_, static_cast<int>(kMarginByte), kMargin);
}

bool Memory::margin_is_intact() const {
  for (std::size_t i = 0; data_ != nullptr && i < kMargin; ++i)
    if (data_[bytes_ + i] != kMarginByte) return false;
  return true;
}

}  // namespace hvd::contract
