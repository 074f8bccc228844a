#pragma once
/// Outlet is a descriptor that hvdrun or its helper writes to, such as its standard output, for a program that must not wait for who reads
/// there: bytes are kept until they can be written. It borrows the descriptor, and is for one thread.

#include <sys/types.h>

#include <cstddef>
#include <string>
#include <string_view>

namespace hvdrun {

class Outlet {
 public:
  explicit Outlet(int descriptor);
  Outlet(const Outlet&) = delete;
  Outlet& operator=(const Outlet&) = delete;

  [[nodiscard]] int descriptor() const { return descriptor_; }
  /// Takes bytes over, to be written after all before.
  void add(std::string_view text) { waiting_ += text; }
  /// Writes what can be written without waiting.
  void write_some();
  [[nodiscard]] bool is_empty() const { return begin_ == waiting_.size(); }
  /// Returns whether so much waits that no more should be read.
  [[nodiscard]] bool is_full() const { return waiting_.size() - begin_ >= kMost; }
  /// Returns whether both write to the same file: what they write then must go by one of them, or lines would be mixed.
  [[nodiscard]] bool is_same_file(const Outlet& other) const;

 private:
  static constexpr std::size_t kMost = std::size_t{1} << 20;
  int descriptor_;
  bool is_socket_;  // then whoever has gone is no SIGPIPE
  std::string waiting_;
  std::size_t begin_ = 0;  // what stands before it is written
};

}  // namespace hvdrun
