#include "hvd/negotiation/leaders/leader_messages.h"

#include <algorithm>
#include <memory>
#include <span>
#include <utility>

namespace hvd {

namespace {

void put_introduction(Writer& writer, const Introduction& introduction) {
  encode(writer, introduction.key);
  writer.put_list(std::span<const Run>(introduction.ranks));
  encode(writer, *introduction.signature);
}

Bytes agreement_item(LeaderItem item, std::uint32_t id, const Agreement& what) {
  Writer writer;
  writer.put(item).put(id);
  encode(writer, what);
  return writer.take();
}

Bytes numbers_item(LeaderItem item, const std::vector<std::uint32_t>& ids) {
  return Writer().put(item).put_list(std::span<const std::uint32_t>(ids)).take();
}

}  // namespace

Way way_of(LeaderItem item) {
  switch (item) {
    case LeaderItem::IntroduceUp:
    case LeaderItem::Ready:
    case LeaderItem::Joined:
    case LeaderItem::LeaveUp:
    case LeaderItem::Doubt:
    case LeaderItem::Retired:
    case LeaderItem::Stuck:
    case LeaderItem::Credit:
    case LeaderItem::Blocked:
    case LeaderItem::Late: return Way::Up;
    case LeaderItem::Fail: return Way::Any;
    default: return Way::Down;
  }
}

Bytes LeaderItems::introduce_up(const Introduction& introduction) {
  Writer writer;
  writer.put(LeaderItem::IntroduceUp);
  put_introduction(writer, introduction);
  return writer.take();
}
Bytes LeaderItems::introduce_down(const Introduction& introduction) {
  Writer writer;
  writer.put(LeaderItem::IntroduceDown).put(introduction.id);
  put_introduction(writer, introduction);
  return writer.take();
}
Bytes LeaderItems::ready(std::uint32_t id, const Agreement& what) {
  return agreement_item(LeaderItem::Ready, id, what);
}
Bytes LeaderItems::joined(int process_set, int rank) {
  return Writer().put(LeaderItem::Joined).put(process_set).put(rank).take();
}
Bytes LeaderItems::agree(std::uint32_t id, const Agreement& what) {
  return agreement_item(LeaderItem::Agree, id, what);
}
Bytes LeaderItems::cut(int process_set) {
  return Writer().put(LeaderItem::Cut).put(process_set).take();
}
Bytes LeaderItems::leave_up(int rank, const Pledges& pledges) {
  Writer writer;
  writer.put(LeaderItem::LeaveUp).put(rank).put(static_cast<std::uint32_t>(pledges.size()));
  for (const auto& [key, rounds] : pledges) {
    encode(writer, key);
    writer.put(rounds);
  }
  return writer.take();
}
Bytes LeaderItems::leave(int rank) { return Writer().put(LeaderItem::Leave).put(rank).take(); }
Bytes LeaderItems::doubt(const UnitKey& key) {
  Writer writer;
  writer.put(LeaderItem::Doubt);
  encode(writer, key);
  return writer.take();
}
Bytes LeaderItems::refuse(const UnitKey& key, int rank, std::string_view text) {
  Writer writer;
  writer.put(LeaderItem::Refuse);
  encode(writer, key);
  return writer.put(rank).put_string(text).take();
}
Bytes LeaderItems::blocked(const BlockedReport& report) {
  Writer writer;
  writer.put(LeaderItem::Blocked);
  encode(writer, report);
  return writer.take();
}
Bytes LeaderItems::late(const LateReport& report) {
  Writer writer;
  writer.put(LeaderItem::Late);
  encode(writer, report);
  return writer.take();
}
Bytes LeaderItems::retire(const std::vector<std::uint32_t>& ids) {
  return numbers_item(LeaderItem::Retire, ids);
}
Bytes LeaderItems::retired(const std::vector<std::uint32_t>& in_use) {
  return numbers_item(LeaderItem::Retired, in_use);
}
Bytes LeaderItems::forget(const std::vector<std::uint32_t>& ids) {
  return numbers_item(LeaderItem::Forget, ids);
}
Bytes LeaderItems::end() { return Writer().put(LeaderItem::End).take(); }
Bytes LeaderItems::fail(const Status& status) {
  return Writer().put(LeaderItem::Fail).put(status.code()).put_string(status.text()).take();
}
Bytes LeaderItems::stuck(const StuckReport& report) {
  Writer writer;
  writer.put(LeaderItem::Stuck)
      .put(report.process_set)
      .put_string(report.name)
      .put(report.last_decision);
  encode(writer, report.ranks);
  return writer.take();
}
Bytes LeaderItems::conflict(const StuckReport& report) {
  Writer writer;
  writer.put(LeaderItem::Conflict).put(report.process_set).put_string(report.name);
  encode(writer, report.ranks);
  return writer.take();
}
Bytes LeaderItems::credit(int process_set, int domain, std::uint64_t over) {
  return Writer().put(LeaderItem::Credit).put(process_set).put(domain).put(over).take();
}
Bytes LeaderItems::message_of(const Bytes& item) { return Writer().put_bytes(item).take(); }

LeaderItem decode_item(Reader& reader) {
  const auto item = reader.get<LeaderItem>();
  if (item > LeaderItem::Late) throw WireError("unknown kind of message");
  return item;
}

Introduction decode_introduced(Reader& reader, bool with_number) {
  Introduction introduction;
  if (with_number) introduction.id = reader.get<std::uint32_t>();
  introduction.key = decode_key(reader);
  introduction.ranks = reader.get_list<Run>();
  introduction.signature = std::make_shared<const Signature>(decode_signature(reader));
  if (introduction.signature->kind != introduction.key.kind)
    throw WireError("an introduction that makes no sense");
  return introduction;
}

Pledges decode_pledges(Reader& reader) {
  Pledges pledges;
  for (auto left = reader.get<std::uint32_t>(); left > 0; --left) {
    UnitKey key = decode_key(reader);
    pledges[std::move(key)] = reader.get<std::uint32_t>();
  }
  return pledges;
}

Status decode_failure(Reader& reader) {
  // A code that this leader does not know is a failure all the same.
  const auto code =
      std::min(reader.get<std::uint8_t>(), static_cast<std::uint8_t>(Status::Code::Deadlock));
  return {static_cast<Status::Code>(code), reader.get_string()};
}

StuckReport decode_stuck(Reader& reader) {
  StuckReport report;
  report.process_set = reader.get<int>();
  report.name = reader.get_string();
  report.last_decision = reader.get<std::uint64_t>();
  report.ranks = decode_stuck_ranks(reader);
  return report;
}

StuckReport decode_conflict(Reader& reader) {
  StuckReport report;
  report.process_set = reader.get<int>();
  report.name = reader.get_string();
  report.ranks = decode_stuck_ranks(reader);
  return report;
}

}  // namespace hvd
