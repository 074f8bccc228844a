#pragma once
/// Lets autograd make the gradients of parameters in memory that the ranks of the host share, so
/// that they are reduced where they were made and need not be copied there. It stands in front of
/// LibTorch's allocator for the host: what a node of a backward pass asks for, as large as the
/// gradient of a parameter that has been announced and that the node leads to, comes from the
/// arena; everything else from LibTorch's own. Blocks that are free again are kept for the next
/// gradient of that size, so that backward passes do not meet new pages. All blocks together, free
/// or not, take at most twice the bytes that are announced. What a child that was forked still sees
/// is left as it is. Any thread. Process-wide: the allocator stays once it stands there, and does
/// nothing while nothing is announced, after `shutdown()` and in a child that was forked. One that
/// the program sets later takes its place; then gradients are copied, which the log says once.

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace hvd::detail {

/// Gives back what the arena has free at its end: the first member of what has much memory there.
struct HostMemoryUser {
  HostMemoryUser() = default;
  ~HostMemoryUser();
  HostMemoryUser(const HostMemoryUser&) = delete;
  HostMemoryUser& operator=(const HostMemoryUser&) = delete;
};

/// Announces the parameter's gradient for as long as it lives.
class AnnouncedGradient {
 public:
  explicit AnnouncedGradient(const at::Tensor& parameter);
  ~AnnouncedGradient();
  AnnouncedGradient(const AnnouncedGradient&) = delete;
  AnnouncedGradient& operator=(const AnnouncedGradient&) = delete;

 private:
  const void* leaf_;
  std::size_t bytes_;
};

/// Returns whether `.grad` of a parameter lies in such memory with nothing beside it that anybody
/// else sees, so that it may be reduced in its place; from then on nobody but `owner` gets that
/// answer. `just_given`: asked by a hook to which autograd has just given it.
bool stays_in_shared_memory(const at::Tensor& gradient, const void* owner, bool just_given);

}  // namespace hvd::detail
