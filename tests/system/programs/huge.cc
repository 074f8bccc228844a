// For tests/system/scripts/huge.sh: collectives on tensors of more than 2^31 - 1 elements (int8),
// in the arena and in ordinary memory. Exit code 77 where there is too little memory, with the
// reason.
#include <hvd/hvd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "hvd/base/text.h"

namespace {

constexpr std::size_t kCount = (std::size_t{1} << 31) + 7;

std::int64_t available_bytes() {
  std::ifstream file("/proc/meminfo");
  std::string word;
  while (file >> word)
    if (word == "MemAvailable:" && file >> word) return std::stoll(word) * 1024;
  return 0;
}

/// Values come again after so many elements, so that filling and checking are as fast as memory is.
/// A tile does not divide the size.
constexpr std::size_t kTile = 1 << 16;

std::int8_t value(std::size_t i, int rank) {
  return static_cast<std::int8_t>(i % 41 + static_cast<std::size_t>(rank));
}

using Tile = std::vector<std::int8_t>;
Tile tile(const std::function<int(std::size_t)>& of) {
  Tile made(kTile);
  for (std::size_t i = 0; i < kTile; ++i) made[i] = static_cast<std::int8_t>(of(i));
  return made;
}

void fill(std::int8_t* data) {
  const Tile mine = tile([](std::size_t i) { return value(i, hvd::rank()); });
  for (std::size_t begin = 0; begin < kCount; begin += kTile)
    std::memcpy(data + begin, mine.data(), std::min(kTile, kCount - begin));
}

bool check(const char* what, const std::int8_t* data,
           const std::function<int(std::size_t)>& expected) {
  const Tile wanted = tile(expected);
  for (std::size_t begin = 0; begin < kCount; begin += kTile)
    if (std::memcmp(data + begin, wanted.data(), std::min(kTile, kCount - begin)) != 0) {
      std::fputs(hvd::formatted("rank {}: {}: wrong between elements {} and {}\n", hvd::rank(),
                                what, begin, begin + kTile)
                     .c_str(),
                 stdout);
      return false;
    }
  if (hvd::rank() == 0) std::fputs(hvd::formatted("PASS  {}\n", what).c_str(), stdout);
  return true;
}

int sum_of(std::size_t i) {
  int sum = 0;
  for (int rank = 0; rank < hvd::size(); ++rank) sum += value(i, rank);
  return sum;
}
int last_of(std::size_t i) { return value(i, hvd::size() - 1); }

}  // namespace

int main() {
  hvd::init();
  const hvd::AllreduceOptions sum{.name = "huge", .op = hvd::ReduceOp::Sum};
  std::int64_t available = available_bytes();
  hvd::allreduce({&available, hvd::DataType::Int64, {}, {}},
                 {&available, hvd::DataType::Int64, {}, {}}, {.op = hvd::ReduceOp::Min});
  const std::int64_t needed = 3 * static_cast<std::int64_t>(kCount) * hvd::local_size();
  if (available < needed) {
    if (hvd::rank() == 0)
      std::fputs(hvd::formatted("SKIP: {} MiB of memory are needed and {} MiB are free\n",
                                needed >> 20, available >> 20)
                     .c_str(),
                 stdout);
    hvd::shutdown();
    return 77;
  }
  bool good = true;
  {
    std::vector<std::int8_t> ordinary(kCount);
    const hvd::Buffer buffer{
        ordinary.data(), hvd::DataType::Int8, {static_cast<std::int64_t>(kCount)}, {}};
    fill(ordinary.data());
    hvd::allreduce(buffer, buffer, sum);
    good = check("allreduce, ordinary memory", ordinary.data(), sum_of);
    fill(ordinary.data());
    hvd::broadcast(buffer, {.name = "huge", .root_rank = hvd::size() - 1});
    good = check("broadcast, ordinary memory", ordinary.data(), last_of) && good;
  }
  if (const auto shared = hvd::allocate_shared(kCount)) {
    auto* data = static_cast<std::int8_t*>(shared.get());
    fill(data);
    hvd::allreduce({data, hvd::DataType::Int8, {static_cast<std::int64_t>(kCount)}, {}},
                   {data, hvd::DataType::Int8, {static_cast<std::int64_t>(kCount)}, {}}, sum);
    good = check("allreduce, in the arena", data, sum_of) && good;
  }
  hvd::shutdown();
  return good ? 0 : 1;
}
