#include "hvd/timeline/timeline_format.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <iterator>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/timeline/timeline_file.h"

namespace hvd {

namespace {

constexpr std::size_t kNamedLanes = 4096;
constexpr TraceTime kCounterInterval = 1'000'000;  // a counter's steps are told apart no finer

std::string upper(std::string_view text) {
  std::string result(text);
  std::transform(result.begin(), result.end(), result.begin(), [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  return result;
}

/// Length of the character that `text` begins with, 0 if it is not UTF-8: no overlong forms, no surrogates, nothing above U+10FFFF.
std::size_t utf8_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U; };
  const auto follows = [&](std::size_t i) { return (byte(i) & 0xC0U) == 0x80U; };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  if (first >= 0xC2 && first <= 0xDF) return follows(1) ? 2 : 0;
  if (first >= 0xE0 && first <= 0xEF) {
    if (!follows(1) || !follows(2) || (first == 0xE0 && byte(1) < 0xA0) || (first == 0xED && byte(1) > 0x9F)) return 0;
    return 3;
  }
  if (first >= 0xF0 && first <= 0xF4) {
    if (!follows(1) || !follows(2) || !follows(3) || (first == 0xF0 && byte(1) < 0x90) || (first == 0xF4 && byte(1) > 0x8F)) return 0;
    return 4;
  }
  return 0;
}

std::string shape_text(const Shape& shape) {
  if (shape.size() <= 16) return to_string(shape);
  return to_string(Shape(shape.begin(), shape.begin() + 16)) + "...";
}

}  // namespace

std::string json_string(std::string_view text, std::size_t most) {
  std::string out = "\"";
  std::size_t taken = 0;
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    const std::size_t step = std::max<std::size_t>(length, 1);
    if (taken + step > most) {
      out += "...";
      break;
    }
    const char c = text.front();
    if (length == 0) {
      out += "\\ufffd";
    } else if (length > 1) {
      out += text.substr(0, length);
    } else if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      fmt::format_to(std::back_inserter(out), "\\u{:04x}", static_cast<unsigned>(c));
    } else {
      out += c;
    }
    taken += step;
    text.remove_prefix(step);
  }
  return out + '"';
}

std::string TimelineFormat::time(TraceTime at) const {
  const TraceTime since = std::max<TraceTime>(at - zero_, 0);
  return formatted("{}.{:03}", since / 1000, since % 1000);
}

std::string TimelineFormat::first_event(std::string_view run, int ranks) {
  return formatted(R"({{"name":"hvd timeline","ph":"i","s":"g","pid":0,"tid":0,"ts":0,"args":{{"run":"{}","ranks":{}}}}})", run, ranks);
}

std::string TimelineFormat::full_event(TraceTime now) const {
  return formatted(",\n{{\"ph\":\"i\",\"s\":\"g\",\"pid\":{},\"tid\":0,\"ts\":{},{}", rank_, time(now), TimelineFile::kFullMark);
}

void TimelineFormat::introduce(std::string_view label, std::string& out) const {
  fmt::format_to(std::back_inserter(out), ",\n{{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":{},\"tid\":0,\"args\":{{\"name\":{}}}}}",
                 rank_, json_string(label));
  fmt::format_to(std::back_inserter(out),
                 ",\n{{\"name\":\"process_sort_index\",\"ph\":\"M\",\"pid\":{0},\"tid\":0,\"args\":{{\"sort_index\":{0}}}}}", rank_);
}

void TimelineFormat::begin(Track& track, std::string_view name, TraceTime at, std::string_view arguments, std::string& out) const {
  track.last = std::max(track.last, at);
  fmt::format_to(std::back_inserter(out), ",\n{{\"name\":\"{}\",\"ph\":\"B\",\"pid\":{},\"tid\":{},\"ts\":{}{}}}", name, rank_, track.tid,
                 time(track.last), arguments);
}

