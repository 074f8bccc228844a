#include "hvd/negotiation/values/unit_names.h"

#include <fmt/format.h>

#include <array>

namespace hvd {

namespace {

constexpr std::string_view kLibraryEnd = "\n\n";

std::string_view text_of(Lane lane) { return lane == Lane::InitThread ? "" : "thread."; }

}  // namespace

std::string_view unnamed(OpKind kind, std::uint64_t joins, std::uint64_t number, Lane lane, std::span<char> text) {
  if (joins == 0 && lane == Lane::InitThread) {  // of each small operation
    const auto made = fmt::format_to_n(text.data(), text.size(), "{}.noname.{}\n", name_of(kind), number);
    return {text.data(), static_cast<std::size_t>(made.out - text.data())};
  }
  const auto [end, size] =
      joins == 0 ? fmt::format_to_n(text.data(), text.size(), "{}.noname.{}{}\n", name_of(kind), text_of(lane), number)
                 : fmt::format_to_n(text.data(), text.size(), "{}.noname.{}{}.{}\n", name_of(kind), text_of(lane), joins, number);
  return {text.data(), static_cast<std::size_t>(end - text.data())};
}
std::string unnamed(OpKind kind, std::uint64_t joins, std::uint64_t number, Lane lane) {
  std::array<char, kUnnamedText> text{};
  return std::string(unnamed(kind, joins, number, lane, text));
}
std::string unnamed_persistent(OpKind kind, std::uint64_t joins, std::uint64_t number, Lane lane) {
  return joins == 0 ? fmt::format("{}.persistent.{}{}\n", name_of(kind), text_of(lane), number)
                    : fmt::format("{}.persistent.{}{}.{}\n", name_of(kind), text_of(lane), joins, number);
}
std::string library_name(std::string_view what) { return std::string(what).append(kLibraryEnd); }
bool is_library_name(std::string_view name) { return name.ends_with(kLibraryEnd); }
std::string library_name_of(std::string_view name, Lane lane) {
  return fmt::format("{}{}\n", name.substr(0, name.size() - kLibraryEnd.size()), lane == Lane::InitThread ? "" : ".thread");
}
bool is_unnamed(const std::string& name) { return !name.empty() && name.back() == '\n'; }
std::string_view display_name(const std::string& name) { return std::string_view(name).substr(0, name.find_last_not_of('\n') + 1); }

}  // namespace hvd
