// The library as a plugin of a program that knows neither CUDA nor NCCL, as a Python module is:
// plugin_host.cc opens it.
#include "ops/gpu/api/gpu_api.h"

extern "C" __attribute__((visibility("default"))) int hvd_plugin_entries() {
  const auto* table = hvd::gpu::linked_gpu_api();
  return table->window_register && table->window_deregister ? 1 : 0;
}
