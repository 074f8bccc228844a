#include "hvd/timeline/timeline.h"

#include <fmt/compile.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <utility>

#include "hvd/base/log.h"
#include "hvd/base/process.h"
#include "hvd/base/text.h"
#include "hvd/base/threads.h"

namespace hvd {

namespace {

using namespace std::chrono_literals;

constexpr auto kFlushInterval = 100ms;
constexpr std::uint32_t kNamedTracks = 4096;
constexpr TraceTime kCounterInterval = 1'000'000;  // a counter's steps are told apart no finer
constexpr std::size_t kDimensionsShown = 16, kShapesShown = 16;
constexpr std::string_view kEarlyCopy = "MEMCPY_IN_SHARED_MEMORY";
constexpr std::string_view kCopyIn = "MEMCPY_IN_FUSION_BUFFER";
constexpr std::string_view kCopyOut = "MEMCPY_OUT_FUSION_BUFFER";

std::string upper(std::string_view text) {
  std::string result(text);
  for (char& c : result) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return result;
}

std::string shown(const Shape& shape) {
  std::string text = "[";
  for (std::size_t d = 0; d < std::min(shape.size(), kDimensionsShown); ++d)
    text += (d == 0 ? "" : ", ") + std::to_string(shape[d]);
  return text + (shape.size() > kDimensionsShown ? "]..." : "]");
}

/// Returns type, shape (of a group those of its first tensors) and bytes of what is submitted.
std::string arguments_of(const Submission& submission, std::int64_t& bytes) {
  const auto& tensors = submission.tensors;
  if (submission.kind == OpKind::Control || tensors.empty()) return {};
  bool alike = true;
  for (const auto& tensor : tensors) {
    alike = alike && tensor.dtype == tensors.front().dtype;
    bytes += element_count(tensor.shape) * static_cast<std::int64_t>(element_bytes(tensor.dtype));
  }
  std::string text =
      "\"dtype\":\"" + std::string(alike ? name_of(tensors.front().dtype) : "mixed") + "\",";
  if (tensors.size() > 1) text += "\"tensors\":" + std::to_string(tensors.size()) + ",";
  text += "\"shape\":\"";
  for (std::size_t i = 0; i < std::min(tensors.size(), kShapesShown); ++i)
    text += (i == 0 ? "" : ", ") + shown(tensors[i].shape);
  text += tensors.size() > kShapesShown ? "...\"" : "\"";
  return text + ",\"bytes\":" + std::to_string(bytes);
}

void put_head(std::string& out, char phase, int rank, std::uint32_t tid, TraceTime since) {
  const std::uint64_t at = since > 0 ? static_cast<std::uint64_t>(since) : 0;
  std::array<char, 128> head;
  char* const end = fmt::format_to(
      head.data(), FMT_COMPILE(",\n{{\"ph\":\"{}\",\"pid\":{},\"tid\":{},\"ts\":{}.{:03}"), phase,
      rank, tid, at / 1000, at % 1000);
  out.append(head.data(), end);
}

/// Clocks are what a rank's clocks say when its timeline starts; rank 0's name the run, and are the
/// file's zero.
struct Clocks {
  TraceTime steady = Timeline::now();
  std::int64_t wall = std::chrono::system_clock::now().time_since_epoch() / 1ns;
};

/// The file that this rank has made goes again where another rank's is bad.
struct Made {
  const std::string& path;
  bool is_new = false;
  ~Made() {
    if (is_new) ::unlink(path.c_str());
  }
};

/// Returns the event that opens the file.
std::string first_event(const Clocks& first, int ranks) {
  return formatted(R"(,
{{"name":"hvd timeline","ph":"i","s":"g","pid":0,"tid":0,"ts":0,)"
                   R"("args":{{"run":"{:x}","ranks":{}}}}})",
                   first.wall, ranks);
}

}  // namespace

void Timeline::start(const std::string& path, const TimelineOptions& options,
                     std::uint64_t max_bytes, const Topology& topology, const Exchange& exchange) {
  const std::lock_guard control(control_);
  const Clocks mine;
  Clocks first = mine;  // rank 0's, once it has said them
  std::string problem;
  const auto attempt = [&](auto&& work) {
    if (problem.empty()) try {
        work();
      } catch (const Error& error) {
        problem = error.what();
      }
  };
  Made made{path};
  std::unique_ptr<TimelineFile> file;
  const auto open = [&] {
    made.is_new = ::access(path.c_str(), F_OK) != 0;
    file = std::make_unique<TimelineFile>(path, first_event(first, topology.size));
  };
  const auto settle = [&] {
    const auto all = exchange(Writer().put(mine).put_string(problem).take());
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      Reader reader(all[rank]);
      const auto clocks = reader.get<Clocks>();
      if (rank == 0) first = clocks;
      if (const auto said = reader.get_string(); !said.empty())
        throw InvalidArgument(formatted("{} (rank {})", said, rank));
    }
  };
  if (on()) {
    problem = "a timeline is being written already: stop_timeline() ends it";
  } else {
    end_writer();  // of a file that is full
  }
  if (topology.rank == 0) attempt(open);
  settle();
  if (topology.rank != 0) attempt(open);
  TraceTime zero = first.steady;
  if (topology.host_of(topology.rank) != topology.host_of(0))
    zero = first.wall - mine.wall + mine.steady;
  attempt([&] {  // each rank is in the file from the start, whatever becomes of it
    std::unique_lock lock(mutex_);
    run_ = {.rank = topology.rank, .zero = zero};
    describe("process_name", 0,
             "\"name\":" + json_string(formatted("rank {} on {}, process {}", topology.rank,
                                                 host_name(), ::getpid())));
    describe("process_sort_index", 0, formatted("\"sort_index\":{}", topology.rank));
    const auto text = std::exchange(run_.text, {}), full = full_event();
    lock.unlock();
    const auto outcome = file->append(text, max_bytes, full);
    if (outcome == TimelineFile::Outcome::Busy || outcome == TimelineFile::Outcome::Broken)
      throw InvalidArgument(
          formatted("the timeline '{}' cannot be written: {}", path, std::strerror(errno)));
  });
  settle();
  made.is_new = false;
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
    run_ = {};
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
    run_.stop = true;
  }
  wake_.notify_all();
  writer_.join();
  file_.reset();
}

