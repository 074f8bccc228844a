/// Arenas that are full: what promises memory gives none, and every operation works on copies,
/// within a host and across hosts.

#include <doctest/doctest.h>

#include <vector>

#include "hvd/hvd.h"
#include "tests/support/mpi_cases.h"

namespace hvd::test {
namespace {

constexpr std::size_t kRows = 700'000;  // 2.7 MiB of floats

Buffer floats(std::vector<float>& values) {
  return {values.data(), DataType::Float32, {static_cast<std::int64_t>(values.size())}, {}};
}

float value_of(int rank, std::size_t element) {
  return static_cast<float>(rank + 1) * static_cast<float>(element % 1000 + 1);
}

std::vector<float> values_of(int rank, std::size_t count = kRows) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = value_of(rank, i);
  return values;
}

float sum_of_ranks() { return static_cast<float>(size() * (size() + 1)) / 2; }

bool holds(const Gathered& gathered, const std::function<float(std::size_t)>& expected) {
  const auto* const found = reinterpret_cast<const float*>(gathered.data.data());
  for (std::size_t i = 0; i < gathered.data.size() / sizeof(float); ++i)
    if (found[i] != expected(i)) return false;
  return true;
}

void use_everything() {
  auto values = values_of(rank());
  allreduce(floats(values), floats(values), {.name = "a", .op = ReduceOp::Sum});
  bool right = true;
  for (std::size_t i = 0; i < kRows; ++i)
    right = right && values[i] == sum_of_ranks() * value_of(0, i);
  CHECK(right);

  values = values_of(rank());
  broadcast(floats(values), {.name = "b", .root_rank = size() - 1});
  CHECK(values == values_of(size() - 1));

  values = values_of(rank());
  const auto gathered = allgather(floats(values), {.name = "g"});
  CHECK(gathered.data.size() == kRows * sizeof(float) * static_cast<std::size_t>(size()));
  CHECK(holds(gathered,
              [](std::size_t i) { return value_of(static_cast<int>(i / kRows), i % kRows); }));

  const auto ranks = static_cast<std::size_t>(size());
  const std::size_t each = kRows / ranks;
  values = values_of(rank(), each * ranks);
  const auto exchanged = alltoall(floats(values), {.name = "x"});
  CHECK(holds({exchanged.data, exchanged.shape}, [&](std::size_t i) {
    return value_of(static_cast<int>(i / each), static_cast<std::size_t>(rank()) * each + i % each);
  }));

  const auto scattered = reducescatter(floats(values), {.name = "s", .op = ReduceOp::Sum});
  CHECK(holds(scattered, [&](std::size_t i) {
    return sum_of_ranks() * value_of(0, static_cast<std::size_t>(rank()) * each + i);
  }));

  values = values_of(0);  // the same on all: an Adasum of parallel vectors is their mean
  allreduce(floats(values), floats(values), {.name = "ad", .op = ReduceOp::Adasum});
  CHECK(values[kRows / 2] == doctest::Approx(value_of(0, kRows / 2)).epsilon(1e-4));

  for (int again = 0; again < 6; ++again) {  // small operations that come back
    std::vector<float> few(16, static_cast<float>(rank() + 1));
    allreduce(floats(few), floats(few), {.name = "few", .op = ReduceOp::Sum});
    CHECK(few == std::vector<float>(16, sum_of_ranks()));
  }
}

}  // namespace

