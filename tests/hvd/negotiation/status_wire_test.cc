#include "hvd/negotiation/values/status_wire.h"

#include <doctest/doctest.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hvd/types.h"

namespace hvd::test {

TEST_CASE("a status reads as it was written") {
  for (int code = 0; code <= static_cast<int>(Status::Code::Deadlock); ++code) {
    const Status status(static_cast<Status::Code>(code), "what it says");
    const Bytes bytes = to_wire(status);
    CHECK(bytes == Writer().put(static_cast<std::uint8_t>(code)).put_string("what it says").take());
    Reader reader(bytes);
    const Status read = decode_status(reader);
    CHECK(read.code() == status.code());
    CHECK(read.text() == status.text());
    CHECK(reader.at_end());
  }
}

TEST_CASE("a status with a code that does not exist is a failure, and never a success") {
  for (int code = static_cast<int>(Status::Code::Deadlock) + 1; code < 256; ++code) {
    const Bytes bytes = to_wire(static_cast<std::uint8_t>(code), std::string_view("why"));
    Reader reader(bytes);
    const Status read = decode_status(reader);
    CHECK(!read.ok());
    CHECK_THROWS_WITH_AS(read.raise(), "why", BackendError);
    // Nor where it came some other way, as from memory that is shared.
    CHECK_THROWS_WITH_AS(Status(static_cast<Status::Code>(code), "why").raise(), "why",
                         BackendError);
  }
}

TEST_CASE("a status that ends too early is not read") {
  const Bytes bytes = to_wire(Status(Status::Code::Mismatch, "why"));
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    Reader reader{std::span(bytes).first(size)};
    CHECK_THROWS_AS(static_cast<void>(decode_status(reader)), WireError);
  }
}

TEST_CASE("parts are written one after the other, as Writer does") {
  const std::vector<std::uint32_t> numbers{1, 2, 3};
  const std::string text = "text";
  CHECK(to_wire(OpKind::Join, std::int64_t{-7}, text, std::span<const std::uint32_t>(numbers),
                numbers) == Writer()
                                .put(OpKind::Join)
                                .put(std::int64_t{-7})
                                .put_string(text)
                                .put_list(std::span<const std::uint32_t>(numbers))
                                .put_list(std::span<const std::uint32_t>(numbers))
                                .take());
  CHECK(to_wire().empty());
}

}  // namespace hvd::test
