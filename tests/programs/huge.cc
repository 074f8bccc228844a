// For tests/scripts/huge.sh: collectives on tensors of more than 2^31 - 1 elements (int8), in the arena and in ordinary memory.
// Exit code 77 where there is too little memory, with the reason.
#include <fmt/format.h>
#include <hvd/hvd.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

namespace {

constexpr std::int64_t kCount = (std::int64_t{1} << 31) + 7;

std::int64_t available_bytes() {
  std::ifstream file("/proc/meminfo");
  std::string word;
  while (file >> word)
    if (word == "MemAvailable:" && file >> word) return std::stoll(word) * 1024;
  return 0;
}

std::int8_t value(std::int64_t i, int rank) { return static_cast<std::int8_t>((i % 41) - 20 + rank); }

void fill(std::int8_t* data) {
  for (std::int64_t i = 0; i < kCount; ++i) data[i] = value(i, hvd::rank());
}

bool check(const char* what, const std::int8_t* data, int (*expected)(std::int64_t)) {
  for (std::int64_t i = 0; i < kCount; ++i)
    if (data[i] != static_cast<std::int8_t>(expected(i))) {
      fmt::print("rank {}: {}: element {} is {}, not {}\n", hvd::rank(), what, i, data[i], static_cast<std::int8_t>(expected(i)));
      return false;
    }
  if (hvd::rank() == 0) fmt::print("PASS  {}\n", what);
  return true;
}

int sum_of(std::int64_t i) {
  int sum = 0;
  for (int rank = 0; rank < hvd::size(); ++rank) sum += value(i, rank);
  return sum;
}
int last_of(std::int64_t i) { return value(i, hvd::size() - 1); }

}  // namespace

int main() {
  hvd::init();
  const hvd::AllreduceOptions sum{.name = "huge", .op = hvd::ReduceOp::Sum};
  std::int64_t available = available_bytes();
  hvd::allreduce({&available, hvd::DataType::Int64, {}, {}}, {&available, hvd::DataType::Int64, {}, {}}, {.op = hvd::ReduceOp::Min});
  const std::int64_t needed = 3 * kCount * hvd::local_size();
  if (available < needed) {
    if (hvd::rank() == 0) fmt::print("SKIP: {} MiB of memory are needed and {} MiB are free\n", needed >> 20, available >> 20);
    hvd::shutdown();
    return 77;
  }
  bool good = true;
  {
    std::vector<std::int8_t> ordinary(static_cast<std::size_t>(kCount));
    const hvd::Buffer buffer{ordinary.data(), hvd::DataType::Int8, {kCount}, {}};
    fill(ordinary.data());
    hvd::allreduce(buffer, buffer, sum);
    good = check("allreduce, ordinary memory", ordinary.data(), sum_of);
    fill(ordinary.data());
    hvd::broadcast(buffer, {.name = "huge", .root_rank = hvd::size() - 1});
    good = check("broadcast, ordinary memory", ordinary.data(), last_of) && good;
  }
  if (const auto shared = hvd::allocate_shared(static_cast<std::size_t>(kCount))) {
    auto* data = static_cast<std::int8_t*>(shared.get());
    fill(data);
    hvd::allreduce({data, hvd::DataType::Int8, {kCount}, {}}, {data, hvd::DataType::Int8, {kCount}, {}}, sum);
    good = check("allreduce, in the arena", data, sum_of) && good;
  }
  hvd::shutdown();
  return good ? 0 : 1;
}