TEST_CASE("large tensors of ordinary memory, in every way that ranks of a host copy them") {
  for (const DirectCopies way : {DirectCopies::On, DirectCopies::Relayed, DirectCopies::Off}) {
    CAPTURE(static_cast<int>(way));
    Config config;
    config.direct_copies = way;
    init(config);
    for (int again = 0; again < 3; ++again) use_everything();
    // Parts of very different sizes: nothing for the first rank, most for the last.
    std::vector<std::int64_t> splits(static_cast<std::size_t>(size()));
    for (std::size_t to = 1; to < splits.size(); ++to)
      splits[to] = static_cast<std::int64_t>(to) * 100'003;
    auto values = values_of(rank());
    const auto exchanged = alltoall(floats(values), {.name = "uneven", .splits = splits});
    const auto part = static_cast<std::size_t>(splits[static_cast<std::size_t>(rank())]);
    const auto before =
        part == 0 ? 0 : static_cast<std::size_t>(rank() * (rank() - 1) / 2) * 100'003;
    CHECK(exchanged.data.size() == part * sizeof(float) * static_cast<std::size_t>(size()));
    CHECK(holds({exchanged.data, exchanged.shape}, [&](std::size_t i) {
      return value_of(static_cast<int>(i / part), before + i % part);
    }));
    // Rows of each rank's own number, some of one piece and some of none.
    auto rows = values_of(rank(), static_cast<std::size_t>(rank()) * 200'001);
    const auto gathered = allgather(floats(rows), {.name = "unequal"});
    std::size_t at = 0;
    bool right = true;
    const auto* const found = reinterpret_cast<const float*>(gathered.data.data());
    for (int from = 0; from < size(); ++from)
      for (std::size_t i = 0; i < static_cast<std::size_t>(from) * 200'001; ++i)
        right = right && found[at++] == value_of(from, i);
    CHECK(right);
    CHECK(gathered.data.size() == at * sizeof(float));
    shutdown();
  }
}

TEST_CASE("a full arena: allocate_shared gives null, and every operation makes copies") {
  for (const SharedMemory shared : {SharedMemory::Auto, SharedMemory::Off}) {
    Config config;
    config.arena_bytes = 1 << 20;
    config.shared_memory = shared;
    init(config);
    const bool shares = engine()->topology().domain_ranks.size() > 1 || size() == 1;
    std::vector<std::shared_ptr<void>> taken;
    while (auto block = allocate_shared(16 << 10)) taken.push_back(std::move(block));
    CHECK((taken.size() > 20) == shares);
    use_everything();
    CHECK(allocate_shared(2 << 20) == nullptr);
    taken.clear();
    use_everything();
    CHECK((allocate_shared(16 << 10) != nullptr) == shares);
    shutdown();
  }
}

TEST_CASE("a full arena: operations across domains of several ranks" * doctest::timeout(280)) {
  on_all_layouts([](MpiWorld& world) {
    std::vector<std::byte*> taken;
    for (std::size_t bytes = std::size_t{1} << 30; bytes >= 64; bytes /= 2)
      while (std::byte* const block = world.arena().try_allocate(bytes)) taken.push_back(block);
    const auto inputs = patterns(everyone(), 300'001, DataType::Float32, 11);
    const Bytes& mine = inputs[static_cast<std::size_t>(mpi_rank())];

    Bytes values = mine;
    run(world.engine(), reduction_of("a", values.data(), values.data(), 300'001, {}));
    const bool reduced_right = values == reduced(world.topology(), everyone(), inputs, {});
    CHECK(reduced_right);

    values = mine;
    auto broadcast = submission_of(OpKind::Broadcast, "b", values.data(), values.data(), 300'001,
                                   DataType::Float32);
    broadcast.root = mpi_size() - 1;
    run(world.engine(), std::move(broadcast));
    const bool broadcast_right = values == inputs.back();
    CHECK(broadcast_right);

    Bytes whole;
    for (const Bytes& input : inputs) whole.insert(whole.end(), input.begin(), input.end());
    Bytes output;
    auto gather =
        submission_of(OpKind::Allgather, "g", mine.data(), nullptr, 300'001, DataType::Float32);
    gather.allocate = [&output](std::size_t /*index*/, std::int64_t rows) {
      output.assign(static_cast<std::size_t>(rows) * 4, std::byte{});
      return static_cast<void*>(output.data());
    };
    run(world.engine(), std::move(gather));
    const bool gathered_right = output == whole;
    CHECK(gathered_right);
    for (std::byte* const block : taken) world.arena().free(block);
  });
}

}  // namespace hvd::test
