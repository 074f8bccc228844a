// Raw buffers: needs no LibTorch. What the library throws is caught by its type, also where it is a
// shared library.
#include <hvd/backend.h>
#include <hvd/hvd.h>
#include <hvd/topology.h>
#include <hvd/transport.h>

#include <array>
#include <cstdio>

namespace {

bool ranks_disagree() {
  std::array<float, 4> values{};
  const hvd::Buffer buffer{values.data(), hvd::DataType::Float32, {1 + hvd::rank()}};
  try {
    hvd::allreduce(buffer, buffer, {.name = "uneven"});
  } catch (const hvd::Mismatch&) {
    return true;
  }
  return false;
}

}  // namespace

int main() {
  try {
    hvd::rank();
    return 1;
  } catch (const hvd::NotInitialized&) {
  }
  hvd::init();
  float value = static_cast<float>(hvd::rank() + 1);
  const hvd::Buffer buffer{&value, hvd::DataType::Float32, {1}};
  hvd::allreduce(buffer, buffer, {.name = "greeting", .op = hvd::ReduceOp::Sum});
  const int size = hvd::size();
  const bool right = value == static_cast<float>(size * (size + 1) / 2);
  const bool caught = size == 1 || ranks_disagree();
  std::printf("core_only: rank %d of %d: sum %s, mismatch %s\n", hvd::rank(), size,
              right ? "right" : "WRONG", caught ? "caught" : "MISSED");
  hvd::shutdown();
  return right && caught ? 0 : 1;
}
