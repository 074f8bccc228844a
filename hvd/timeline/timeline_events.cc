#include "hvd/timeline/timeline_events.h"

#include <fmt/compile.h>

#include <algorithm>
#include <array>
#include <cctype>

#include "hvd/base/text.h"
#include "hvd/timeline/timeline_file.h"

namespace hvd {

namespace {

constexpr std::uint32_t kNamedTracks = 4096;
constexpr TraceTime kCounterInterval = 1'000'000;  // a counter's steps are told apart no finer
constexpr std::size_t kDimensionsShown = 16;

std::string upper(std::string_view text) {
  std::string result(text);
  for (char& c : result) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return result;
}

/// Type, shape and bytes of what is submitted.
std::string arguments_of(const Submission& submission, std::int64_t& bytes) {
  const auto& tensors = submission.tensors;
  if (submission.kind == OpKind::Control || tensors.empty()) return {};
  bool alike = true;
  for (const auto& tensor : tensors) {
    alike = alike && tensor.dtype == tensors.front().dtype;
    bytes += element_count(tensor.shape) * static_cast<std::int64_t>(element_bytes(tensor.dtype));
  }
  std::string text = "\"dtype\":\"" + std::string(alike ? name_of(tensors.front().dtype) : "mixed") + "\",";
  if (tensors.size() > 1) {
    text += "\"tensors\":" + std::to_string(tensors.size());
  } else {
    const auto& shape = tensors.front().shape;
    text += "\"shape\":\"[";
    for (std::size_t d = 0; d < std::min(shape.size(), kDimensionsShown); ++d) text += (d == 0 ? "" : ", ") + std::to_string(shape[d]);
    text += shape.size() > kDimensionsShown ? "]...\"" : "]\"";
  }
  return text + ",\"bytes\":" + std::to_string(bytes);
}

void put_head(std::string& out, char phase, int rank, std::uint32_t tid, TraceTime since) {
  const std::uint64_t at = since > 0 ? static_cast<std::uint64_t>(since) : 0;
  std::array<char, 128> head;
  char* const end = fmt::format_to(head.data(), FMT_COMPILE(",\n{{\"ph\":\"{}\",\"pid\":{},\"tid\":{},\"ts\":{}.{:03}"), phase, rank, tid,
                                   at / 1000, at % 1000);
  out.append(head.data(), end);
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------- events

void TimelineEvents::put(char phase, std::uint32_t tid, TraceTime at, std::initializer_list<std::string_view> rest) {
  put_head(text, phase, rank_, tid, at - zero_);
  for (const auto part : rest) text += part;
  text += '}';
}

/// Events of a track are in the order of their times.
void TimelineEvents::put_on(Track& track, char phase, TraceTime at, std::initializer_list<std::string_view> rest) {
  track.last = std::max(track.last, at);
  put(phase, track.tid, track.last, rest);
}

void TimelineEvents::begin(Track& track, TraceTime at, std::string_view name, std::string_view arguments) {
  if (arguments.empty()) return put_on(track, 'B', at, {R"(,"name":")", name, "\""});
  put_on(track, 'B', at, {R"(,"name":")", name, R"(","args":{)", arguments, "}"});
}

void TimelineEvents::mark(Track& track, TraceTime at, int rank, std::string_view what) {
  put_on(track, 'i', at, {R"(,"s":"t","name":"rank )", std::to_string(rank), what, "\""});
}

void TimelineEvents::describe(std::string_view what, std::uint32_t tid, std::string_view argument) {
  text += formatted(",\n{{\"ph\":\"M\",\"pid\":{},\"tid\":{},\"name\":\"{}\",\"args\":{{{}}}}}", rank_, tid, what, argument);
}

void TimelineEvents::introduce(std::string_view label) {
  describe("process_name", 0, "\"name\":" + json_string(label));
  describe("process_sort_index", 0, formatted("\"sort_index\":{}", rank_));
}

std::string TimelineEvents::full_event(TraceTime now) const {
  std::string event;
  put_head(event, 'i', rank_, 0, now - zero_);
  return event + R"(,"s":"g",)" + std::string(TimelineFile::kFullMark);
}

TimelineEvents::Track& TimelineEvents::make_track(const std::string& key, std::string_view label, bool shared) {
  Track& track = tracks_[key] = {next_tid_++, shared};
  describe("thread_name", track.tid, "\"name\":" + json_string(label));
  return track;
}

TimelineEvents::Track& TimelineEvents::track_for(const Submission& submission, std::string_view name, bool once) {
  if (!once) {
    std::string key = std::to_string(submission.process_set) + static_cast<char>('a' + static_cast<int>(submission.kind));
    key += name;
    if (const auto known = tracks_.find(key); known != tracks_.end()) return known->second;
    if (next_tid_ <= kNamedTracks)
      return make_track(key, submission.process_set == 0 ? std::string(name) : formatted("{} (set {})", name, submission.process_set),
                        false);
  }
  if (free_shared_.empty()) {
    const std::string label = formatted("others {}", next_tid_);
    return make_track(label, label, true);  // no key of a name begins so
  }
  Track& track = *free_shared_.back();
  free_shared_.pop_back();
  return track;
}

// ------------------------------------------------------------------------------------------------------------------- operations

void TimelineEvents::submitted(std::uint64_t id, const Submission& submission, std::string_view name, bool once, TraceTime since,
                               TraceTime copied_from, TraceTime copied_to, TraceTime now) {
  Track& track = track_for(submission, name, once);
  Open& open = open_[id] = {&track, submission.kind, 0, {}};
  open.arguments = arguments_of(submission, open.bytes);
  if (track.shared) open.arguments = "\"tensor\":" + json_string(name) + (open.arguments.empty() ? "" : ",") + open.arguments;
  begin(track, since, "NEGOTIATE_" + upper(name_of(submission.kind)), open.arguments);
  if (copied_to > copied_from) {
    begin(track, copied_from, "MEMCPY_IN_FUSION_BUFFER");
    put_on(track, 'E', copied_to, {});
  }
  mark(track, now, rank_, " ready");
  ++queued_;
  changed(now);
}

/// Returns null where there is none of this number, or in another phase: it is another batch of the same group.
TimelineEvents::Open* TimelineEvents::find(std::uint64_t id, Phase phase) {
  const auto found = open_.find(id);
  return found != open_.end() && found->second.phase == phase ? &found->second : nullptr;
}

void TimelineEvents::enter(Open& open, Phase phase, TraceTime at, std::string_view name) {
  put_on(*open.track, 'E', at, {});
  begin(*open.track, at, name, phase == Phase::Agreed ? open.arguments : std::string_view());
  open.phase = phase;
}

void TimelineEvents::agreed(std::uint64_t id, int last, bool travels, TraceTime now) {
  Open* const open = find(id, Phase::Submitted);
  if (open == nullptr) return;
  if (last >= 0) mark(*open->track, now, last, " was last");
  if (!travels) return;
  enter(*open, Phase::Agreed, now, upper(name_of(open->kind)));
  begin(*open->track, now, "WAIT_FOR_DATA");
}

void TimelineEvents::launched(std::uint64_t id, std::string_view backend, TraceTime now) {
  Open* const open = find(id, Phase::Agreed);
  if (open == nullptr) return;
  enter(*open, Phase::Launched, now, upper(backend) + "_" + upper(name_of(open->kind)));
  --queued_;
  bytes_ += open->bytes;
  changed(now);
}

void TimelineEvents::copying_out(std::uint64_t id, TraceTime since) {
  if (Open* const open = find(id, Phase::Launched)) enter(*open, Phase::CopyingOut, since, "MEMCPY_OUT_FUSION_BUFFER");
}

void TimelineEvents::close(const Open& open, TraceTime at, std::string_view error) {
  if (open.phase != Phase::Submitted) put_on(*open.track, 'E', at, {});
  if (error.empty()) {
    put_on(*open.track, 'E', at, {});
  } else {
    put_on(*open.track, 'E', at, {R"(,"args":{"error":)", json_string(error, 512), "}"});
  }
  if (open.phase >= Phase::Launched) {
    bytes_ -= open.bytes;
  } else {
    --queued_;
  }
  if (open.track->shared) free_shared_.push_back(open.track);
  changed(at);
}

void TimelineEvents::finished(std::uint64_t id, std::string_view error, TraceTime now) {
  const auto found = open_.find(id);
  if (found == open_.end()) return;
  close(found->second, now, error);
  open_.erase(found);
}

void TimelineEvents::cut(std::size_t tensors, std::int64_t bytes, TraceTime now) {
  put('i', 0, now, {formatted(R"(,"s":"p","name":"CYCLE_START","args":{{"tensors":{},"bytes":{}}})", tensors, bytes)});
}

void TimelineEvents::end(TraceTime now) {
  for (const auto& [id, open] : open_) close(open, now, "the timeline was stopped");
  open_.clear();
}

// --------------------------------------------------------------------------------------------------------------------- counters

void TimelineEvents::changed(TraceTime at) {
  changed_at_ = std::max(changed_at_, at);
  if (changed_at_ - counted_at_ >= kCounterInterval) settle();
}

void TimelineEvents::settle() {
  if (counted_at_ < changed_at_) {
    counted_at_ = changed_at_;
    count("queue length", "operations", queued_);
    count("bytes in flight", "bytes", bytes_);
  }
  if (left_out_told_ < left_out_) count("operations left out", "operations", left_out_told_ = left_out_);
}

void TimelineEvents::count(std::string_view name, std::string_view unit, std::int64_t value) {
  put('C', 0, changed_at_, {R"(,"name":")", name, R"(","args":{")", unit, "\":", std::to_string(value), "}"});
}

}  // namespace hvd
