#pragma once
/// These functions make text from a format string, which is checked at compile time, and values;
/// the formats are fmt's. Any thread may call them. fmt is header-only here (the LibTorch wheel
/// puts its own, newer fmt on the include path, which does not go with the system's compiled one).
/// Its machinery costs 8 s in every file that formats, 20 s with sanitizers; so each library
/// compiles it once, for the fmt that it sees.

#include <fmt/core.h>

#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "hvd/base/visible.h"

namespace hvd {

/// fmt::vformat. The version is in the name for programs in which two of them meet.
template <int Version>
std::string formatted_by(fmt::string_view format, fmt::format_args arguments);
extern template std::string formatted_by<FMT_VERSION>(fmt::string_view, fmt::format_args);

/// fmt::format.
template <class... Args>
std::string formatted(fmt::format_string<Args...> format, Args&&... arguments) {
  return formatted_by<FMT_VERSION>(format, fmt::make_format_args(arguments...));
}

/// Returns the items, each as "{}" gives it, with `between` between them.
template <class Range>
std::string joined(const Range& items, std::string_view between) {
  std::string text;
  bool first = true;
  for (const auto& item : items) {
    if (!std::exchange(first, false)) text += between;
    text += formatted("{}", item);
  }
  return text;
}

/// Returns `text` between quotes, as JSON wants it: no more than `most` bytes of it, what is not
/// UTF-8 replaced.
std::string json_string(std::string_view text, std::size_t most = 256);

/// Returns ascending numbers as "0-2, 5".
HVD_BETWEEN_LIBRARIES std::string rank_list(std::span<const int> ranks);

}  // namespace hvd
