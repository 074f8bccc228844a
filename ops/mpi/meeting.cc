#include "ops/mpi/meeting.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/base/threads.h"
#include "hvd/errors.h"

namespace hvd {

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

bool we_started_mpi = false;
constexpr int kTagOfLosses = 0;
constexpr int kTagOfEnds = 1;
constexpr int kTagOfGifts = 2;
constexpr auto kLookInterval = 100ms;
constexpr auto kGrace = 1s;

/// Asks again and again without keeping a core busy.
void wait_quietly(const std::function<bool()>& happened) {
  for (int round = 0; !happened(); ++round)
    if (round > 100) std::this_thread::sleep_for(50us);
}

bool is_mpi_finalized() {
  int finalized = 0;
  return mpi().finalized(&finalized) != MPI_SUCCESS || finalized != 0;
}

/// Returns the work to be done before MPI ends.
std::function<void()>& before_mpi_ends() {
  static auto* const work = new std::function<void()>;
  return *work;
}
extern "C" int hvd_mpi_not_copied(MPI_Comm /*comm*/, int /*key*/, void* /*extra*/, void* /*value*/,
                                  void* /*copy*/, int* is_copied) {
  *is_copied = 0;
  return MPI_SUCCESS;
}
extern "C" int hvd_mpi_ends(MPI_Comm /*comm*/, int /*key*/, void* /*value*/, void* /*extra*/) {
  if (before_mpi_ends()) before_mpi_ends()();
  return MPI_SUCCESS;
}

}  // namespace

std::unique_ptr<MpiMeeting> MpiMeeting::start(int rank) {
  if (is_mpi_finalized())
    throw BackendError("hvd::init(): MPI has been finalized, and cannot be started again");
  int level = MPI_THREAD_SINGLE;
  int initialized = 0;
  check_mpi(mpi().initialized(&initialized), "MPI_Initialized", rank);
  if (initialized != 0) {
    mpi().query_thread(&level);
  } else {
    const SignalsKeptOff of_its_threads;  // a child that it forks begins with a mask of its own
    check_mpi(mpi().init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread",
              rank);
    we_started_mpi = true;
  }
  return std::unique_ptr<MpiMeeting>(new MpiMeeting(MpiComm::duplicate(mpi().comm_world), level));
}

void MpiMeeting::watch_peers() { peers_.watch(allgather(Peers::introduce()), rank()); }

void MpiMeeting::before_finalize(std::function<void()> work) const {
  const bool is_first = !std::exchange(before_mpi_ends(), std::move(work));
  if (!is_first) return;
  // MPI_Finalize begins as if it freed MPI_COMM_SELF, while all of MPI still works.
  int key = MPI_KEYVAL_INVALID;
  comm_.check(mpi().comm_create_keyval(hvd_mpi_not_copied, hvd_mpi_ends, &key, nullptr),
              "MPI_Comm_create_keyval");
  comm_.check(mpi().comm_set_attr(mpi().comm_self, key, nullptr), "MPI_Comm_set_attr");
}

void MpiMeeting::begin() {
  if (is_mpi_finalized())
    throw BackendError("hvd::init(): MPI has been finalized, and cannot be started again");
  if (!broken_.empty())
    throw BackendError(formatted("hvd::init(): MPI cannot be used any more: {}", broken_));
}

/// The memory that the calls of an exchange read and write. Where one does not end, MPI still may:
/// then it is never freed.
struct MpiMeeting::Exchange {
  Bytes mine, all;
  std::vector<int> lengths, starts;
  int length = 0;
  MPI_Request request{};
};

void MpiMeeting::finish(MPI_Request& request, std::string_view call) {
  auto next_look = Clock::now() + kLookInterval;
  std::optional<Clock::time_point> give_up;
  std::string lost;
  wait_quietly([&] {
    int done = 0;
    comm_.check(mpi().test(&request, &done, MPI_STATUS_IGNORE), call);
    if (done != 0 || Clock::now() < next_look) return done != 0;
    next_look = Clock::now() + kLookInterval;
    // Who has ended may have done its part before, and what it sent be on its way.
    if (!give_up) {
      lost = find_loss();
      if (!lost.empty()) give_up = Clock::now() + kGrace;
    } else if (Clock::now() > *give_up) {
      broken_ = lost;
      tell_loss();
      throw RankFailed(lost);
    }
    return false;
  });
}

