#pragma once
/// Is memory of a virtual GPU: every byte of it is poison until somebody writes it, and costs
/// nothing until then. Linux.

#include <cstddef>
#include <cstdint>

namespace hvd::gpu::test {

class PoisonedMemory {
 public:
  static constexpr std::uint8_t kByte = 0x5a;

  /// Throws std::bad_alloc.
  explicit PoisonedMemory(std::size_t bytes);
  ~PoisonedMemory();
  PoisonedMemory(PoisonedMemory&& other) noexcept;
  PoisonedMemory& operator=(PoisonedMemory&&) = delete;

  [[nodiscard]] void* data() const { return data_; }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  /// Makes all of it poison again.
  void poison();

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace hvd::gpu::test
