#include "tools/hvd_bench/workload.h"

namespace bench::gpu {

namespace {
[[noreturn]] void refuse() { throw WrongOptions("--device cuda: this build has no CUDA"); }
}  // namespace

hvd::Device device() { refuse(); }
std::shared_ptr<void> allocate(std::size_t /*bytes*/) { refuse(); }
void copy(void* /*to*/, const void* /*from*/, std::size_t /*bytes*/) { refuse(); }

}  // namespace bench::gpu