// ------------------------------------------------------------------------------------------- notes

std::uint64_t Timeline::submitted(const Submission& submission, std::string_view name, bool once,
                                  TraceTime since, Copy copy) {
  const std::lock_guard lock(mutex_);
  if (!on()) return 0;
  if (run_.text.size() >= capacity_) {  // what is taken in is noted to its end
    ++run_.left_out;
    return 0;
  }
  const TraceTime at = now();
  Track& track = track_for(submission, name, once);
  Operation& operation = run_.open[next_id_] = {&track, submission.kind, 0, {}};
  operation.arguments = arguments_of(submission, operation.bytes);
  if (track.shared)
    operation.arguments = "\"tensor\":" + json_string(name) +
                          (operation.arguments.empty() ? "" : ",") + operation.arguments;
  begin(track, since, "NEGOTIATE_" + upper(name_of(submission.kind)), operation.arguments);
  if (copy.to > copy.from) {
    begin(track, copy.from, kEarlyCopy);
    put_on(track, 'E', copy.to);
  }
  mark(track, at, run_.rank, " ready");
  ++run_.queued;
  changed(at);
  return next_id_++;
}

void Timeline::agreed(std::uint64_t id, int last, bool travels) {
  const std::lock_guard lock(mutex_);
  Operation* const operation = find(id, Phase::Submitted);
  if (operation == nullptr) return;
  const TraceTime at = now();
  if (last >= 0) mark(*operation->track, at, last, " was last");
  if (!travels) return;
  enter(*operation, Phase::Agreed, at, upper(name_of(operation->kind)));
  begin(*operation->track, at, "WAIT_FOR_DATA");
}