void TimelineFormat::finish(Track& track, TraceTime at, std::string& out, std::string_view arguments) const {
  track.last = std::max(track.last, at);
  fmt::format_to(std::back_inserter(out), ",\n{{\"ph\":\"E\",\"pid\":{},\"tid\":{},\"ts\":{}{}}}", rank_, track.tid, time(track.last),
                 arguments);
}

void TimelineFormat::mark(Track& track, std::string_view name, TraceTime at, std::string& out) const {
  track.last = std::max(track.last, at);
  fmt::format_to(std::back_inserter(out), ",\n{{\"name\":\"{}\",\"ph\":\"i\",\"s\":\"t\",\"pid\":{},\"tid\":{},\"ts\":{}}}", name, rank_,
                 track.tid, time(track.last));
}

TimelineFormat::Track& TimelineFormat::make_track(const std::string& key, std::string_view label, bool shared, std::string& out) {
  auto& track = tracks_[key] = std::make_unique<Track>(Track{next_tid_++, shared});
  fmt::format_to(std::back_inserter(out), ",\n{{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":{},\"tid\":{},\"args\":{{\"name\":{}}}}}",
                 rank_, track->tid, json_string(label));
  return *track;
}

TimelineFormat::Track& TimelineFormat::track_for(const TraceSubject& subject, std::string& out) {
  const std::string key = formatted("{}:{}:{}", subject.process_set, static_cast<int>(subject.kind), subject.name);
  if (!subject.once) {
    if (const auto known = tracks_.find(key); known != tracks_.end()) return *known->second;
    const std::string label = subject.process_set == 0 ? subject.name : formatted("{} (set {})", subject.name, subject.process_set);
    if (next_tid_ <= kNamedLanes) return make_track(key, label, false, out);
  }
  if (free_shared_.empty()) {
    const std::string label = formatted("others {}", next_tid_);
    free_shared_.push_back(&make_track(label, label, true, out));  // no key of a name begins so
  }
  Track& track = *free_shared_.back();
  free_shared_.pop_back();
  return track;
}

void TimelineFormat::submitted(const TraceRecord& record, std::string& out) {
  const TraceSubject& subject = *record.subject;
  Track& track = track_for(subject, out);
  std::string arguments;
  if (track.shared) fmt::format_to(std::back_inserter(arguments), ",\"tensor\":{}", json_string(subject.name));
  if (subject.tensors > 0) fmt::format_to(std::back_inserter(arguments), ",\"dtype\":\"{}\"", subject.dtype);
  if (subject.tensors == 1) fmt::format_to(std::back_inserter(arguments), ",\"shape\":\"{}\"", shape_text(subject.shape));
  if (subject.tensors > 1) fmt::format_to(std::back_inserter(arguments), ",\"tensors\":{}", subject.tensors);
  if (subject.tensors > 0) fmt::format_to(std::back_inserter(arguments), ",\"bytes\":{}", subject.bytes);
  if (!arguments.empty()) arguments = formatted(",\"args\":{{{}}}", arguments.substr(1));

  begin(track, "NEGOTIATE_" + upper(name_of(subject.kind)), record.from, arguments, out);
  if (record.copied_to > record.copied_from) {
    begin(track, "MEMCPY_IN_FUSION_BUFFER", record.copied_from, {}, out);
    finish(track, record.copied_to, out);
  }
  mark(track, formatted("rank {} ready", rank_), record.at, out);
  open_[record.id] = {&track, subject.kind, TraceRecord::Kind::Submitted, std::move(arguments), subject.bytes};
  ++queued_;
  count(record.at, out);
}

void TimelineFormat::close(Open& open, TraceTime at, std::string_view error, std::string& out) {
  const std::string arguments = error.empty() ? "" : formatted(",\"args\":{{\"error\":{}}}", json_string(error, 512));
  if (open.phase != TraceRecord::Kind::Submitted) finish(*open.track, at, out);
  finish(*open.track, at, out, arguments);
  const bool launched = open.phase == TraceRecord::Kind::Launched || open.phase == TraceRecord::Kind::CopyingOut;
  if (launched) {
    bytes_ -= open.bytes;
  } else {
    --queued_;
  }
  if (open.track->shared) free_shared_.push_back(open.track);
}

