#include "hvd/launch/whole_lines.h"

#include <cstdio>

#include "hvd/errors.h"
#include "hvd/launch/launch.h"

namespace hvd {

namespace {

/// Returns whether a launcher has started this process. hvdrun gives one rank alone no number, but HVD_INIT.
bool is_launched() {
  try {
    const Launch launch = read_launch();
    return launch.is_forced || launch.hints.rank.has_value();
  } catch (const InvalidArgument&) {
    return true;  // a rank whose variables are wrong; hvd::init() says so
  }
}

[[maybe_unused]] const bool before_main = (print_whole_lines(), true);

}  // namespace

void print_whole_lines() noexcept {
  static const bool once = is_launched() && std::setvbuf(stdout, nullptr, _IOLBF, 0) == 0;
  static_cast<void>(once);
}

}  // namespace hvd
