#include "tools/hvdrun/remote_hosts.h"

#include <fmt/format.h>
#include <sys/random.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <sstream>

namespace hvdrun {

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr auto kPatience = 60s;  // with a host, for each of the steps

/// What nobody else knows.
std::string make_token() {
  if (const char* const given = std::getenv("HVD_INIT_TOKEN"); given != nullptr && *given != '\0') return given;
  std::array<unsigned char, 16> random{};
  if (::getrandom(random.data(), random.size(), 0) != static_cast<ssize_t>(random.size()))
    throw std::runtime_error("the system has no random numbers for the job's token");
  std::string token;
  for (const auto byte : random) token += fmt::format("{:02x}", byte);
  return token;
}

bool is_loopback(const std::string& address) { return address.starts_with("127.") || address == "::1"; }

/// SSH_CONNECTION as its words: two addresses, each with its port; empty where it is none.
std::array<std::string, 4> words_of(const std::string& connection) {
  std::array<std::string, 4> words;
  std::istringstream in(connection);
  for (auto& word : words) in >> word;
  return in ? words : std::array<std::string, 4>{};
}

}  // namespace

RemoteHosts::RemoteHosts(const Plan& plan, const OutputOptions& options, const std::array<Outlet*, 2>& outlets, const Signals& signals)
    : outlets_(outlets), signals_(signals) {
  for (const auto& host : plan.hosts) groups_.emplace_back(plan, host, options, outlets);
  try {
    start_all(plan, options);
  } catch (...) {
    for (auto& group : groups_) group.hang_up();  // so that none waits for another's end
    throw;
  }
}

RemoteHosts::~RemoteHosts() {
  for (auto& group : groups_) group.hang_up();
}

template <typename HasDone>
void RemoteHosts::wait_for(const HasDone& has_done, const char* what) {
  const auto last = Clock::now() + kPatience;
  for (;;) {
    const auto waits = std::find_if(groups_.begin(), groups_.end(), [&](const RemoteGroup& group) { return !has_done(group); });
    if (waits == groups_.end()) return;
    if (Clock::now() > last)
      throw std::runtime_error(fmt::format("{}: it has not {} within {} s", waits->host().name, what, kPatience.count()));
    std::vector<pollfd> waited{{signals_.descriptor(), POLLIN, 0}};
    for (const auto& group : groups_) group.add_waited(waited);
    ::poll(waited.data(), waited.size(), 100);
    for (auto& group : groups_) group.pass_on();
    for (Outlet* const outlet : outlets_) outlet->write_some();
    if (const int signal = signals_.next(); signal != 0 && signal != SIGTSTP) throw Interrupted(signal);
  }
}

MeetingCandidates RemoteHosts::candidates(const Plan& plan) const {
  MeetingCandidates found;
  found.interfaces = plan.interfaces;
  if (!plan.master_address.empty()) {
    found = {.addresses = {plan.master_address}, .interfaces = "", .is_said = true, .allows_loopback = true};
    return found;
  }
  const RemoteGroup& first = groups_.front();
  found.allows_loopback = true;
  for (const auto& group : groups_) {
    const auto words = words_of(group.connection());
    if (group.host().is_this_host) continue;
    found.allows_loopback = found.allows_loopback && is_loopback(words[0]) && is_loopback(words[2]);
    // How that host is called from here, or this one from there.
    const std::string& address = first.host().is_this_host ? words[0] : &group == &first ? words[2] : std::string();
    if (!address.empty()) found.addresses.push_back(address);
  }
  const std::string& name = first.host().name;
  if (!first.host().is_this_host) found.addresses.push_back(name.substr(name.find('@') + 1));
  if (found.allows_loopback && found.addresses.empty()) found.addresses.emplace_back("127.0.0.1");
  return found;
}

void RemoteHosts::start_all(const Plan& plan, const OutputOptions& options) {
  wait_for([](const RemoteGroup& group) { return group.has_greeted(); }, "answered");
  RemoteGroup& first = groups_.front();
  first.reserve(candidates(plan));
  wait_for([&](const RemoteGroup& group) { return &group != &first || !group.reserved().empty(); }, "said where ranks can meet");
  HostJob job;
  job.command = plan.program.command;
  job.unset = plan.program.unset;
  job.ranks = plan.ranks;
  job.time_to_end = static_cast<int>(options.time_to_end.count());
  const std::string token = make_token();
  for (auto& group : groups_) {
    const HostRanks& host = group.host();
    job.first = host.first;
    job.count = host.count;
    job.variables.clear();
    if (!host.is_this_host) {
      job.variables = plan.exports;
      job.variables.emplace_back("PWD", plan.folder);
      job.folder = plan.folder;
    }
    job.variables.insert(job.variables.end(), plan.program.variables.begin(), plan.program.variables.end());
    job.variables.emplace_back("HVD_INIT", first.reserved());
    job.variables.emplace_back("HVD_INIT_TOKEN", token);
    group.start(job);
    if (options.verbose)
      outlets_[1]->add(fmt::format("hvdrun: {}: {} rank{} from {} on, which meet at {}\n", host.name, host.count,
                                   host.count == 1 ? "" : "s", host.first, first.reserved()));
    job.folder.clear();
  }
  wait_for([](const RemoteGroup& group) { return group.has_started(); }, "started its ranks");
}

}  // namespace hvdrun
