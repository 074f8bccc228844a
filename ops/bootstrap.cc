#include "ops/bootstrap.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "hvd/base/log.h"
#include "hvd/base/text.h"
#include "hvd/launch/launch.h"
#include "hvd/negotiation/values/signature.h"
#include "hvd/negotiation/values/status_wire.h"
#include "ops/mpi/library.h"
#include "ops/mpi/meeting.h"
#include "ops/rendezvous/store_meeting.h"

namespace hvd {

namespace {

/// The mark before a rank's bytes.
enum class Mark : std::uint8_t { Well, Failed };

}  // namespace

Bootstrap::Bootstrap(std::chrono::milliseconds patience) {
  const Launch launch = read_launch();
  const bool is_started = is_mpi_started();
  // a world of one needs nobody
  if (launch.way == Launch::Way::Alone && (!is_started || launch.is_forced)) return;
  const bool can_start = is_started || launch.can_start_mpi;
  if (!can_start && !launch.store) throw BackendError(no_process_manager(launch));
  if (can_start && (launch.way != Launch::Way::Store || (is_started && !launch.is_forced))) {
    // Where MPI, which the program has started, knows nothing of the others, or is not to be had,
    // they meet without it.
    if (meet_through_mpi(launch, is_started)) return;
  }
  meeting_ = meet_in_store(launch, patience);
}

bool Bootstrap::meet_through_mpi(const Launch& launch, bool is_started) {
  if (const std::string problem = open_mpi(); !problem.empty()) {
    if (launch.store) return false;
    // a world of one needs nobody
    if (!is_started && launch.hints.size == 1 && !launch.is_forced) return true;
    throw BackendError(no_mpi(launch, problem));
  }
  auto mpi = MpiMeeting::start(launch.hints.rank.value_or(0));
  const int size = mpi->size();
  const bool is_right =
      launch.hints.size ? *launch.hints.size == size : size > 1 || launch.may_be_alone;
  if (!is_right && !launch.store) throw BackendError(wrong_world(launch, size, mpi_library()));
  if (!is_right) return false;
  mpi_ = mpi.get();
  meeting_ = std::move(mpi);
  mpi_->watch_peers();
  return true;
}

void Bootstrap::begin() {
  knows_failure_ = false;
  if (meeting_) meeting_->begin();
}

std::vector<Bytes> Bootstrap::allgather(const Bytes& mine) const {
  if (!meeting_) return {mine};
  Bytes marked = to_wire(Mark::Well);
  marked.insert(marked.end(), mine.begin(), mine.end());
  auto all = meeting_->allgather(marked);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    Reader said(all[rank]);
    if (said.get<Mark>() == Mark::Well) continue;
    knows_failure_ = true;
    const Status why = decode_status(said);
    Status(why.code(), formatted("hvd::init() failed on rank {}: {}", rank, why.text())).raise();
  }
  for (Bytes& bytes : all) bytes.erase(bytes.begin());
  return all;
}

void Bootstrap::fail(const Status& status) const noexcept {
  if (!meeting_ || knows_failure_ || !is_whole()) return;
  try {
    static_cast<void>(meeting_->allgather(to_wire(Mark::Failed, status)));
  } catch (...) {
    log(LogLevel::Warning, "the other ranks could not be told that hvd::init() failed: {}",
        status_of_current_exception().text());
  }
}

bool Bootstrap::is_whole() const { return !meeting_ || meeting_->broken().empty(); }

void Bootstrap::require_equal(
    const std::vector<std::pair<std::string, std::string>>& settings) const {
  Writer writer;
  for (const auto& [name, value] : settings) writer.put_string(value);
  const auto all = allgather(writer.take());
  std::vector<int> ranks(all.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  std::vector<Reader> readers(all.begin(), all.end());
  std::string differences;
  for (const auto& [name, value] : settings) {
    std::vector<std::string> said;
    for (auto& reader : readers) said.push_back(reader.get_string());
    if (std::all_of(said.begin(), said.end(),
                    [&](const auto& text) { return text == said.front(); }))
      continue;
    differences +=
        formatted("{}{} ({})", differences.empty() ? "" : ", ", name, grouped_by_rank(ranks, said));
  }
  if (!differences.empty())
    throw Mismatch(
        formatted("hvd::init(): the configuration must be equal on all ranks: {}", differences));
}

Topology Bootstrap::find_hosts() const {
  if (!meeting_) return Topology::single_domain(0, 1);
  const std::vector<int> firsts = meeting_->find_hosts();
  const int first = firsts[static_cast<std::size_t>(rank())];

  Topology topology;
  topology.rank = rank();
  topology.size = size();
  std::map<int, int> numbers;  // first rank of a host -> number of the host
  for (const int host_first : firsts) numbers.emplace(host_first, 0);
  int next = 0;
  for (auto& [host_first, number] : numbers) number = next++;
  topology.domain_of_rank.clear();
  topology.domain_ranks.clear();
  std::vector<int> sizes(numbers.size(), 0);
  for (int other = 0; other < size(); ++other) {
    const int number = numbers.at(firsts[static_cast<std::size_t>(other)]);
    topology.domain_of_rank.push_back(number);
    ++sizes[static_cast<std::size_t>(number)];
    if (firsts[static_cast<std::size_t>(other)] == first) topology.domain_ranks.push_back(other);
  }
  topology.host_of_rank = topology.domain_of_rank;
  topology.domains = topology.cross_size = next;
  topology.domain = topology.cross_rank = numbers.at(first);
  topology.domain_index = topology.local_rank = topology.index_here(rank());
  topology.local_size = static_cast<int>(topology.domain_ranks.size());
  topology.homogeneous =
      std::all_of(sizes.begin(), sizes.end(), [&](int n) { return n == sizes.front(); });
  return topology;
}

Bytes Bootstrap::give_from_first(const std::vector<int>& ranks, const Bytes& mine, int tag,
                                 const std::function<bool()>& give_up) const {
  return meeting_ ? meeting_->give_from_first(ranks, mine, tag, give_up) : mine;
}

void Bootstrap::barrier() const {
  if (meeting_) meeting_->barrier();
}

}  // namespace hvd
