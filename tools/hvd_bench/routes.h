#pragma once
/// Prints which way each collective takes at each size, and why (hvd/routes.h): `hvd_bench
/// --routes`. No other rank is started.

#include <string>

#include "tools/hvd_bench/options.h"

namespace bench {

/// Returns the tables, as Markdown. Measures this machine where the options do not describe it:
/// whether reading another process is slow.
std::string routes_text(const Options& options);

}  // namespace bench
