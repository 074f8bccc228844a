#include "tests/contract/runner.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "tests/support/engine_probe.h"

namespace hvd::contract {

namespace {

using namespace std::chrono_literals;
constexpr auto kCellLimit = 40s;  // the slowest takes about a second
constexpr std::size_t kShown = 40;

}  // namespace

std::vector<int> ranks_of(SetKind set, int size) {
  std::vector<int> ranks;
  for (int rank = 0; rank < size; ++rank) {
    const bool is_in =
        set == SetKind::Global || (set == SetKind::Early ? rank % 2 == 0 : rank > 0 || size == 1);
    if (is_in) ranks.push_back(rank);
  }
  return ranks;
}

bool Context::is_in(SetKind set) const {
  const auto ranks = ranks_of(set);
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

void Context::need(OpKind kind, DataType dtype, ReduceOp op) const {
  if (endpoint.supports(kind, dtype, op, setting.device)) return;
  std::string what = std::string(name_of(kind));
  if (kind == OpKind::Allreduce)
    what += std::string(" ") + reduction_name(op) + " of " + type_name(dtype);
  throw Skip{setting.name.substr(0, setting.name.find(',')) + ": no backend does " + what +
             " (Backend::supports)"};
}

void Report::merge_rank(const Report& other) {
  for (const auto& [one, texts] : other.failed) {
    auto& all = failed[one];
    all.insert(all.end(), texts.begin(), texts.end());
  }
  for (const auto& [way, times] : other.taken) taken[way] += times;
}

void Report::add(const Report& other) {
  run += other.run;
  merge_rank(other);
  for (const auto& [reason, count] : other.skipped) skipped[reason] += count;
}

Watch::Watch(std::string setting, int first_rank, int ranks)
    : setting_(std::move(setting)),
      first_rank_(first_rank),
      cases_(static_cast<std::size_t>(ranks), "nothing yet"),
      turns_(static_cast<std::size_t>(ranks)),
      thread_([this] { watch(); }) {}

Watch::~Watch() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Watch::enter(int rank, const std::string& one) {
  const std::lock_guard lock(mutex_);
  const auto at = static_cast<std::size_t>(rank - first_rank_);
  cases_[at] = one;
  ++turns_[at];
}

void Watch::watch() {
  std::unique_lock lock(mutex_);
  auto seen = turns_;
  while (!ending_) {
    if (changed_.wait_for(lock, kCellLimit, [this] { return ending_; })) return;
    // hangs spread to all ranks at once: they work together
    if (std::exchange(seen, turns_) != turns_) continue;
    for (std::size_t i = 0; i < cases_.size(); ++i)
      std::fprintf(stderr, "watchdog: %s: rank %zu hangs in case '%s'\n", setting_.c_str(),
                   static_cast<std::size_t>(first_rank_) + i, cases_[i].c_str());
    std::fflush(stderr);
    std::this_thread::sleep_for(3s);  // under mpirun: time for the others to say where they are
    std::_Exit(99);
  }
}

namespace {

void run_case(Context& context, const Case& one, Report& report) {
  context.failures.clear();
  try {
    one.body(context);
  } catch (const Skip& skip) {
    ++report.skipped[skip.reason];
    return;
  } catch (const std::exception& error) {
    // At once, for the others may hang in this case now.
    std::fprintf(stderr, "%s: %s: rank %d threw %s\n", context.setting.name.c_str(),
                 one.name.c_str(), context.rank, error.what());
    context.fail(std::string("threw ") + error.what());
  }
  ++report.run;
  for (const auto& text : context.failures)
    report.failed[context.setting.name + ": " + one.name].push_back(
        "rank " + std::to_string(context.rank) + ": " + text);
}

bool is_chosen(const Case& one, const Choice& choice, std::size_t& products) {
  if (one.name.find(choice.filter) == std::string::npos) return false;
  return !one.of_a_product || products++ % static_cast<std::size_t>(choice.every) == 0;
}

}  // namespace

Report run_rank(Endpoint& endpoint, const Setting& setting, int rank,
                std::map<std::string, Block>& notebook, const Choice& choice, Watch& watch) {
  Report report;
  Context context{endpoint, setting, rank, setting.size, notebook};
  watch.enter(rank, "(making the late set)");
  context.late_set = endpoint.add_set(context.ranks_of(SetKind::Late));
  std::size_t products = 0;
  for (const Case& one : all_cases(setting)) {
    if (!is_chosen(one, choice, products)) continue;
    watch.enter(rank, one.name);
    run_case(context, one, report);
  }
  std::vector<RouteChoice> ways;
  for (const auto& row : all_routes()) ways.push_back({row.route});
  for (std::size_t access = 1; access < kAccesses; ++access)
    ways.push_back({Route::EachItsPart, static_cast<Access>(access)});
  for (const RouteChoice& way : ways)
    report.taken[name_of(way)] = EngineProbe::taken(endpoint.engine(), way);
  const Case last{"shutdown/pending", run_shutdown_cell};
  watch.enter(rank, last.name);
  if (is_chosen(last, choice, products)) {
    run_case(context, last, report);
  } else {
    endpoint.shutdown();
  }
  watch.enter(rank, "(done)");
  return report;
}

int conclude(const Report& report, const std::vector<std::string>& routes) {
  bool all_taken = true;
  for (const auto& [name, taken] : report.taken)
    if (taken > 0)
      std::printf("taken %llu times: %s\n", static_cast<unsigned long long>(taken), name.c_str());
  for (const auto& name : routes) {
    const auto found = report.taken.find(name);
    if (found != report.taken.end() && found->second > 0) continue;
    std::printf("FAILED: nothing has taken the way '%s'\n", name.c_str());
    all_taken = false;
  }
  std::size_t shown = 0;
  for (const auto& [one, texts] : report.failed) {
    if (shown++ == kShown) std::printf("... and %zu more\n", report.failed.size() - kShown);
    if (shown > kShown) break;
    std::printf("FAILED %s\n", one.c_str());
    for (std::size_t i = 0; i < std::min<std::size_t>(texts.size(), 4); ++i)
      std::printf("  %s\n", texts[i].c_str());
  }
  std::size_t skips = 0;
  for (const auto& [reason, count] : report.skipped) {
    std::printf("skipped %zu: %s\n", count, reason.c_str());
    skips += count;
  }
  std::printf("contract: %zu cases run, %zu failed, %zu skipped\n", report.run,
              report.failed.size(), skips);
  std::fflush(stdout);
  return report.failed.empty() && report.run > 0 && all_taken ? 0 : 1;
}

}  // namespace hvd::contract
