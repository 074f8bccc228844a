#pragma once
/// The library of this process, which runs until the end of a scope.

#include <doctest/doctest.h>

#include <functional>

#include "hvd/hvd.h"

namespace hvd::test {

/// The library, with ranks that share memory or with ranks that do not.
struct Running {
  explicit Running(bool shares_memory = true) {
    Config config;
    if (!shares_memory) config.shared_memory = SharedMemory::Off;
    init(config);
  }
  ~Running() { shutdown(); }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;
};

/// Calls `body` in a world of each kind.
inline void in_both_worlds(const std::function<void()>& body) {
  for (const bool shares_memory : {true, false}) {
    CAPTURE(shares_memory);
    const Running running(shares_memory);
    body();
  }
}

}  // namespace hvd::test
