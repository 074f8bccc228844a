#pragma once
/// Memory for the state of virtual GPUs: this process's own, unless `place_state` says where
/// processes share some, at one address in all of them. No type in it may have a virtual function.
/// Any thread.

#include <cstddef>
#include <map>
#include <new>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace hvd::gpu::test {

struct StatePlace {
  void* (*allocate)(std::size_t bytes);
  void (*free)(void* memory, std::size_t bytes);
};
inline StatePlace& state_place() {
  static StatePlace own{[](std::size_t bytes) { return ::operator new(bytes); },
                        [](void* memory, std::size_t) { ::operator delete(memory); }};
  return own;
}
/// Set before anything is made there.
inline void place_state(const StatePlace& place) { state_place() = place; }
inline void* allocate_state(std::size_t bytes) { return state_place().allocate(bytes); }
inline void free_state(void* memory, std::size_t bytes) { state_place().free(memory, bytes); }

template <class T>
struct StateAllocator {
  using value_type = T;
  StateAllocator() = default;
  template <class Other>
  StateAllocator(const StateAllocator<Other>& /*other*/) {}  // NOLINT: as the standard asks
  T* allocate(std::size_t count) { return static_cast<T*>(allocate_state(count * sizeof(T))); }
  void deallocate(T* memory, std::size_t count) { free_state(memory, count * sizeof(T)); }
  bool operator==(const StateAllocator& /*other*/) const { return true; }
};

using StateText = std::basic_string<char, std::char_traits<char>, StateAllocator<char>>;
inline std::string text_of(const StateText& kept) { return std::string(std::string_view(kept)); }
template <class T>
using StateVector = std::vector<T, StateAllocator<T>>;
template <class T>
using StateSet = std::set<T, std::less<T>, StateAllocator<T>>;
template <class Key, class T>
using StateMap = std::map<Key, T, std::less<Key>, StateAllocator<std::pair<const Key, T>>>;

}  // namespace hvd::gpu::test
