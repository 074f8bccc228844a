#include "hvd/negotiation/leaders/leader_messages.h"

#include <memory>
#include <utility>

namespace hvd {

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
    case LeaderItem::Late:
    case LeaderItem::Linger: return Way::Up;
    case LeaderItem::Fail: return Way::Any;
    default: return Way::Down;
  }
}

void encode(Writer& writer, const Pledges& pledges) {
  writer.put(static_cast<std::uint32_t>(pledges.size()));
  for (const auto& [key, rounds] : pledges) {
    encode(writer, key);
    writer.put(rounds);
  }
}

LeaderItem decode_item(Reader& reader) {
  const auto item = reader.get<LeaderItem>();
  if (item > LeaderItem::Linger) throw WireError("unknown kind of message");
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
