#include "hvd/negotiation/unit_names.h"

#include <fmt/format.h>

#include <array>

namespace hvd {

std::string_view unnamed(OpKind kind, std::uint64_t joins, std::uint64_t number, std::span<char> text) {
  const auto [end, size] = joins == 0 ? fmt::format_to_n(text.data(), text.size(), "{}.noname.{}\n", name_of(kind), number)
                                      : fmt::format_to_n(text.data(), text.size(), "{}.noname.{}.{}\n", name_of(kind), joins, number);
  return {text.data(), static_cast<std::size_t>(end - text.data())};
}
std::string unnamed(OpKind kind, std::uint64_t joins, std::uint64_t number) {
  std::array<char, kUnnamedText> text{};
  return std::string(unnamed(kind, joins, number, text));
}
std::string unnamed_persistent(OpKind kind, std::uint64_t joins, std::uint64_t number) {
  return joins == 0 ? fmt::format("{}.persistent.{}\n", name_of(kind), number)
                    : fmt::format("{}.persistent.{}.{}\n", name_of(kind), joins, number);
}
bool is_unnamed(const std::string& name) { return !name.empty() && name.back() == '\n'; }
std::string_view display_name(const std::string& name) {
  return std::string_view(name).substr(0, name.size() - (is_unnamed(name) ? 1 : 0));
}

}  // namespace hvd
