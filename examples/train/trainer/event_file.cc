#include "examples/train/trainer/event_file.h"

#include <unistd.h>

#include <bit>
#include <chrono>
#include <filesystem>
#include <stdexcept>

namespace examples {
namespace {

// Numbers of fields in tensorflow/core/util/event.proto and framework/summary.proto.
constexpr int kWallTime = 1, kStep = 2, kFileVersion = 3, kSummary = 5, kSessionLog = 7;
constexpr int kSummaryValue = 1, kValueTag = 1, kValueNumber = 2, kSessionStatus = 1;
constexpr std::uint64_t kSessionStart = 1;
enum Wire : std::uint8_t { kVarint = 0, kEight = 1, kText = 2, kFour = 5 };

void put_varint(std::string& out, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  out += static_cast<char>(value);
}

template <class Unsigned>
void put_fixed(std::string& out, Unsigned value) {
  for (std::size_t i = 0; i < sizeof(value); ++i) out += static_cast<char>(value >> (8 * i));
}

void put_key(std::string& out, int field, Wire wire) {
  put_varint(out, static_cast<std::uint64_t>(field) << 3 | wire);
}

void put_text(std::string& out, int field, std::string_view text) {
  put_key(out, field, kText);
  put_varint(out, text.size());
  out += text;
}

std::uint32_t masked(std::uint32_t crc) { return (crc >> 15 | crc << 17) + 0xA282EAD8U; }

double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string host_name() {
  char name[256] = {};
  return ::gethostname(name, sizeof(name) - 1) == 0 ? name : "host";
}

}  // namespace

std::uint32_t crc32c(std::string_view bytes) {
  std::uint32_t crc = 0xFFFFFFFFU;
  for (const char byte : bytes) {
    crc ^= static_cast<unsigned char>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ ((crc & 1) != 0 ? 0x82F63B78U : 0);
  }
  return ~crc;
}

EventFile::EventFile(const std::string& folder, std::int64_t first_step) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  const auto microseconds = std::chrono::duration_cast<std::chrono::microseconds>(
                                std::chrono::system_clock::now().time_since_epoch())
                                .count();
  char stamp[48];
  std::snprintf(stamp, sizeof(stamp), "%lld.%06lld",
                static_cast<long long>(microseconds / 1'000'000),
                static_cast<long long>(microseconds % 1'000'000));
  path_ = folder + "/events.out.tfevents." + stamp + "." + host_name() + "." +
          std::to_string(::getpid());
  out_.open(path_, std::ios::binary);
  std::string version;
  put_text(version, kFileVersion, "brain.Event:2");
  event(0, version);
  if (first_step > 0) {
    std::string log, field;
    put_key(log, kSessionStatus, kVarint);
    put_varint(log, kSessionStart);
    put_text(field, kSessionLog, log);
    event(first_step, field);
  }
  flush();
}

void EventFile::scalar(std::string_view tag, std::int64_t step, double value) {
  std::string number, summary, field;
  put_text(number, kValueTag, tag);
  put_key(number, kValueNumber, kFour);
  put_fixed(number, std::bit_cast<std::uint32_t>(static_cast<float>(value)));
  put_text(summary, kSummaryValue, number);
  put_text(field, kSummary, summary);
  event(step, field);
}

void EventFile::event(std::int64_t step, std::string_view field) {
  std::string data, record;
  put_key(data, kWallTime, kEight);
  put_fixed(data, std::bit_cast<std::uint64_t>(seconds_since_1970()));
  put_key(data, kStep, kVarint);
  put_varint(data, static_cast<std::uint64_t>(step));
  data += field;
  put_fixed(record, static_cast<std::uint64_t>(data.size()));
  put_fixed(record, masked(crc32c(record)));
  record += data;
  put_fixed(record, masked(crc32c(data)));
  out_ << record;
}

void EventFile::flush() {
  out_.flush();
  if (!out_)
    throw std::runtime_error(
        "cannot write " + path_ +
        "; give --tensorboard a folder that can be written to and is not full");
}

}  // namespace examples
