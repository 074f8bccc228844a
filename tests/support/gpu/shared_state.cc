#include "tests/support/gpu/shared_state.h"

#include <new>

namespace hvd::gpu::test {

namespace {
StatePlace& place() {
  static StatePlace own{[](std::size_t bytes) { return ::operator new(bytes); },
                        [](void* memory, std::size_t) { ::operator delete(memory); }};
  return own;
}
}  // namespace

void place_state(const StatePlace& chosen) { place() = chosen; }
void* allocate_state(std::size_t bytes) { return place().allocate(bytes); }
void free_state(void* memory, std::size_t bytes) { place().free(memory, bytes); }

}  // namespace hvd::gpu::test
