#include "hvd/timeline/timeline.h"

#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <random>
#include <utility>

#include "hvd/base/log.h"
#include "hvd/base/signals.h"
#include "hvd/base/text.h"

namespace hvd {

namespace {

using namespace std::chrono_literals;

constexpr auto kFlushInterval = 100ms;
constexpr auto kPatience = 1s;  // with another rank that is writing
constexpr auto kLastPatience = 5s;
constexpr std::size_t kMostPending = std::size_t{8} << 20;  // bytes of text, while the file is busy
constexpr std::size_t kRecordsPerOperation = 6;             // at most, but for groups of several types

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "?";
}

std::int64_t wall_clock() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

/// Rank 0's word to the others.
struct Opening {
  std::string problem;
  std::string run;
  TraceTime zero = 0;
  std::int64_t wall_minus_clock = 0;
  int host = 0;
};

Bytes encode(const Opening& opening) {
  return Writer()
      .put_string(opening.problem)
      .put_string(opening.run)
      .put(opening.zero)
      .put(opening.wall_minus_clock)
      .put(opening.host)
      .take();
}

Opening decode(const Bytes& bytes) {
  Reader reader(bytes);
  Opening opening;
  opening.problem = reader.get_string();
  opening.run = reader.get_string();
  opening.zero = reader.get<TraceTime>();
  opening.wall_minus_clock = reader.get<std::int64_t>();
  opening.host = reader.get<int>();
  return opening;
}

}  // namespace

void Timeline::start(const std::string& path, const TimelineOptions& options, std::uint64_t max_bytes, const Topology& topology,
                     const Exchange& exchange) {
  const std::lock_guard control(control_);
  Opening mine;
  mine.run = formatted("{:08x}{:08x}", std::random_device{}(), std::random_device{}());
  mine.zero = now();
  mine.wall_minus_clock = wall_clock() - mine.zero;
  mine.host = topology.cross_rank;
  if (on()) {
    mine.problem = "a timeline is being written already: stop_timeline() ends it";
  } else {
    end_writer();  // of a file that is full
  }
  std::optional<TimelineFile> file;
  const auto attempt = [&](auto&& open) {
    if (!mine.problem.empty()) return;
    try {
      file.emplace(open());
    } catch (const Error& error) {
      mine.problem = error.what();
    }
  };
  Opening first;
  const auto settle = [&] {
    const auto all = exchange(encode(mine));
    first = decode(all.front());
    for (std::size_t rank = 0; rank < all.size(); ++rank)
      if (const auto said = decode(all[rank]).problem; !said.empty()) throw InvalidArgument(formatted("{} (rank {})", said, rank));
  };
  if (topology.rank == 0)
    attempt([&] { return TimelineFile::begin(path, mine.run, TimelineFormat::first_event(mine.run, topology.size)); });
  settle();
  const bool leads_other_host = topology.local_rank == 0 && topology.rank != 0;
  if (leads_other_host)
    attempt([&] { return TimelineFile::begin(path, first.run, TimelineFormat::first_event(first.run, topology.size)); });
  settle();
  if (!file) attempt([&] { return TimelineFile::join(path, first.run); });
  TraceTime zero = first.zero;
  if (topology.cross_rank != first.host) zero += first.wall_minus_clock - mine.wall_minus_clock;
  TimelineFormat format(topology.rank, zero);
  if (mine.problem.empty()) {  // each rank is in the file from the start, whatever becomes of it
    std::string text;
    format.introduce(formatted("rank {} on {}, process {}", topology.rank, host_name(), ::getpid()), text);
    const auto outcome = file->append(text, max_bytes, format.full_event(now()), kLastPatience);
    if (outcome == TimelineFile::Outcome::Busy || outcome == TimelineFile::Outcome::Broken)
      mine.problem = formatted("the timeline '{}' cannot be written: {}", path, std::strerror(errno));
  }
  settle();
  begin_writing(std::move(*file), std::move(format), options, max_bytes);
}

