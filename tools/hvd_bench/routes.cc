#include "tools/hvd_bench/modes.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "hvd/routes.h"
#include "hvd/topology.h"
#include "ops/shm/memory/peer_memory.h"
#include "tools/hvd_bench/report.h"

namespace bench {

namespace {

using hvd::OpKind;
using hvd::Route;
using hvd::RouteChoice;
using hvd::RouteQuestion;

constexpr std::size_t kMostBytes = std::size_t{1} << 30;

RouteQuestion question_of(const Options& options) {
  const auto copies = hvd::Config::from_environment().direct_copies;
  RouteQuestion question;
  question.op = options.op;
  question.dtype = options.dtype;
  question.ranks = static_cast<std::size_t>(options.ranks);
  question.hosts = static_cast<std::size_t>(options.hosts);
  question.memory =
      options.in_arena.back() ? RouteQuestion::Memory::Shared : RouteQuestion::Memory::Ordinary;
  question.machine.reads_others = copies != hvd::DirectCopies::Off;
  question.machine.is_slow = copies == hvd::DirectCopies::Relayed ||
                             (copies == hvd::DirectCopies::Auto && hvd::is_slow_to_read());
  const std::size_t ranks_of_host = (question.ranks + question.hosts - 1) / question.hosts;
  const auto cores =
      options.cores > 0 ? static_cast<unsigned>(options.cores) : hvd::detail::usable_cores();
  question.machine.has_core = ranks_of_host <= cores;
  return question;
}

struct Pair {
  std::optional<RouteChoice> repeated, otherwise;
  bool operator==(const Pair&) const = default;
};

Pair routes_of(RouteQuestion question, std::size_t bytes) {
  question.bytes = bytes;
  question.repeats = true;
  const auto repeated = hvd::choose(question);
  question.repeats = false;
  return {repeated, hvd::choose(question)};
}

/// Returns the largest size up to `end` that goes as `begin` does, if there is one change between
/// them at most.
std::size_t last_alike(const RouteQuestion& question, std::size_t begin, std::size_t end) {
  const Pair pair = routes_of(question, begin);
  while (begin < end) {
    const std::size_t middle = begin + (end - begin + 1) / 2;
    if (routes_of(question, middle) == pair) {
      begin = middle;
    } else {
      end = middle - 1;
    }
  }
  return begin;
}

/// Adds the rows of a collective, and to `taken` its ways.
std::string rows_of(RouteQuestion question, std::set<Route>& taken) {
  std::string text;
  std::size_t from = 0;
  for (std::size_t to = 0; from <= kMostBytes;) {
    const Pair pair = routes_of(question, from);
    to = from;
    // Step by step, as sizes between two powers of two may differ from both.
    for (std::size_t next = to + std::max<std::size_t>(1, to / 8); to < kMostBytes;
         next = to + std::max<std::size_t>(1, to / 8)) {
      next = std::min(next, kMostBytes);
      const std::size_t alike = last_alike(question, to, next);
      to = alike;
      if (alike < next) break;
    }
    const auto name = [&](const std::optional<RouteChoice>& way) {
      if (!way) return std::string("none: agreed, and done");
      taken.insert(way->route);
      return hvd::name_of(*way);
    };
    const bool is_last = to == kMostBytes;
    const std::string sizes = is_last ? (from == 0 ? "any" : "more") : "to " + text_of_bytes(to);
    text += fmt::format("| {} | {} | {} | {} |\n", from == 0 ? hvd::name_of(question.kind) : "",
                        sizes, name(pair.repeated), name(pair.otherwise));
    from = to + 1;
  }
  return text;
}

std::string limits_text() {
  std::string text = "| limit | of | why | measured |\n|---:|---|---|---|\n";
  for (const auto& row : hvd::kLimits) {
    const std::string value =
        row.what.starts_with("bytes") ? text_of_bytes(row.value) : fmt::format("{}", row.value);
    text += fmt::format("| {} | {} | {} | {} |\n", value, row.what, row.why, row.measured);
  }
  return text;
}

}  // namespace

std::string routes_text(const Options& options) {
  RouteQuestion question = question_of(options);
  const auto& machine = question.machine;
  std::string text = fmt::format(
      "{} ranks on {}, {}; ranks of a host {}; {} of {} in {} memory.\n\n", question.ranks,
      question.hosts == 1 ? "one host" : fmt::format("{} hosts", question.hosts),
      machine.has_core ? "each with a core of its own" : "which share cores",
      !machine.reads_others ? "cannot read each other's memory"
      : machine.is_slow     ? "are slow to read each other's memory"
                            : "read each other's memory",
      name_of(options.op), hvd::name_of(options.dtype),
      question.memory == RouteQuestion::Memory::Shared ? "shared" : "ordinary");
  text +=
      "| collective | bytes of a rank's input | repeated, and waited for | otherwise "
      "|\n|---|---:|---|---|\n";
  std::set<Route> taken;
  for (const auto kind : {OpKind::Allreduce, OpKind::Broadcast, OpKind::Allgather, OpKind::Alltoall,
                          OpKind::Reducescatter, OpKind::Barrier}) {
    question.kind = kind;
    text += rows_of(question, taken);
  }
  text += "\n| way | who does the work | why |\n|---|---|---|\n";
  for (const Route route : taken) {
    const auto& row = hvd::all_routes()[static_cast<std::size_t>(route)];
    text += fmt::format("| {} | {} | {} |\n", row.name, row.who, row.why);
  }
  return text + fmt::format("\n{} of {} routes.\n\n", taken.size(), hvd::kRoutes) + limits_text();
}

}  // namespace bench
