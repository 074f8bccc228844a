#include "hvd/negotiation/values/unit_names.h"

#include <algorithm>
#include <array>
#include <charconv>

#include "hvd/base/text.h"

namespace hvd {

namespace {

// No name of a user's ends so: `is_for_users` refuses others that end in a newline.
constexpr std::string_view kPersistentEnd = "\1\n";
constexpr std::string_view kLibraryEnd = "\1\n\n";

std::string_view text_of(Lane lane) { return lane == Lane::InitThread ? "" : "thread."; }

/// A text in a place of fixed size: what is added counts as far as it has room.
class FixedText {
 public:
  explicit FixedText(std::span<char> place) : place_(place) {}
  void add(std::string_view part) {
    const std::size_t taken = std::min(part.size(), place_.size() - size_);
    std::copy_n(part.begin(), taken, place_.begin() + static_cast<std::ptrdiff_t>(size_));
    size_ += taken;
  }
  void add(std::uint64_t number) {
    std::array<char, 20> digits{};  // of the largest
    const char* const end = std::to_chars(digits.data(), digits.data() + digits.size(), number).ptr;
    add(std::string_view(digits.data(), static_cast<std::size_t>(end - digits.data())));
  }
  [[nodiscard]] std::string_view text() const { return {place_.data(), size_}; }

 private:
  const std::span<char> place_;
  std::size_t size_ = 0;
};

}  // namespace

std::string_view unnamed(OpKind kind, std::uint64_t joins, std::uint64_t number, Lane lane,
                         std::span<char> text) {
  FixedText line(text);
  line.add(name_of(kind));
  line.add(".noname.");
  line.add(text_of(lane));
  if (joins != 0) {
    line.add(joins);
    line.add(".");
  }
  line.add(number);
  line.add("\n");
  return line.text();
}
std::string unnamed(OpKind kind, std::uint64_t joins, std::uint64_t number, Lane lane) {
  std::array<char, kUnnamedText> text{};
  return std::string(unnamed(kind, joins, number, lane, text));
}
std::string unnamed_persistent(OpKind kind, std::uint64_t joins, std::uint64_t number, Lane lane) {
  return joins == 0 ? formatted("{}.persistent.{}{}{}", name_of(kind), text_of(lane), number,
                                kPersistentEnd)
                    : formatted("{}.persistent.{}{}.{}{}", name_of(kind), text_of(lane), joins,
                                number, kPersistentEnd);
}
std::string library_name(std::string_view what) { return std::string(what).append(kLibraryEnd); }
bool is_library_name(std::string_view name) { return name.ends_with(kLibraryEnd); }
std::string library_name_of(std::string_view name, Lane lane) {
  return formatted("{}{}\n", name.substr(0, name.size() - kLibraryEnd.size()),
                   lane == Lane::InitThread ? "" : ".thread");
}
bool is_unnamed(const std::string& name) { return !name.empty() && name.back() == '\n'; }
std::string_view display_name(const std::string& name) {
  return std::string_view(name).substr(0, name.find_last_not_of("\1\n") + 1);
}
bool is_for_users(std::string_view name) {
  return !name.ends_with('\n') || name.ends_with(kPersistentEnd) || name.ends_with(kLibraryEnd);
}

}  // namespace hvd
