#pragma once
/// These functions print lines to standard error, with one write each, so that ranks do not tear
/// each other's lines. Any thread may call them; they never fail.
// Tested in tests/hvd/negotiation/patience_test.cc

#include <string_view>
#include <utility>

#include "hvd/base/log_level.h"
#include "hvd/base/text.h"
#include "hvd/base/visible.h"

namespace hvd {

/// Lines below `level` are dropped; `rank` is put before each line, -1 for none.
void set_log(LogLevel level, int rank);
HVD_BETWEEN_LIBRARIES bool log_enabled(LogLevel level);
HVD_BETWEEN_LIBRARIES void log_line(LogLevel level, std::string_view text);
/// `text` as it is, whatever the level.
void log_plain(std::string_view text);

template <class... Args>
void log(LogLevel level, fmt::format_string<Args...> format, Args&&... args) {
  if (log_enabled(level)) log_line(level, formatted(format, std::forward<Args>(args)...));
}

}  // namespace hvd
