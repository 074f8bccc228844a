#include "tools/hvdrun/messages.h"

#include <array>
#include <cstring>
#include <stdexcept>

namespace hvdrun {

namespace {

constexpr std::size_t kHeader = 5;
constexpr std::uint32_t kMost = std::uint32_t{64} << 20;

[[noreturn]] void fail() { throw std::runtime_error("a message that cannot be read"); }

}  // namespace

Packer& Packer::put(std::uint32_t number) {
  for (int shift = 0; shift < 32; shift += 8) bytes_ += static_cast<char>(number >> shift & 0xffU);
  return *this;
}

Packer& Packer::put(std::string_view text) {
  put(static_cast<std::uint32_t>(text.size()));
  bytes_ += text;
  return *this;
}

Packer& Packer::put(const std::vector<std::string>& texts) {
  put(static_cast<std::uint32_t>(texts.size()));
  for (const auto& text : texts) put(std::string_view(text));
  return *this;
}

Packer& Packer::put(const std::vector<std::pair<std::string, std::string>>& pairs) {
  put(static_cast<std::uint32_t>(pairs.size()));
  for (const auto& [name, value] : pairs) put(std::string_view(name)).put(std::string_view(value));
  return *this;
}

std::string_view Unpacker::take(std::size_t length) {
  if (length > bytes_.size()) fail();
  const auto taken = bytes_.substr(0, length);
  bytes_.remove_prefix(length);
  return taken;
}

std::uint32_t Unpacker::number() {
  std::uint32_t number = 0;
  int shift = 0;
  for (const char byte : take(4)) {
    number |= static_cast<std::uint32_t>(static_cast<unsigned char>(byte)) << shift;
    shift += 8;
  }
  return number;
}

std::string Unpacker::text() { return std::string(take(number())); }

std::vector<std::string> Unpacker::texts() {
  std::vector<std::string> all;
  for (auto left = number(); left > 0; --left) all.push_back(text());
  return all;
}

std::vector<std::pair<std::string, std::string>> Unpacker::pairs() {
  std::vector<std::pair<std::string, std::string>> all;
  for (auto left = number(); left > 0; --left) {
    std::string name = text();
    all.emplace_back(std::move(name), text());
  }
  return all;
}

std::string framed(Kind kind, std::string_view payload) {
  std::string whole = Packer().put(static_cast<std::uint32_t>(payload.size())).bytes();
  whole += static_cast<char>(kind);
  whole += payload;
  return whole;
}

std::optional<Message> MessageReader::next() {
  const std::string_view all = rest();
  if (all.size() < kHeader) return std::nullopt;
  const auto length = Unpacker(all).number();
  const auto kind = static_cast<std::uint8_t>(all[kHeader - 1]);
  if (length > kMost || kind > static_cast<std::uint8_t>(Kind::Input)) fail();
  if (all.size() - kHeader < length) return std::nullopt;
  Message message{static_cast<Kind>(kind), std::string(all.substr(kHeader, length))};
  begin_ += kHeader + length;
  if (begin_ >= bytes_.size() / 2) {
    bytes_.erase(0, begin_);
    begin_ = 0;
  }
  return message;
}

bool MessageReader::skip_to(std::string_view mark) {
  const auto place = bytes_.find(mark);
  if (place == std::string::npos) return false;
  bytes_.erase(0, place + mark.size());
  return true;
}

std::string pack(const HostJob& job) {
  return Packer()
      .put(job.command)
      .put(job.variables)
      .put(job.unset)
      .put(std::string_view(job.folder))
      .put(static_cast<std::uint32_t>(job.first))
      .put(static_cast<std::uint32_t>(job.count))
      .put(static_cast<std::uint32_t>(job.ranks))
      .put(static_cast<std::uint32_t>(job.time_to_end))
      .bytes();
}

HostJob unpack_job(std::string_view payload) {
  Unpacker in(payload);
  HostJob job;
  job.command = in.texts();
  job.variables = in.pairs();
  job.unset = in.texts();
  job.folder = in.text();
  job.first = in.integer();
  job.count = in.integer();
  job.ranks = in.integer();
  job.time_to_end = in.integer();
  if (job.command.empty() || job.count < 1) fail();
  return job;
}

}  // namespace hvdrun