std::string MpiMeeting::find_loss() {
  if (const auto dead = peers_.find_dead()) return words_of_dead(*dead);
  int there = 0;
  MPI_Status status;
  comm_.check(mpi().iprobe(MPI_ANY_SOURCE, kTagOfLosses, comm_.get(), &there, &status),
              "MPI_Iprobe");
  if (there == 0) return {};
  int length = 0;
  comm_.check(mpi().get_count(&status, mpi().byte_type, &length), "MPI_Get_count");
  std::string text(static_cast<std::size_t>(length), ' ');
  comm_.check(mpi().recv(text.data(), length, mpi().byte_type, status.MPI_SOURCE, kTagOfLosses,
                         comm_.get(), MPI_STATUS_IGNORE),
              "MPI_Recv");
  return text;
}

void MpiMeeting::tell_loss() {
  // Ranks of other hosts cannot see it. A few bytes leave at once, wherever this rank goes next.
  static auto* const texts = new std::vector<std::unique_ptr<std::string>>;
  const std::string& text = *texts->emplace_back(std::make_unique<std::string>(broken_));
  for (int other = 0; other < size(); ++other) {
    if (other == rank()) continue;
    MPI_Request request{};
    if (mpi().isend(text.data(), static_cast<int>(text.size()), mpi().byte_type, other,
                    kTagOfLosses, comm_.get(), &request) == MPI_SUCCESS)
      mpi().request_free(&request);
  }
}

std::vector<Bytes> MpiMeeting::allgather(const Bytes& mine) {
  const auto ranks = static_cast<std::size_t>(size());
  auto held = std::make_unique<Exchange>();
  Exchange& of = *held;
  of.mine = mine;
  of.lengths.resize(ranks);
  of.length = static_cast<int>(mine.size());
  try {
    comm_.check(mpi().iallgather(&of.length, 1, mpi().int_type, of.lengths.data(), 1,
                                 mpi().int_type, comm_.get(), &of.request),
                "MPI_Iallgather");
    finish(of.request, "MPI_Iallgather");
    int total = 0;
    for (const int of_rank : of.lengths) {
      of.starts.push_back(total);
      total += of_rank;
    }
    of.all.resize(static_cast<std::size_t>(total));
    comm_.check(mpi().iallgatherv(of.mine.data(), of.length, mpi().byte_type, of.all.data(),
                                  of.lengths.data(), of.starts.data(), mpi().byte_type, comm_.get(),
                                  &of.request),
                "MPI_Iallgatherv");
    finish(of.request, "MPI_Iallgatherv");
  } catch (...) {
    static_cast<void>(held.release());
    if (broken_.empty()) broken_ = status_of_current_exception().text();
    throw;
  }
  std::vector<Bytes> result;
  for (std::size_t i = 0; i < ranks; ++i)
    result.emplace_back(of.all.begin() + of.starts[i],
                        of.all.begin() + of.starts[i] + of.lengths[i]);
  return result;
}

void MpiMeeting::require_threads(std::string_view who) const {
  if (level_ >= MPI_THREAD_SERIALIZED) return;
  const char* const level =
      level_ == MPI_THREAD_FUNNELED ? "MPI_THREAD_FUNNELED" : "MPI_THREAD_SINGLE";
  const std::string why = formatted(
      "{} need MPI with MPI_THREAD_SERIALIZED at least, because hvd calls it in threads of its own",
      who);
  if (we_started_mpi) throw BackendError(formatted("{}; this MPI offers {} only", why, level));
  throw BackendError(
      formatted("{}; the program has started it with {}: call MPI_Init_thread(&argc, &argv, "
                "MPI_THREAD_MULTIPLE, &provided) instead of MPI_Init, or leave it to hvd::init() "
                "to start MPI",
                why, level));
}

std::vector<int> MpiMeeting::find_hosts() {
  MPI_Comm raw{};
  comm_.check(
      mpi().comm_split_type(comm_.get(), MPI_COMM_TYPE_SHARED, rank(), mpi().info_null, &raw),
      "MPI_Comm_split_type");
  const MpiComm host(raw);
  int first = rank();
  comm_.check(mpi().bcast(&first, 1, mpi().int_type, 0, host.get()), "MPI_Bcast");
  std::vector<int> hosts;
  for (const auto& bytes : allgather(Writer().put(first).take()))
    hosts.push_back(Reader(bytes).get<int>());
  return hosts;
}