void Timeline::launched(std::uint64_t id, std::string_view backend) {
  const std::lock_guard lock(mutex_);
  Operation* const operation = find(id, Phase::Agreed);
  if (operation == nullptr) return;
  const TraceTime at = now();
  enter(*operation, Phase::Agreed, at, kCopyIn);
  enter(*operation, Phase::Launched, at, upper(backend) + "_" + upper(name_of(operation->kind)));
  --run_.queued;
  run_.bytes += operation->bytes;
  changed(at);
}

void Timeline::copying_out(std::uint64_t id, TraceTime since) {
  const std::lock_guard lock(mutex_);
  if (Operation* const operation = find(id, Phase::Launched))
    enter(*operation, Phase::CopyingOut, since, kCopyOut);
}

void Timeline::finished(std::uint64_t id, const Status& status) {
  const std::lock_guard lock(mutex_);
  const auto found = run_.open.find(id);
  if (!on() || found == run_.open.end()) return;
  Operation& operation = found->second;
  const TraceTime at = now();
  if (status.ok() && operation.phase == Phase::Launched)
    enter(operation, Phase::CopyingOut, at, kCopyOut);
  close(operation, at, status.ok() ? std::string() : status.text());
  run_.open.erase(found);
  if (!status.ok()) hurry();
}

void Timeline::cut(std::size_t tensors, std::int64_t bytes) {
  if (!marks_cycles_.load(std::memory_order_relaxed)) return;
  const std::lock_guard lock(mutex_);
  if (!on() || run_.text.size() >= capacity_) return;
  put('i', 0, now(),
      {formatted(R"(,"s":"p","name":"CYCLE_START","args":{{"tensors":{},"bytes":{}}})", tensors,
                 bytes)});
}

Timeline::Operation* Timeline::find(std::uint64_t id, Phase phase) {
  const auto found = run_.open.find(id);
  return on() && found != run_.open.end() && found->second.phase == phase ? &found->second
                                                                          : nullptr;
}

// ------------------------------------------------------------------------------------------ events

void Timeline::put(char phase, std::uint32_t tid, TraceTime at,
                   std::initializer_list<std::string_view> rest) {
  put_head(run_.text, phase, run_.rank, tid, at - run_.zero);
  for (const auto part : rest) run_.text += part;
  run_.text += '}';
}

/// Events of a track are in the order of their times.
void Timeline::put_on(Track& track, char phase, TraceTime at,
                      std::initializer_list<std::string_view> rest) {
  track.last = std::max(track.last, at);
  put(phase, track.tid, track.last, rest);
}

void Timeline::begin(Track& track, TraceTime at, std::string_view name,
                     std::string_view arguments) {
  if (arguments.empty()) return put_on(track, 'B', at, {R"(,"name":")", name, "\""});
  put_on(track, 'B', at, {R"(,"name":")", name, R"(","args":{)", arguments, "}"});
}

void Timeline::mark(Track& track, TraceTime at, int rank, std::string_view what) {
  put_on(track, 'i', at, {R"(,"s":"t","name":"rank )", std::to_string(rank), what, "\""});
}

void Timeline::describe(std::string_view what, std::uint32_t tid, std::string_view argument) {
  run_.text +=
      formatted(",\n{{\"ph\":\"M\",\"pid\":{},\"tid\":{},\"name\":\"{}\",\"args\":{{{}}}}}",
                run_.rank, tid, what, argument);
}

std::string Timeline::full_event() const {
  std::string event;
  put_head(event, 'i', run_.rank, 0, now() - run_.zero);
  return event + R"(,"s":"g",)" + std::string(TimelineFile::kFullMark);
}

Timeline::Track& Timeline::make_track(const std::string& key, std::string_view label, bool shared) {
  Track& track = run_.tracks[key] = {run_.next_tid++, shared};
  describe("thread_name", track.tid, "\"name\":" + json_string(label));
  return track;
}

