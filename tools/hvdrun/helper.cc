#include "tools/hvdrun/helper.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <list>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "tools/hvdrun/meeting_port.h"
#include "tools/hvdrun/messages.h"
#include "tools/hvdrun/outlet.h"
#include "tools/hvdrun/plan.h"
#include "tools/hvdrun/rank_process.h"
#include "tools/hvdrun/signals.h"

namespace hvdrun {

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr auto kAlive = 10s;  // after which something is said, for a connection that leads nowhere to be noticed

/// One rank, whose output goes to hvdrun.
class HelperRank final : public RankSink {
 public:
  HelperRank(const Program& program, const RankProcess::Own& own, Outlet& out)
      : number_(static_cast<std::uint32_t>(own.rank)), out_(out), process_(program, own, this) {}

  void hear(std::size_t stream, std::string_view bytes) override {
    if (!is_unheard_) out_.add(framed(Kind::Output, Packer().put(number_).put(static_cast<std::uint32_t>(stream)).put(bytes).bytes()));
  }
  [[nodiscard]] bool is_full(std::size_t /*stream*/) const override { return !is_unheard_ && out_.is_full(); }
  /// Nobody is there to be told.
  void become_unheard() { is_unheard_ = true; }
  /// Tells what is new.
  void tell() {
    if (!has_told_end_ && process_.has_ended()) {
      has_told_end_ = true;
      const End& end = process_.end();
      out_.add(framed(Kind::Ended,
                      Packer().put(number_).put(static_cast<std::uint32_t>(end.code)).put(static_cast<std::uint32_t>(end.signal)).bytes()));
    }
    if (!has_told_all_ && process_.has_said_all()) {
      has_told_all_ = true;
      out_.add(framed(Kind::Said, Packer().put(number_).bytes()));
    }
  }
  RankProcess& process() { return process_; }
  [[nodiscard]] std::uint32_t number() const { return number_; }

 private:
  const std::uint32_t number_;
  Outlet& out_;
  bool is_unheard_ = false, has_told_end_ = false, has_told_all_ = false;
  RankProcess process_;
};

/// The standard input of rank 0.
class Input {
 public:
  Input() {
    if (::pipe2(ends_.data(), O_CLOEXEC) != 0) throw std::runtime_error(fmt::format("pipe2: {}", std::strerror(errno)));
    out_.emplace(ends_[1]);
  }
  ~Input() {
    for (const int end : ends_)
      if (end >= 0) ::close(end);
  }
  Input(const Input&) = delete;
  Input& operator=(const Input&) = delete;
  [[nodiscard]] int reader() const { return ends_[0]; }
  /// The rank has it now.
  void give_away() { ::close(std::exchange(ends_[0], -1)); }
  void add(std::string_view bytes) {
    is_over_ = bytes.empty();
    out_->add(bytes);
    taken_ += bytes.size();
  }
  void add_waited(std::vector<pollfd>& waited) const {
    if (ends_[1] >= 0 && !out_->is_empty()) waited.push_back({ends_[1], POLLOUT, 0});
  }
  /// Returns how many bytes the rank, or the pipe to it, has taken since the last time.
  std::uint32_t write_some() {
    if (ends_[1] < 0) return 0;
    out_->write_some();
    if (!out_->is_empty()) return 0;
    if (is_over_) ::close(std::exchange(ends_[1], -1));
    return static_cast<std::uint32_t>(std::exchange(taken_, 0));
  }

 private:
  std::array<int, 2> ends_{-1, -1};
  std::optional<Outlet> out_;
  bool is_over_ = false;
  std::size_t taken_ = 0;
};

class Helper {
 public:
  int run() {
    ::signal(SIGPIPE, [](int) {});  // the ranks would begin with it ignored, if it were
    ::fcntl(STDIN_FILENO, F_SETFL, ::fcntl(STDIN_FILENO, F_GETFL) | O_NONBLOCK);
    const char* const connection = std::getenv("SSH_CONNECTION");
    out_.add(kHelperBegins);
    tell(Kind::Hello, Packer()
                          .put(std::string_view(HVD_VERSION))
                          .put(static_cast<std::uint32_t>(::getpid()))
                          .put(std::string_view(connection == nullptr ? "" : connection)));
    try {
      while (!is_over()) turn();
    } catch (const std::exception& error) {
      tell(Kind::Failed, Packer().put(std::string_view(error.what())));
      ranks_.clear();  // kills them
    }
    for (const auto last = Clock::now() + 5s; !out_.is_empty() && Clock::now() < last && !is_leaving_;) {
      out_.write_some();
      pollfd one{STDOUT_FILENO, POLLOUT, 0};
      if (!out_.is_empty()) ::poll(&one, 1, 100);
    }
    return 0;
  }

