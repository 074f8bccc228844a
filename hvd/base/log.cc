#include "hvd/base/log.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <string>

namespace hvd {

namespace {
std::atomic<LogLevel> current_level{LogLevel::Warning};
std::atomic<int> current_rank{-1};
}  // namespace

void set_log(LogLevel level, int rank) {
  current_level.store(level, std::memory_order_relaxed);
  current_rank.store(rank, std::memory_order_relaxed);
}

bool log_enabled(LogLevel level) { return level >= current_level.load(std::memory_order_relaxed); }

void log_line(LogLevel level, std::string_view text) {
  static constexpr std::array<std::string_view, 7> kNames{"trace", "debug", "info", "warning",
                                                          "error", "fatal", "off"};
  const int rank = current_rank.load(std::memory_order_relaxed);
  const std::string line =
      rank < 0 ? formatted("hvd: {}: {}\n", kNames.at(static_cast<std::size_t>(level)), text)
               : formatted("hvd: {}: rank {}: {}\n", kNames.at(static_cast<std::size_t>(level)),
                           rank, text);
  log_plain(line);
}

void log_plain(std::string_view text) {
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text.data(), text.size());
}

}  // namespace hvd