void TimelineFormat::add(const TraceRecord& record, std::string& out) {
  using Kind = TraceRecord::Kind;
  if (record.kind == Kind::Submitted) return submitted(record, out);
  if (record.kind == Kind::Cut) {
    fmt::format_to(
        std::back_inserter(out),
        ",\n{{\"name\":\"CYCLE_START\",\"ph\":\"i\",\"s\":\"p\",\"pid\":{},\"tid\":0,\"ts\":{},\"args\":{{\"tensors\":{},\"bytes\":{}}}}}",
        rank_, time(record.at), record.id, record.copied_from);
    return;
  }
  const auto found = open_.find(record.id);
  if (found == open_.end()) return;
  Open& open = found->second;
  const std::string operation = upper(name_of(open.kind));
  switch (record.kind) {
    case Kind::Agreed:
      if (record.rank >= 0) mark(*open.track, formatted("rank {} was last", record.rank), record.at, out);
      if (!record.good) break;
      finish(*open.track, record.at, out);
      begin(*open.track, operation, record.at, open.arguments, out);
      begin(*open.track, "WAIT_FOR_DATA", record.at, {}, out);
      open.phase = Kind::Agreed;
      break;
    case Kind::Launched:
      if (open.phase != Kind::Agreed) break;  // another batch of the same group
      finish(*open.track, record.at, out);
      begin(*open.track, formatted("{}_{}", upper(record.backend), operation), record.at, {}, out);
      open.phase = Kind::Launched;
      --queued_;
      bytes_ += open.bytes;
      count(record.at, out);
      break;
    case Kind::CopyingOut:
      if (open.phase != Kind::Launched) break;
      finish(*open.track, record.at, out);
      begin(*open.track, "MEMCPY_OUT_FUSION_BUFFER", record.at, {}, out);
      open.phase = Kind::CopyingOut;
      break;
    default:
      close(open, record.at, record.subject ? std::string_view(record.subject->name) : std::string_view{}, out);
      open_.erase(found);
      count(record.at, out);
  }
}

void TimelineFormat::count(TraceTime at, std::string& out) {
  changed_ = true;
  changed_at_ = std::max(changed_at_, at);
  if (changed_at_ - counted_at_ >= kCounterInterval) put_counters(out);
}

void TimelineFormat::put_counters(std::string& out) {
  changed_ = false;
  counted_at_ = changed_at_;
  const std::string head = formatted("\"ph\":\"C\",\"pid\":{},\"tid\":0,\"ts\":{},\"args\":", rank_, time(changed_at_));
  fmt::format_to(std::back_inserter(out), ",\n{{\"name\":\"queue length\",{}{{\"operations\":{}}}}}", head, queued_);
  fmt::format_to(std::back_inserter(out), ",\n{{\"name\":\"bytes in flight\",{}{{\"bytes\":{}}}}}", head, bytes_);
}

void TimelineFormat::settle(std::string& out) {
  if (changed_) put_counters(out);
}

void TimelineFormat::dropped(std::uint64_t operations, TraceTime now, std::string& out) const {
  fmt::format_to(std::back_inserter(out),
                 ",\n{{\"name\":\"operations left out\",\"ph\":\"C\",\"pid\":{},\"tid\":0,\"ts\":{},\"args\":{{\"operations\":{}}}}}",
                 rank_, time(now), operations);
}

void TimelineFormat::end(TraceTime now, std::string& out) {
  for (auto& [id, open] : open_) close(open, now, "the timeline was stopped", out);
  open_.clear();
  count(now, out);
  settle(out);
}

}  // namespace hvd
