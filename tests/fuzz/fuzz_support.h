#pragma once
/// What the fuzz targets share. A target defines `example` (a well-formed input, drawn from a seed:
/// the corpus, which therefore needs no files) and `take` (what is tried on any input). Whatever
/// `take` throws but WireError or another error of the library ends the program, and so does memory
/// out of all proportion to the input.

#include <sanitizer/allocator_interface.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>

#include "hvd/base/wire.h"
#include "hvd/errors.h"
#include "tests/support/random.h"

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);

namespace hvd::fuzz {

Bytes example(test::Random& random);
void take(Reader& input);

inline std::atomic<std::size_t> allocated{0};  // NOLINT: counts for one input at a time
inline bool counting = false;                  // NOLINT

/// Bytes asked for while an input is taken, freed or not: at the most this much for each byte of
/// the input, and a fixed sum.
inline constexpr std::size_t kPerByte = 4096;
inline constexpr std::size_t kAnyway = std::size_t{4} << 20;

inline int run(const std::uint8_t* data, std::size_t size) {
  allocated = 0;
  counting = true;
  try {
    Reader reader(std::as_bytes(std::span(data, size)));
    take(reader);
  } catch (const WireError&) {
  } catch (const Error&) {
  }
  counting = false;
  if (allocated > kAnyway + kPerByte * size) {
    std::fprintf(stderr, "%zu bytes of input made it ask for %zu bytes of memory\n", size,
                 allocated.load());
    std::abort();
  }
  return 0;
}

inline std::size_t mutate(std::uint8_t* data, std::size_t size, std::size_t max_size,
                          unsigned seed) {
  test::Random random(seed);
  if (size > 1 && !random.one_in(16)) return LLVMFuzzerMutate(data, size, max_size);
  const Bytes made = example(random);
  const std::size_t kept = std::min(made.size(), max_size);
  std::copy_n(reinterpret_cast<const std::uint8_t*>(made.data()), kept, data);
  return kept;
}

}  // namespace hvd::fuzz

extern "C" int LLVMFuzzerInitialize(int* /*argc*/, char*** /*argv*/) {
  __sanitizer_install_malloc_and_free_hooks(
      [](const volatile void* /*block*/, std::size_t size) {
        if (hvd::fuzz::counting) hvd::fuzz::allocated += size;
      },
      [](const volatile void* /*block*/) {});
  return 0;
}
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return hvd::fuzz::run(data, size);
}
extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size,
                                               std::size_t max_size, unsigned seed) {
  return hvd::fuzz::mutate(data, size, max_size, seed);
}
