#pragma once
/// What programs of several ranks that come to grief say of it: lines to standard error, one write
/// each so that ranks do not tear each other's.

#include <unistd.h>

#include <string>

#include "hvd/errors.h"

namespace hvd::test {

inline void say(const std::string& text) {
  const std::string line = text + "\n";
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
}

inline std::string type_of(const hvd::Error& error) {
  if (dynamic_cast<const hvd::RankFailed*>(&error) != nullptr) return "RankFailed";
  if (dynamic_cast<const hvd::StallTimeout*>(&error) != nullptr) return "StallTimeout";
  if (dynamic_cast<const hvd::Shutdown*>(&error) != nullptr) return "Shutdown";
  if (dynamic_cast<const hvd::Mismatch*>(&error) != nullptr) return "Mismatch";
  if (dynamic_cast<const hvd::NotInitialized*>(&error) != nullptr) return "NotInitialized";
  if (dynamic_cast<const hvd::BackendError*>(&error) != nullptr) return "BackendError";
  if (dynamic_cast<const hvd::InvalidArgument*>(&error) != nullptr) return "InvalidArgument";
  return "Error";
}

}  // namespace hvd::test
