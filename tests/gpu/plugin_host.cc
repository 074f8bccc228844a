// A library with hvd in it is opened for this program's own use (RTLD_LOCAL), so that nothing of
// NCCL's is in the global scope: what came late to NCCL (windows) is found all the same. And the
// table of calls is never destroyed: threads of the user's, and gradients, use it while the process
// ends. Needs no GPU. Prints what it found, returns 1 if anything is wrong.
//   plugin_host PLUGIN
#include <dlfcn.h>

#include <cstdio>

namespace {
int destructors = 0;
}

/// Counts what is to be destroyed at the process's end, and leaves it be: this program has nothing
/// to clean up.
extern "C" __attribute__((visibility("default"))) int __cxa_atexit(void (*)(void*), void*, void*) {
  ++destructors;
  return 0;
}

int main(int arguments, char** argument) {
  if (arguments != 2) return 2;
  void* const plugin = dlopen(argument[1], RTLD_NOW | RTLD_LOCAL);
  if (plugin == nullptr) {
    std::printf("FAILED: %s\n", dlerror());
    return 1;
  }
  const auto entries = reinterpret_cast<int (*)()>(dlsym(plugin, "hvd_plugin_entries"));
  const int before = destructors;
  const int found = entries();
  const int made = destructors - before;
  std::printf("windows: %d, destructors of the table: %d of %d\n", found, made, destructors);
  return found == 1 && made == 0 && before > 0 ? 0 : 1;
}
