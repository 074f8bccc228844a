#pragma once
/// Writer and Reader turn values into flat bytes and back, for records and messages. `Reader` never
/// reads past its input: what is short or malformed throws WireError. Bytes are in native order, as
/// all ranks of a world run the same binary. Nothing here is for several threads at once.
// Tested in tests/hvd/negotiation/signature_test.cc, tests/fuzz/signature_fuzz.cc

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "hvd/base/message_memory.h"

#pragma GCC visibility push(default)
namespace hvd {

/// New bytes are not initialized, where no value is given.
using Bytes = std::vector<std::byte, MessageMemory<std::byte>>;
/// Bytes that several hold, and nobody changes any more.
using SharedBytes = std::shared_ptr<const Bytes>;
[[nodiscard]] inline SharedBytes share(Bytes bytes) {
  return std::make_shared<const Bytes>(std::move(bytes));
}

struct WireError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Writer {
 public:
  Writer() = default;
  /// Appends to what is there.
  explicit Writer(Bytes bytes) : bytes_(std::move(bytes)) {}
  template <class T>
  requires std::is_trivially_copyable_v<T> Writer& put(const T& value) {
    return put_raw(&value, sizeof value);
  }
  Writer& put_string(std::string_view text) {
    put(static_cast<std::uint32_t>(text.size()));
    return put_raw(text.data(), text.size());
  }
  template <class T>
  requires std::is_trivially_copyable_v<T> Writer& put_list(std::span<const T> values) {
    put(static_cast<std::uint32_t>(values.size()));
    return put_raw(values.data(), values.size_bytes());
  }
  Writer& put_bytes(std::span<const std::byte> bytes) { return put_list(bytes); }

  [[nodiscard]] const Bytes& bytes() const { return bytes_; }
  [[nodiscard]] Bytes take() { return std::move(bytes_); }

 private:
  Writer& put_raw(const void* data, std::size_t size) {
    const auto* first = static_cast<const std::byte*>(data);
    if (size > 0) bytes_.insert(bytes_.end(), first, first + size);
    return *this;
  }
  Bytes bytes_;
};

/// Encode what has no structure, as Writer puts it: beside them stand those of structures.
template <class T>
requires(std::is_arithmetic_v<T> || std::is_enum_v<T>) void encode(Writer& writer, const T& value) {
  writer.put(value);
}
inline void encode(Writer& writer, std::string_view text) { writer.put_string(text); }
template <class T>
void encode(Writer& writer, std::span<const T> values) {
  writer.put_list(values);
}
template <class T>
void encode(Writer& writer, const std::vector<T>& values) {
  writer.put_list(std::span<const T>(values));
}
/// Returns the bytes of the parts, one after the other: each as its `encode` says.
template <class... Parts>
[[nodiscard]] Bytes to_wire(const Parts&... parts) {
  Writer writer;
  (encode(writer, parts), ...);
  return writer.take();
}

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : rest_(bytes) {}

  template <class T>
  requires std::is_trivially_copyable_v<T> T get() {
    T value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::string get_string() {
    const auto text = take(get<std::uint32_t>());
    return {reinterpret_cast<const char*>(text.data()), text.size()};
  }
  template <class T>
  requires std::is_trivially_copyable_v<T> std::vector<T> get_list() {
    const auto raw = take(std::size_t{get<std::uint32_t>()} * sizeof(T));
    std::vector<T> values(raw.size() / sizeof(T));
    if (!raw.empty()) std::memcpy(values.data(), raw.data(), raw.size());
    return values;
  }
  Bytes get_bytes() {
    const auto raw = take(get<std::uint32_t>());
    return {raw.begin(), raw.end()};
  }
  [[nodiscard]] bool at_end() const { return rest_.empty(); }
  /// Bytes not yet read.
  [[nodiscard]] std::size_t left() const { return rest_.size(); }

 private:
  std::span<const std::byte> take(std::size_t size) {
    if (size > rest_.size()) throw WireError("message is shorter than it says");
    const auto taken = rest_.first(size);
    rest_ = rest_.subspan(size);
    return taken;
  }
  std::span<const std::byte> rest_;
};

}  // namespace hvd
#pragma GCC visibility pop