Timeline::Track& Timeline::track_for(const Submission& submission, std::string_view name,
                                     bool once) {
  if (!once) {
    std::string key = std::to_string(submission.process_set) +
                      static_cast<char>('a' + static_cast<int>(submission.kind));
    key += name;
    if (const auto known = run_.tracks.find(key); known != run_.tracks.end()) return known->second;
    if (run_.next_tid <= kNamedTracks)
      return make_track(key,
                        submission.process_set == 0
                            ? std::string(name)
                            : formatted("{} (set {})", name, submission.process_set),
                        false);
  }
  if (run_.free_shared.empty()) {
    const std::string label = formatted("others {}", run_.next_tid);
    return make_track(label, label, true);  // no key of a name begins so
  }
  Track& track = *run_.free_shared.back();
  run_.free_shared.pop_back();
  return track;
}

void Timeline::enter(Operation& operation, Phase phase, TraceTime at, std::string_view name) {
  put_on(*operation.track, 'E', at);
  begin(*operation.track, at, name,
        operation.phase == Phase::Submitted ? operation.arguments : std::string_view());
  operation.phase = phase;
}

void Timeline::close(const Operation& operation, TraceTime at, std::string_view error) {
  if (operation.phase == Phase::Submitted && error.empty()) {  // agreed, and nothing had to travel
    put_on(*operation.track, 'E', at);
    begin(*operation.track, at, upper(name_of(operation.kind)), operation.arguments);
  }
  if (operation.phase != Phase::Submitted) put_on(*operation.track, 'E', at);
  if (error.empty()) {
    put_on(*operation.track, 'E', at);
  } else {
    put_on(*operation.track, 'E', at, {R"(,"args":{"error":)", json_string(error, 512), "}"});
  }
  if (operation.phase >= Phase::Launched) {
    run_.bytes -= operation.bytes;
  } else {
    --run_.queued;
  }
  if (operation.track->shared) run_.free_shared.push_back(operation.track);
  changed(at);
}

void Timeline::changed(TraceTime at) {
  run_.changed_at = std::max(run_.changed_at, at);
  if (run_.changed_at - run_.counted_at >= kCounterInterval) count();
  if (run_.text.size() > capacity_ / 2) hurry();
}

/// Writes the counters that have changed.
void Timeline::count() {
  if (std::exchange(run_.counted_at, run_.changed_at) < run_.changed_at) {
    put_counter("queue length", "operations", run_.queued);
    put_counter("bytes in flight", "bytes", run_.bytes);
  }
  if (std::exchange(run_.left_out_told, run_.left_out) < run_.left_out)
    put_counter("operations left out", "operations", run_.left_out);
}

void Timeline::put_counter(std::string_view name, std::string_view unit, std::int64_t value) {
  put('C', 0, run_.changed_at,
      {R"(,"name":")", name, R"(","args":{")", unit, "\":", std::to_string(value), "}"});
}

// -------------------------------------------------------------------------------------- the writer

void Timeline::hurry() {
  if (!std::exchange(run_.hurry, true)) wake_.notify_all();
}

void Timeline::write_on() {
  using Outcome = TimelineFile::Outcome;
  std::string text, full;
  for (bool stopping = false; !stopping;) {
    {
      std::unique_lock lock(mutex_);
      wake_.wait_for(lock, kFlushInterval, [this] { return run_.stop || run_.hurry; });
      stopping = run_.stop;
      run_.hurry = false;
      if (stopping)
        for (const auto& [id, operation] : std::exchange(run_.open, {}))
          close(operation, now(), "the timeline was stopped");
      count();
      full = full_event();
      if (text.empty()) {
        text.swap(run_.text);
      } else if (stopping) {  // else the file is busy, and what comes waits
        text += run_.text;
      }
    }
    const auto outcome = text.empty() ? Outcome::Written : file_->append(text, max_bytes_, full);
    if (outcome == Outcome::Written) text.clear();
    if (outcome == Outcome::Written || (outcome == Outcome::Busy && !stopping)) continue;
    const bool is_full = outcome == Outcome::Full;
    log(is_full ? LogLevel::Info : LogLevel::Warning, "the timeline ends: {}",
        is_full ? formatted("it is full (HVD_TIMELINE_MAX_BYTES, {})", max_bytes_)
                : std::strerror(errno));
    return;
  }
}

}  // namespace hvd
