#include "hvd/negotiation/values/records.h"

#include <memory>

namespace hvd {

namespace {

void put_bits(Writer& writer, const std::vector<bool>& bits) {
  std::vector<std::uint8_t> packed((bits.size() + 7) / 8);
  for (std::size_t i = 0; i < bits.size(); ++i)
    if (bits[i]) packed[i / 8] = static_cast<std::uint8_t>(packed[i / 8] | (1U << (i % 8)));
  writer.put(static_cast<std::uint32_t>(bits.size()))
      .put_list(std::span<const std::uint8_t>(packed));
}

std::vector<bool> get_bits(Reader& reader) {
  const auto count = reader.get<std::uint32_t>();
  const auto packed = reader.get_list<std::uint8_t>();
  if (packed.size() != (std::size_t{count} + 7) / 8)
    throw WireError("bit list of the wrong length");
  std::vector<bool> bits(count);
  for (std::size_t i = 0; i < count; ++i) bits[i] = ((packed[i / 8] >> (i % 8)) & 1U) != 0;
  return bits;
}

}  // namespace

void encode(Writer& writer, const Agreement& agreement) {
  put_bits(writer, agreement.present);
  writer.put_list(std::span<const int>(agreement.absent)).put(agreement.last);
}

Agreement decode_agreement(Reader& reader) {
  Agreement agreement;
  agreement.present = get_bits(reader);
  agreement.absent = reader.get_list<int>();
  agreement.last = reader.get<int>();
  return agreement;
}

void encode(Writer& writer, const UnitKey& key) {
  writer.put(key.process_set).put(key.kind).put_string(key.name);
}

UnitKey decode_key(Reader& reader) {
  UnitKey key;
  key.process_set = reader.get<int>();
  const auto kind = reader.get<std::uint8_t>();
  if (kind > static_cast<std::uint8_t>(OpKind::Control))
    throw WireError("unknown kind of operation");
  key.kind = static_cast<OpKind>(kind);
  key.name = reader.get_string();
  return key;
}

void encode(Writer& writer, const std::vector<StuckRank>& stuck_ranks) {
  writer.put(static_cast<std::uint32_t>(stuck_ranks.size()));
  for (const auto& stuck_rank : stuck_ranks) writer.put(stuck_rank.rank).put(stuck_rank.kind);
}

std::vector<StuckRank> decode_stuck_ranks(Reader& reader) {
  std::vector<StuckRank> stuck_ranks;
  for (auto left = reader.get<std::uint32_t>(); left > 0; --left) {
    const int rank = reader.get<int>();
    const auto kind = reader.get<OpKind>();
    if (kind > OpKind::Control)
      throw WireError("a rank that is stuck with an unknown kind of operation");
    stuck_ranks.push_back({rank, kind});
  }
  return stuck_ranks;
}

IntroduceRecord decode_introduction(Reader& reader) {
  IntroduceRecord record;
  record.id = reader.get<std::uint32_t>();
  record.generation = reader.get<std::uint32_t>();
  record.ranks = reader.get_list<Run>();
  record.key = decode_key(reader);
  record.signature = std::make_shared<const Signature>(decode_signature(reader));
  return record;
}

}  // namespace hvd
