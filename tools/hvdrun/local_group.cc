#include "tools/hvdrun/local_group.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "tools/hvdrun/rank_lines.h"

namespace hvdrun {

class LocalGroup::LocalRank final : public Rank {
 public:
  LocalRank(const Program& program, const RankProcess::Own& own, const OutputOptions& options, const std::array<Outlet*, 2>& outlets)
      : number_(own.rank),
        lines_(own.rank, options, outlets),
        process_(program, own, options.prefixes || !options.folder.empty() ? &lines_ : nullptr) {}
  bool has_ended() override { return process_.has_ended(); }
  void send(int signal) override { process_.send(signal); }
  [[nodiscard]] int exit_code() const override { return process_.end().exit_code(); }
  [[nodiscard]] std::string describe_end() const override {
    return fmt::format("rank {} (process {}) {}", number_, process_.process(), process_.end().text());
  }
  [[nodiscard]] const std::deque<std::string>& last_words() const override { return lines_.last_words(); }
  RankLines& lines() { return lines_; }
  RankProcess& process() { return process_; }
  [[nodiscard]] const RankProcess& process() const { return process_; }

 private:
  const int number_;
  RankLines lines_;
  RankProcess process_;
};

LocalGroup::MeetingPlace::MeetingPlace() {
  const char* const folder = std::getenv("TMPDIR");
  path_ = fmt::format("{}/hvdrun-XXXXXX", folder != nullptr && *folder != '\0' ? folder : "/tmp");
  if (::mkdtemp(path_.data()) == nullptr) throw std::runtime_error(fmt::format("{}: {}", path_, std::strerror(errno)));
}

LocalGroup::MeetingPlace::~MeetingPlace() {
  ::unlink((path_ + "/ranks").c_str());
  ::rmdir(path_.c_str());
}

std::string LocalGroup::MeetingPlace::address() const { return fmt::format("file://{}/ranks", path_); }

LocalGroup::LocalGroup(const Plan& plan, const OutputOptions& options, const std::array<Outlet*, 2>& outlets) {
  for (int rank = 0; rank < plan.ranks; ++rank) {
    RankProcess::Own own{.rank = rank, .variables = variables_of_rank(rank, plan.ranks, rank, plan.ranks)};
    own.variables.emplace_back("HVD_INIT", place_.address());
    if (rank == 0 && ::isatty(STDIN_FILENO) == 0) own.input = STDIN_FILENO;  // a group in the background may not read from a terminal
    ranks_.emplace_back(plan.program, own, options, outlets);
    if (options.verbose) std::fprintf(stderr, "hvdrun: rank %d is process %d\n", rank, static_cast<int>(ranks_.back().process().process()));
  }
}

LocalGroup::~LocalGroup() = default;

std::vector<Rank*> LocalGroup::ranks() {
  std::vector<Rank*> all;
  for (auto& rank : ranks_) all.push_back(&rank);
  return all;
}

void LocalGroup::add_waited(std::vector<pollfd>& waited) const {
  for (const auto& rank : ranks_) rank.process().add_waited(waited);
}

void LocalGroup::pass_on() {
  for (auto& rank : ranks_) rank.process().pass_output_on();
}

bool LocalGroup::has_said_all() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [](const LocalRank& rank) { return rank.process().has_said_all(); });
}

void LocalGroup::finish_output() {
  for (auto& rank : ranks_) rank.lines().finish();
}

}  // namespace hvdrun
