#pragma once
/// ResultBytes are the elements of a result whose size is known only when all ranks have said
/// theirs (Gathered, Exchanged). They own their memory; what is large comes from memory of earlier
/// results (Config::result_pool_bytes) and goes back there when the object ends, in any thread,
/// also after `shutdown()`. Copying copies the bytes, into ordinary memory. One thread at a time
/// may change an object. They fail with std::bad_alloc.

#include <cstddef>
#include <memory>
#include <vector>

#pragma GCC visibility push(default)
namespace hvd {

/// ResultBytes can be read as a std::vector<std::byte> is, and become one.
class ResultBytes {
 public:
  /// @{
  /// What a container has of the kind.
  using value_type = std::byte;
  using size_type = std::size_t;
  using iterator = std::byte*;
  using const_iterator = const std::byte*;
  /// @}

  /// Makes no bytes.
  ResultBytes() = default;
  /// Makes `size` bytes that are not initialised, in `memory` if that is not null, and otherwise in
  /// ordinary memory.
  ResultBytes(std::shared_ptr<void> memory, std::size_t size);
  /// Copies `bytes`.
  // NOLINT(google-explicit-constructor): such vectors were results once
  ResultBytes(const std::vector<std::byte>& bytes);
  /// @{
  /// Copy the bytes.
  ResultBytes(const ResultBytes& other);
  ResultBytes& operator=(const ResultBytes& other);
  /// @}
  /// @{
  /// Take the memory; `other` has no bytes then.
  ResultBytes(ResultBytes&& other) noexcept;
  ResultBytes& operator=(ResultBytes&& other) noexcept;
  /// @}
  ~ResultBytes() = default;

  /// @{
  /// Returns the first byte; null where there is none.
  [[nodiscard]] std::byte* data() { return static_cast<std::byte*>(memory_.get()); }
  [[nodiscard]] const std::byte* data() const {
    return static_cast<const std::byte*>(memory_.get());
  }
  /// @}
  /// Returns the number of bytes.
  [[nodiscard]] std::size_t size() const { return size_; }
  /// Returns whether there are none.
  [[nodiscard]] bool empty() const { return size_ == 0; }
  /// @{
  /// Returns the first byte, and the end after the last.
  [[nodiscard]] std::byte* begin() { return data(); }
  [[nodiscard]] std::byte* end() { return data() + size_; }
  [[nodiscard]] const std::byte* begin() const { return data(); }
  [[nodiscard]] const std::byte* end() const { return data() + size_; }
  /// @}
  /// @{
  /// Returns the byte at `place`, which must be less than `size()`.
  [[nodiscard]] std::byte& operator[](std::size_t place) { return data()[place]; }
  [[nodiscard]] const std::byte& operator[](std::size_t place) const { return data()[place]; }
  /// @}
  /// Makes it `size` bytes: the first of those that were there, and zeros after them.
  void resize(std::size_t size);
  /// Returns a copy of the bytes.
  // NOLINT(google-explicit-constructor): see above
  operator std::vector<std::byte>() const { return {begin(), end()}; }
  /// Returns whether both have the same bytes.
  friend bool operator==(const ResultBytes& a, const ResultBytes& b);

 private:
  std::shared_ptr<void> memory_;
  std::size_t size_ = 0;
};

}  // namespace hvd
#pragma GCC visibility pop
