#pragma once
/// This measures what the library costs while nobody uses it. Collective.

#include <vector>

namespace bench {

/// Sleeps; the processor time of each rank, all its threads, in percent of a core.
std::vector<double> measure_idle(double seconds);

}  // namespace bench
