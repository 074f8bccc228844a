#pragma once
/// A report says what was simulated, as two tables: the protocol (messages, bytes, virtual time),
/// and the processor time that the library's own code took on this machine meanwhile.

#include <vector>

#include "tests/scale/simulation.h"

namespace scale {

/// A step as the tables show it; of several steady steps the mean.
struct Summary {
  double rounds = 0, cuts = 0;
  double messages_mean = 0, messages_most = 0,
         messages_root = 0;                ///< sent and received, per leader
  double bytes_most = 0, bytes_total = 0;  ///< sent and received by one leader; sent by all
  double time_us = 0;
  double relay_mean_us = 0, relay_most_us = 0;  ///< processor time, per leader
  double table_us = 0;  ///< processor time, per rank: each reads the whole log
};
Summary summary_of(const std::vector<StepResult>& steps);

struct Row {
  int ranks = 0, hosts = 0, tables = 0;
  Summary first, steady;
};
void print(const std::vector<Row>& rows);

}  // namespace scale
