#include "hvd/timeline/timeline.h"

#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "hvd/base/log.h"
#include "hvd/base/signals.h"
#include "hvd/base/text.h"

namespace hvd {

namespace {

using namespace std::chrono_literals;

constexpr auto kFlushInterval = 100ms;

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "?";
}

/// Clocks are what a rank's clocks say when its timeline starts; rank 0's name the run, and are the file's zero.
struct Clocks {
  TraceTime steady = Timeline::now();
  std::int64_t wall = std::chrono::system_clock::now().time_since_epoch() / 1ns;
};

}  // namespace

void Timeline::start(const std::string& path, const TimelineOptions& options, std::uint64_t max_bytes, const Topology& topology,
                     const Exchange& exchange) {
  const std::lock_guard control(control_);
  const Clocks mine;
  Clocks first;
  std::string problem;
  const auto attempt = [&](auto&& work) {
    if (problem.empty()) try {
        work();
      } catch (const Error& error) {
        problem = error.what();
      }
  };
  std::unique_ptr<TimelineFile> file;
  const auto open = [&] {
    const auto event = formatted(R"("name":"hvd timeline","ph":"i","s":"g","pid":0,"tid":0,"ts":0,"args":{{"run":"{:x}","ranks":{}}})",
                                 first.wall, topology.size);
    file = std::make_unique<TimelineFile>(path, ",\n{" + event + "}");
  };
  const auto settle = [&] {
    const auto all = exchange(Writer().put(mine).put_string(problem).take());
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      Reader reader(all[rank]);
      const auto clocks = reader.get<Clocks>();
      if (rank == 0) first = clocks;
      if (const auto said = reader.get_string(); !said.empty()) throw InvalidArgument(formatted("{} (rank {})", said, rank));
    }
  };
  if (on()) {
    problem = "a timeline is being written already: stop_timeline() ends it";
  } else {
    end_writer();  // of a file that is full
  }
  if (topology.rank == 0) {
    first = mine;
    attempt(open);
  }
  settle();
  if (topology.rank != 0) attempt(open);
  TraceTime zero = first.steady;
  if (topology.host_of(topology.rank) != topology.host_of(0)) zero = first.wall - mine.wall + mine.steady;
  attempt([&] {  // each rank is in the file from the start, whatever becomes of it
    TimelineEvents events(topology.rank, zero);
    events.introduce(formatted("rank {} on {}, process {}", topology.rank, host_name(), ::getpid()));
    const auto outcome = file->append(std::exchange(events.text, {}), max_bytes, events.full_event(now()));
    if (outcome == TimelineFile::Outcome::Busy || outcome == TimelineFile::Outcome::Broken)
      throw InvalidArgument(formatted("the timeline '{}' cannot be written: {}", path, std::strerror(errno)));
    const std::lock_guard lock(mutex_);
    events_ = std::move(events);
    hurry_ = stop_ = false;
  });
  settle();
  file_ = std::move(file);
  max_bytes_ = max_bytes;
  begin_writing(options.mark_cycles);
}

void Timeline::begin_writing(bool marks_cycles) {
  const SignalsKeptOff of_it;
  writer_ = std::thread([this] {
    try {
      write_on();
    } catch (...) {
      log(LogLevel::Warning, "the timeline ends: {}", status_of_current_exception().text());
    }
    const std::lock_guard lock(mutex_);
    on_.store(false);
    events_ = TimelineEvents();
  });
  marks_cycles_.store(marks_cycles);
  on_.store(true);
}

void Timeline::stop() noexcept {
  const std::lock_guard control(control_);
  on_.store(false);
  marks_cycles_.store(false);
  end_writer();
}

void Timeline::end_writer() {
  if (!writer_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  writer_.join();
  file_.reset();
}

// --------------------------------------------------------------------------------------------------------------------- notes

template <class Note>
void Timeline::note(const Note& note) {
  const std::lock_guard lock(mutex_);
  if (!on()) return;
  note();
  if (events_.text.size() > capacity_ / 2 && !std::exchange(hurry_, true)) wake_.notify_all();
}

std::uint64_t Timeline::submitted(const Submission& submission, std::string_view name, bool once, TraceTime since, Copy copy) {
  std::uint64_t id = 0;
  note([&] {
    if (events_.text.size() >= capacity_) return events_.left_out();  // what is taken in is noted to its end
    id = next_id_++;
    events_.submitted(id, submission, name, once, since, copy.from, copy.to, now());
  });
  return id;
}

void Timeline::agreed(std::uint64_t id, int last, bool travels) {
  note([&] { events_.agreed(id, last, travels, now()); });
}
void Timeline::launched(std::uint64_t id, std::string_view backend) {
  note([&] { events_.launched(id, backend, now()); });
}
void Timeline::copying_out(std::uint64_t id, TraceTime since) {
  note([&] { events_.copying_out(id, since); });
}
void Timeline::finished(std::uint64_t id, const Status& status) {
  note([&] {
    events_.finished(id, status.ok() ? std::string_view() : status.text(), now());
    if (!status.ok() && !std::exchange(hurry_, true)) wake_.notify_all();
  });
}
void Timeline::cut(std::size_t tensors, std::int64_t bytes) {
  if (!marks_cycles_.load(std::memory_order_relaxed)) return;
  note([&] {
    if (events_.text.size() < capacity_) events_.cut(tensors, bytes, now());
  });
}

// ----------------------------------------------------------------------------------------------------------------- the writer

void Timeline::write_on() {
  using Outcome = TimelineFile::Outcome;
  std::string text, full;
  for (bool stopping = false; !stopping;) {
    {
      std::unique_lock lock(mutex_);
      wake_.wait_for(lock, kFlushInterval, [this] { return stop_ || hurry_; });
      stopping = stop_;
      hurry_ = false;
      if (stopping) events_.end(now());
      events_.settle();
      full = events_.full_event(now());
      if (text.empty()) {
        text.swap(events_.text);
      } else if (stopping) {  // else the file is busy, and what comes waits
        text += events_.text;
      }
    }
    const auto outcome = text.empty() ? Outcome::Written : file_->append(text, max_bytes_, full);
    if (outcome == Outcome::Written) text.clear();
    if (outcome == Outcome::Written || (outcome == Outcome::Busy && !stopping)) continue;
    const bool is_full = outcome == Outcome::Full;
    log(is_full ? LogLevel::Info : LogLevel::Warning, "the timeline ends: {}",
        is_full ? formatted("it is full (HVD_TIMELINE_MAX_BYTES, {})", max_bytes_) : std::strerror(errno));
    return;
  }
}

}  // namespace hvd