 private:
  bool is_over() {
    return is_leaving_ && std::all_of(ranks_.begin(), ranks_.end(), [](HelperRank& rank) { return rank.process().has_ended(); });
  }

  void turn() {
    wait();
    while (const int signal = signals_.next())
      if (signal != SIGTSTP) leave();
    listen();
    for (auto& rank : ranks_) rank.process().pass_output_on();
    for (auto& rank : ranks_) rank.tell();
    if (input_)
      if (const auto taken = input_->write_some(); taken > 0) tell(Kind::Taken, Packer().put(taken));
    out_.write_some();
    if (!is_leaving_ && Clock::now() > spoken_ + kAlive) tell(Kind::Alive, Packer());
    if (is_leaving_ && Clock::now() > kill_at_)
      for (auto& rank : ranks_) rank.process().send(SIGKILL);
  }

  void wait() {
    std::vector<pollfd> waited{{signals_.descriptor(), POLLIN, 0}};
    if (!is_leaving_) waited.push_back({STDIN_FILENO, POLLIN, 0});
    if (!is_leaving_ && !out_.is_empty()) waited.push_back({STDOUT_FILENO, POLLOUT, 0});
    for (const auto& rank : ranks_) const_cast<HelperRank&>(rank).process().add_waited(waited);
    if (input_) input_->add_waited(waited);
    ::poll(waited.data(), waited.size(), is_leaving_ ? 100 : 1000);
  }

  void listen() {
    std::array<char, 1 << 16> buffer;
    while (!is_leaving_) {
      const auto length = ::read(STDIN_FILENO, buffer.data(), buffer.size());
      if (length < 0 && (errno == EAGAIN || errno == EINTR)) break;
      if (length <= 0) return leave();
      in_.add({buffer.data(), static_cast<std::size_t>(length)});
    }
    while (const auto message = in_.next()) follow(*message);
  }

  void follow(const Message& message) {
    Unpacker in(message.payload);
    if (message.kind == Kind::Reserve) {
      MeetingCandidates candidates;
      candidates.addresses = in.texts();
      candidates.interfaces = in.text();
      candidates.is_said = in.number() != 0;
      candidates.allows_loopback = in.number() != 0;
      tell(Kind::Reserved, Packer().put(std::string_view(port_.reserve(candidates))));
    } else if (message.kind == Kind::Start) {
      start(unpack_job(message.payload));
    } else if (message.kind == Kind::Signal) {
      const auto number = in.number();
      const int signal = in.integer();
      for (auto& rank : ranks_)
        if (rank.number() == number) rank.process().send(signal);
    } else if (message.kind == Kind::Input && input_) {
      input_->add(message.payload);
    }
  }

  void start(const HostJob& job) {
    if (!job.folder.empty() && ::chdir(job.folder.c_str()) != 0)
      throw std::runtime_error(
          fmt::format("{}: {}; ranks start in the folder that hvdrun is started in", job.folder, std::strerror(errno)));
    // PATH is one of them, and finds the program.
    for (const auto& [name, value] : job.variables) ::setenv(name.c_str(), value.c_str(), 1);
    if (!is_found(job.command.front())) throw std::runtime_error(no_such_program(job.command.front()));
    time_to_end_ = std::chrono::seconds(job.time_to_end);
    const Program program{job.command, job.variables, job.unset};
    if (job.first == 0) input_.emplace();
    Packer said;
    for (int local = 0; local < job.count; ++local) {
      const int rank = job.first + local;
      ranks_.emplace_back(
          program,
          RankProcess::Own{
              .rank = rank, .variables = variables_of_rank(rank, job.ranks, local, job.count), .input = rank == 0 ? input_->reader() : -1},
          out_);
      said.put(static_cast<std::uint32_t>(ranks_.back().process().process()));
    }
    if (input_) input_->give_away();
    tell(Kind::Started, said);
  }

  void leave() {
    if (is_leaving_) return;
    is_leaving_ = true;
    kill_at_ = Clock::now() + time_to_end_;
    for (auto& rank : ranks_) {
      rank.become_unheard();
      rank.process().send(SIGTERM);
      rank.process().send(SIGCONT);
    }
  }

  void tell(Kind kind, const Packer& said) {
    out_.add(framed(kind, said.bytes()));
    spoken_ = Clock::now();
  }

  Outlet out_{STDOUT_FILENO};
  Signals signals_;
  MessageReader in_;
  MeetingPort port_;
  std::optional<Input> input_;
  std::list<HelperRank> ranks_;
  std::chrono::seconds time_to_end_{0};
  bool is_leaving_ = false;
  Clock::time_point kill_at_, spoken_ = Clock::now();
};

}  // namespace

int run_helper() { return Helper().run(); }

}  // namespace hvdrun
