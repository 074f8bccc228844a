#include "tests/scale/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>

namespace scale {

Summary summary_of(const std::vector<StepResult>& steps) {
  Summary sum;
  for (const auto& step : steps) {
    const auto hosts = static_cast<double>(step.hosts.size());
    double messages = 0, most = 0, bytes = 0, sent = 0, relay = 0, relay_most = 0, table = 0;
    for (const auto& host : step.hosts) {
      messages += static_cast<double>(host.traffic.messages());
      most = std::max(most, static_cast<double>(host.traffic.messages()));
      bytes = std::max(bytes, static_cast<double>(host.traffic.bytes()));
      sent += static_cast<double>(host.traffic.up_bytes + host.traffic.down_bytes);
      relay += microseconds(host.relay_took);
      relay_most = std::max(relay_most, microseconds(host.relay_took));
      table += microseconds(host.table_took);
    }
    sum.rounds += step.rounds;
    sum.cuts += step.cuts;
    sum.messages_mean += messages / hosts;
    sum.messages_most += most;
    sum.messages_root += static_cast<double>(step.hosts.front().traffic.messages());
    sum.bytes_most += bytes;
    sum.bytes_total += sent;
    sum.time_us += microseconds(step.time);
    sum.relay_mean_us += relay / hosts;
    sum.relay_most_us += relay_most;
    sum.table_us += table / hosts;
  }
  for (double* value : {&sum.rounds, &sum.cuts, &sum.messages_mean, &sum.messages_most,
                        &sum.messages_root, &sum.bytes_most, &sum.bytes_total, &sum.time_us,
                        &sum.relay_mean_us, &sum.relay_most_us, &sum.table_us})
    *value /= static_cast<double>(steps.size());
  return sum;
}

namespace {

using Value = double (*)(const Row&);

/// How much more a value has grown since 64 ranks than log2 of `size`; a dash where that says
/// nothing.
std::string growth(const std::vector<Row>& rows, const Row& row, int Row::*size, Value value) {
  const auto base =
      std::find_if(rows.begin(), rows.end(), [](const Row& other) { return other.ranks == 64; });
  if (base == rows.end() || row.*size < 2 || (*base).*size < 2 || value(*base) <= 0) return "-";
  return fmt::format("{:.2f}",
                     value(row) / std::log2(row.*size) / (value(*base) / std::log2((*base).*size)));
}

std::string bytes_text(double bytes) {
  if (bytes < 10'000) return fmt::format("{:.0f}", bytes);
  if (bytes < 1e7) return fmt::format("{:.1f}k", bytes / 1e3);
  return fmt::format("{:.1f}M", bytes / 1e6);
}

void print_protocol(const std::vector<Row>& rows, const char* title, const Summary Row::*step,
                    Value time) {
  fmt::print("\n{}\n{:>6} {:>6} {:>7} {:>5} {:>10} {:>6} {:>6} {:>12} {:>12} {:>10} {:>8} {:>8}\n",
             title, "ranks", "hosts", "rounds", "cuts", "msgs/leader", "most", "root",
             "bytes, most", "bytes, all", "time us", "/lg rank", "/lg host");
  for (const auto& row : rows) {
    const Summary& sum = row.*step;
    fmt::print(
        "{:>6} {:>6} {:>7.1f} {:>5.1f} {:>11.1f} {:>6.1f} {:>6.1f} {:>12} {:>12} {:>10.1f} {:>8} "
        "{:>8}\n",
        row.ranks, row.hosts, sum.rounds, sum.cuts, sum.messages_mean, sum.messages_most,
        sum.messages_root, bytes_text(sum.bytes_most), bytes_text(sum.bytes_total), sum.time_us,
        growth(rows, row, &Row::ranks, time), growth(rows, row, &Row::hosts, time));
  }
}

}  // namespace

void print(const std::vector<Row>& rows) {
  print_protocol(rows, "First step (introduces all tensors)", &Row::first,
                 [](const Row& row) { return row.first.time_us; });
  print_protocol(rows, "Steady step", &Row::steady,
                 [](const Row& row) { return row.steady.time_us; });
  fmt::print("\nProcessor time of the library's own code on this machine, us per step\n");
  fmt::print("{:>6} {:>6} {:>6} {:>12} {:>12} {:>12} {:>13} {:>12} {:>13} {:>8} {:>8}\n", "ranks",
             "hosts", "tables", "first: relay", "most", "table", "steady: relay", "most", "table",
             "relay/lg", "table/lg");
  for (const auto& row : rows)
    fmt::print(
        "{:>6} {:>6} {:>6} {:>12.1f} {:>12.1f} {:>12.1f} {:>13.1f} {:>12.1f} {:>13.1f} {:>8} "
        "{:>8}\n",
        row.ranks, row.hosts, row.tables, row.first.relay_mean_us, row.first.relay_most_us,
        row.first.table_us, row.steady.relay_mean_us, row.steady.relay_most_us, row.steady.table_us,
        growth(rows, row, &Row::ranks, [](const Row& r) { return r.steady.relay_most_us; }),
        growth(rows, row, &Row::ranks, [](const Row& r) { return r.steady.table_us; }));
  fmt::print(
      "\n/lg: the value divided by log2 of ranks or hosts, as a multiple of the same at 64 ranks. "
      "The two tables of time do not hold the\n"
      "processor time below them, which comes on top (--measured charges it); relay: of a leader; "
      "table: of each rank, as all read the log\n");
  std::fflush(stdout);
}

}  // namespace scale
