#include "hvd/result_bytes.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace hvd {

ResultBytes::ResultBytes(std::shared_ptr<void> memory, std::size_t size) : size_(size) {
  if (size == 0) return;
  memory_ = memory ? std::move(memory)
                   : std::shared_ptr<void>(std::shared_ptr<std::byte[]>(new std::byte[size]));
}

ResultBytes::ResultBytes(const std::vector<std::byte>& bytes) : ResultBytes(nullptr, bytes.size()) {
  if (size_ > 0) std::memcpy(data(), bytes.data(), size_);
}

ResultBytes::ResultBytes(const ResultBytes& other) : ResultBytes(nullptr, other.size_) {
  if (size_ > 0) std::memcpy(data(), other.data(), size_);
}
ResultBytes& ResultBytes::operator=(const ResultBytes& other) {
  if (this != &other) *this = ResultBytes(other);
  return *this;
}

ResultBytes::ResultBytes(ResultBytes&& other) noexcept
    : memory_(std::move(other.memory_)), size_(std::exchange(other.size_, 0)) {}
ResultBytes& ResultBytes::operator=(ResultBytes&& other) noexcept {
  if (this == &other) return *this;
  memory_ = std::move(other.memory_);
  size_ = std::exchange(other.size_, 0);
  return *this;
}

void ResultBytes::resize(std::size_t size) {
  ResultBytes changed(nullptr, size);
  const std::size_t kept = std::min(size, size_);
  if (kept > 0) std::memcpy(changed.data(), data(), kept);
  if (size > kept) std::memset(changed.data() + kept, 0, size - kept);
  *this = std::move(changed);
}

bool operator==(const ResultBytes& a, const ResultBytes& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

}  // namespace hvd
