// TensorBoard's files, byte for byte; tests/system/scripts/train/train_options.sh has TensorBoard
// read one.
#include "examples/train/trainer/event_file.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <iterator>
#include <vector>

namespace {

namespace fs = std::filesystem;

template <class Value>
Value take(const std::string& bytes, std::size_t& at) {
  Value value;
  REQUIRE(at + sizeof(value) <= bytes.size());
  std::memcpy(&value, bytes.data() + at, sizeof(value));
  at += sizeof(value);
  return value;
}

std::uint32_t masked(const std::string& bytes) {
  const std::uint32_t crc = examples::crc32c(bytes);
  return (crc >> 15 | crc << 17) + 0xA282EAD8U;
}

/// The Event messages of the one file in the folder, without their wall times.
std::vector<std::string> events(const fs::path& folder) {
  std::ifstream in(fs::directory_iterator(folder)->path(), std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(in), {}};
  std::vector<std::string> all;
  for (std::size_t at = 0; at < bytes.size();) {
    const auto begin = at;
    const auto length = take<std::uint64_t>(bytes, at);
    CHECK(take<std::uint32_t>(bytes, at) == masked(bytes.substr(begin, 8)));
    const auto data = bytes.substr(at, length);
    at += length;
    CHECK(take<std::uint32_t>(bytes, at) == masked(data));
    REQUIRE(data[0] == '\x09');
    all.push_back(data.substr(9));
  }
  return all;
}

TEST_CASE("the checksum is Castagnoli's") {
  CHECK(examples::crc32c("123456789") == 0xE3069283U);
  CHECK(examples::crc32c("") == 0);
}

TEST_CASE("an event file has its version, where it goes on, and scalars") {
  const auto folder = fs::temp_directory_path() / ("hvd_event_test." + std::to_string(::getpid()));
  {
    examples::EventFile file(folder.string(), 300);
    file.scalar("a/b", 301, 0.5);
    file.flush();
    const auto all = events(folder);
    REQUIRE(all.size() == 3);
    CHECK(all[0] == std::string("\x10\x00\x1A\x0D", 4) + "brain.Event:2");
    CHECK(all[1] == std::string("\x10\xAC\x02\x3A\x02\x08\x01"));
    CHECK(all[2] == std::string("\x10\xAD\x02\x2A\x0C\x0A\x0A\x0A\x03", 9) + "a/b" +
                        std::string("\x15\x00\x00\x00\x3F", 5));
  }
  fs::remove_all(folder);
}

TEST_CASE("a folder that cannot be written to is named") {
  CHECK_THROWS_WITH_AS(examples::EventFile("/dev/null/events", 0),
                       doctest::Contains("/dev/null/events"), std::runtime_error);
}

}  // namespace