void Timeline::begin_writing(TimelineFile file, TimelineFormat format, const TimelineOptions& options, std::uint64_t max_bytes) {
  file_.emplace(std::move(file));
  max_bytes_ = max_bytes;
  {
    const std::lock_guard lock(mutex_);
    records_.clear();
    first_id_ = next_id_;
    open_ = 0;
    left_out_ = 0;
    hurry_ = stop_ = false;
  }
  const SignalsKeptOff of_it;
  writer_ = std::thread([this, format = std::move(format)]() mutable {
    try {
      write_on(std::move(format));
    } catch (...) {
      on_.store(false);
      log(LogLevel::Warning, "the timeline ends: {}", status_of_current_exception().text());
    }
  });
  marks_cycles_.store(options.mark_cycles);
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

void Timeline::note(TraceRecord record) {
  bool hurry = false;
  {
    const std::lock_guard lock(mutex_);
    if (!on()) return;
    if (record.kind != TraceRecord::Kind::Cut && record.id < first_id_) return;  // of an earlier file
    if (record.kind == TraceRecord::Kind::Cut && records_.size() >= capacity_) return;
    if (record.kind == TraceRecord::Kind::Finished) --open_;
    const bool failed = record.kind == TraceRecord::Kind::Finished && record.subject;
    records_.push_back(std::move(record));
    if ((failed || records_.size() > capacity_ / 2) && !hurry_) hurry = hurry_ = true;
  }
  if (hurry) wake_.notify_all();
}

std::uint64_t Timeline::submitted(const Submission& submission, std::string_view name, bool once, TraceTime since, Copy copy) {
  auto subject = std::make_unique<TraceSubject>();
  subject->name = name;
  subject->once = once;
  subject->kind = submission.kind;
  subject->process_set = submission.process_set;
  if (submission.kind != OpKind::Control) subject->tensors = submission.tensors.size();
  for (std::size_t i = 0; i < subject->tensors; ++i) {
    const auto& tensor = submission.tensors[i];
    if (i == 0) subject->dtype = name_of(tensor.dtype);
    if (tensor.dtype != submission.tensors.front().dtype) subject->dtype = "mixed";
    subject->bytes += element_count(tensor.shape) * static_cast<std::int64_t>(element_bytes(tensor.dtype));
  }
  if (subject->tensors == 1) subject->shape = submission.tensors.front().shape;
  const std::lock_guard lock(mutex_);
  if (!on()) return 0;
  // What is taken in is noted to its end.
  if (records_.size() + kRecordsPerOperation * (open_ + 1) > capacity_) {
    ++left_out_;
    return 0;
  }
  ++open_;
  records_.push_back({.kind = TraceRecord::Kind::Submitted,
                      .id = next_id_,
                      .at = now(),
                      .from = since,
                      .copied_from = copy.from,
                      .copied_to = copy.to,
                      .subject = std::move(subject)});
  return next_id_++;
}

void Timeline::agreed(std::uint64_t id, int last, bool travels) {
  note({.kind = TraceRecord::Kind::Agreed, .good = travels, .rank = last, .id = id, .at = now()});
}
void Timeline::launched(std::uint64_t id, std::string_view backend) {
  note({.kind = TraceRecord::Kind::Launched, .id = id, .at = now(), .backend = backend});
}
void Timeline::copying_out(std::uint64_t id, TraceTime since) { note({.kind = TraceRecord::Kind::CopyingOut, .id = id, .at = since}); }
void Timeline::finished(std::uint64_t id, const Status& status) {
  std::unique_ptr<TraceSubject> failure;
  if (!status.ok()) {
    failure = std::make_unique<TraceSubject>();
    failure->name = status.text();
  }
  note({.kind = TraceRecord::Kind::Finished, .id = id, .at = now(), .subject = std::move(failure)});
}
void Timeline::cut(std::size_t tensors, std::int64_t bytes) {
  if (marks_cycles_.load(std::memory_order_relaxed))
    note({.kind = TraceRecord::Kind::Cut, .id = tensors, .at = now(), .copied_from = bytes});
}

// ----------------------------------------------------------------------------------------------------------------- the writer

bool Timeline::flush(std::string& text, const TimelineFormat& format, std::chrono::milliseconds patience) {
  if (text.empty()) return true;
  switch (file_->append(text, max_bytes_, format.full_event(now()), patience)) {
    case TimelineFile::Outcome::Busy:
      return true;  // later
    case TimelineFile::Outcome::Written:
      text.clear();
      return true;
    case TimelineFile::Outcome::Full:
      log(LogLevel::Info, "the timeline is full (HVD_TIMELINE_MAX_BYTES, {})", max_bytes_);
      return false;
    case TimelineFile::Outcome::Broken:
      log(LogLevel::Warning, "the timeline cannot be written any more: {}", std::strerror(errno));
      return false;
  }
  return false;
}

void Timeline::write_on(TimelineFormat format) {
  std::string text;
  std::vector<TraceRecord> records;
  std::uint64_t told = 0;
  for (bool stopping = false; !stopping;) {
    std::uint64_t left_out = 0;
    {
      std::unique_lock lock(mutex_);
      wake_.wait_for(lock, kFlushInterval, [this] { return stop_ || hurry_; });
      stopping = stop_;
      hurry_ = false;
      if (text.size() < kMostPending || stopping) records.swap(records_);
      left_out = left_out_;
    }
    for (const auto& record : records) format.add(record, text);
    records.clear();
    format.settle(text);
    if (left_out != std::exchange(told, left_out)) format.dropped(left_out, now(), text);
    if (stopping) format.end(now(), text);
    if (flush(text, format, stopping ? kLastPatience : kPatience)) continue;
    on_.store(false);
    const std::lock_guard lock(mutex_);
    records_.clear();
    records_.shrink_to_fit();
    return;
  }
}

}  // namespace hvd
