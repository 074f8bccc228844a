#pragma once
/// An instruction that a thread gives the processor alone. Any thread; nothing fails.
// Tested in tests/hvd/base/waits_test.cc

namespace hvd {

/// Tells the processor that this thread looks at something again and again.
inline void cpu_relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

}  // namespace hvd