void MpiMeeting::send_to_others(const std::vector<int>& ranks, const Bytes& mine, int mpi_tag,
                                const std::function<bool()>& give_up) {
  auto sent = std::make_unique<Bytes>(mine);
  std::vector<MPI_Request> requests(ranks.size() - 1, mpi().request_null);
  try {
    for (std::size_t i = 0; i < requests.size(); ++i)
      comm_.check(mpi().isend(sent->data(), static_cast<int>(sent->size()), mpi().byte_type,
                              ranks[i + 1], mpi_tag, comm_.get(), &requests[i]),
                  "MPI_Isend");
    wait_quietly([&] {
      int done = 0;
      comm_.check(mpi().testall(static_cast<int>(requests.size()), requests.data(), &done,
                                MPI_STATUSES_IGNORE),
                  "MPI_Testall");
      if (done == 0 && give_up())
        throw BackendError(
            formatted("rank {} has to give something, which not all others take", rank()));
      return done != 0;
    });
  } catch (...) {
    (void)sent.release();  // MPI may still read it: a send cannot be taken back
    throw;
  }
}

Bytes MpiMeeting::give_from_first(const std::vector<int>& ranks, const Bytes& mine, int tag,
                                  const std::function<bool()>& give_up) {
  if (ranks.size() < 2) return mine;
  const int mpi_tag = kTagOfGifts + tag % (comm_.largest_tag() - kTagOfGifts);
  if (rank() == ranks.front()) {
    send_to_others(ranks, mine, mpi_tag, give_up);
    return mine;
  }
  MPI_Message message{};
  MPI_Status status;
  wait_quietly([&] {
    int there = 0;
    comm_.check(mpi().improbe(ranks.front(), mpi_tag, comm_.get(), &there, &message, &status),
                "MPI_Improbe");
    if (there == 0 && give_up())
      throw BackendError(
          formatted("rank {} waited in vain for what rank {} has to give", rank(), ranks.front()));
    return there != 0;
  });
  int bytes = 0;
  comm_.check(mpi().get_count(&status, mpi().byte_type, &bytes), "MPI_Get_count");
  Bytes received(static_cast<std::size_t>(bytes));
  comm_.check(mpi().mrecv(received.data(), bytes, mpi().byte_type, &message, MPI_STATUS_IGNORE),
              "MPI_Mrecv");
  return received;
}

std::optional<int> MpiMeeting::take_ends(int source) const {
  for (int taken = 0;; ++taken) {
    int there = 0, length = 0;
    MPI_Status status;
    comm_.check(mpi().iprobe(source, kTagOfEnds, comm_.get(), &there, &status), "MPI_Iprobe");
    if (there == 0) return taken;
    comm_.check(mpi().get_count(&status, mpi().byte_type, &length), "MPI_Get_count");
    std::byte gives_up{};
    comm_.check(mpi().recv(&gives_up, length, mpi().byte_type, status.MPI_SOURCE, kTagOfEnds,
                           comm_.get(), MPI_STATUS_IGNORE),
                "MPI_Recv");
    if (length > 0) return std::nullopt;
  }
}

/// Says that this rank ends; `gives_up`: without the others, after all.
void MpiMeeting::tell_end(int other, bool gives_up) const {
  static constexpr std::byte kGivesUp{1};
  MPI_Request request{};
  comm_.check(mpi().isend(&kGivesUp, gives_up ? 1 : 0, mpi().byte_type, other, kTagOfEnds,
                          comm_.get(), &request),
              "MPI_Isend");
  mpi().request_free(&request);
}

bool MpiMeeting::await_ends(std::chrono::milliseconds patience) const {
  const auto give_up = Clock::now() + patience;
  const bool is_first = rank() == 0;
  const auto tell = [&](bool gives_up) {
    if (!is_first) return tell_end(0, gives_up);
    for (int other = 1; other < size(); ++other) tell_end(other, gives_up);
  };
  if (!is_first) tell(false);
  for (int awaited = is_first ? size() - 1 : 1;;) {
    const auto came = take_ends(is_first ? MPI_ANY_SOURCE : 0);
    awaited -= came.value_or(0);
    if (!came || peers_.find_dead() || (awaited > 0 && Clock::now() > give_up)) break;
    if (awaited == 0) {
      if (is_first) tell(false);
      return true;
    }
    std::this_thread::sleep_for(1ms);
  }
  tell(true);
  return false;
}

void MpiMeeting::finalize_if_all_end(std::chrono::milliseconds patience) const noexcept {
  // a process that was refused once, and then had a world, comes here twice
  static bool has_come = false;
  if (std::exchange(has_come, true) || !we_started_mpi || is_mpi_finalized() ||
      !threads_supported() || !broken_.empty())
    return;
  try {
    if (await_ends(patience)) finalize_mpi();
  } catch (const Error&) {
    // MPI ends as where a rank has died
  }
}

void finalize_mpi() {
  if (we_started_mpi && !is_mpi_finalized()) mpi().finalize();
}

}  // namespace hvd
