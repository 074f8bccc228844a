// Data loaders that are read ahead: the same batches in the same order, whatever is done in the
// middle.
#include <atomic>
#include <map>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "tests/torch_bindings/support.h"

namespace prefetch_test {
namespace {

using namespace hvd::test;
using hvd::ElasticSampler;
using hvd::prefetch_to_device;
using Items = std::vector<std::int64_t>;
const at::Device kCpu = torch::kCPU;

/// Item i is i; reading item `bad` throws.
struct Numbers : torch::data::datasets::Dataset<Numbers> {
  explicit Numbers(std::size_t items, std::size_t bad = 1000000) : items_(items), bad_(bad) {}
  torch::data::Example<> get(std::size_t index) override {
    if (index == bad_) throw std::runtime_error("item " + std::to_string(index) + " is broken");
    return {torch::full({1}, static_cast<std::int64_t>(index)),
            torch::full({1}, -static_cast<std::int64_t>(index))};
  }
  std::optional<std::size_t> size() const override { return items_; }

 private:
  std::size_t items_, bad_;
};
auto numbers(std::size_t items, std::size_t bad = 1000000) {
  return Numbers(items, bad).map(torch::data::transforms::Stack<>());
}
auto in_order(std::size_t items, std::size_t batch, std::size_t workers = 0,
              std::size_t bad = 1000000) {
  return torch::data::make_data_loader(numbers(items, bad),
                                       torch::data::samplers::SequentialSampler(items),
                                       torch::data::DataLoaderOptions(batch).workers(workers));
}
template <class Batches>
Items items_of(Batches& batches) {
  Items all;
  for (auto& batch : batches)
    for (std::int64_t i = 0; i < batch.data.size(0); ++i) {
      all.push_back(batch.data[i].template item<std::int64_t>());
      CHECK(batch.target[i].template item<std::int64_t>() == -all.back());
    }
  return all;
}

/// A loader of the user's own, which counts what is read of it.
struct Counting {
  using Batch = std::tuple<at::Tensor, std::string>;
  struct Iterator {
    Counting* from;
    std::int64_t at;
    Batch operator*() const { return {torch::full({}, at), "batch " + std::to_string(at)}; }
    Iterator& operator++() {
      ++at;
      if (at == from->bad) throw std::out_of_range("nothing after " + std::to_string(at - 1));
      ++from->read;
      return *this;
    }
    bool operator==(const Iterator& other) const { return at == other.at; }
  };
  Iterator begin() { return {this, 0}; }
  Iterator end() { return {this, batches}; }
  std::int64_t batches = 10, bad = -1;
  std::atomic<int> read = 0;
};

TEST_CASE("a loader that is read ahead gives the same batches in the same order, in every epoch") {
  for (const std::size_t workers : {0, 2}) {
    for (const std::size_t depth : {1, 2, 50}) {
      CAPTURE(workers);
      CAPTURE(depth);
      const auto plain = in_order(23, 4);
      const Items expected = items_of(*plain);
      auto loader = in_order(23, 4, workers);
      auto batches = prefetch_to_device(loader, kCpu, depth);
      for (int epoch = 0; epoch < 3; ++epoch) CHECK(items_of(batches) == expected);
      auto owning = prefetch_to_device(in_order(23, 4, workers), kCpu, depth);
      CHECK(items_of(owning) == expected);
    }
  }
  auto none = prefetch_to_device(in_order(0, 4), kCpu);
  CHECK(items_of(none).empty());
}

TEST_CASE("batches that are no Example travel as they are, and what is no tensor in them stays") {
  Counting loader;
  auto batches = prefetch_to_device(loader, kCpu);
  std::int64_t next = 0;
  for (const auto& [tensor, text] : batches) {
    CHECK(tensor.item<std::int64_t>() == next);
    CHECK(text == "batch " + std::to_string(next++));
  }
  CHECK(next == 10);
  std::vector<std::map<std::string, at::Tensor>> list{{{"x", torch::ones({2})}},
                                                      {{"x", torch::zeros({2})}}};
  auto maps = prefetch_to_device(list, kCpu);
  int seen = 0;
  for (const auto& batch : maps)
    CHECK(same(batch.at("x"), list[static_cast<std::size_t>(seen++)].at("x")));
  CHECK(seen == 2);
}

TEST_CASE(
    "what a loader throws comes in the place of its batch, after those before it; then the epoch "
    "is over, and another may begin") {
  for (const std::size_t workers : {0, 2}) {
    auto loader = in_order(23, 4, workers, 9);
    auto batches = prefetch_to_device(loader, kCpu, 3);
    Items seen;
    const std::string text = error_of<std::runtime_error>([&] {
      for (auto& batch : batches) seen.push_back(batch.data[0].item<std::int64_t>());
    });
    CHECK(contains(text, "item 9 is broken"));
    CHECK(seen == Items{0, 4});
  }
  Counting own{.bad = 3};
  auto batches = prefetch_to_device(own, kCpu);
  for (int epoch = 0; epoch < 2; ++epoch) {
    int seen = 0;
    auto batch = batches.begin();
    CHECK(error_of<std::out_of_range>([&] {
            for (; batch != batches.end(); ++batch) ++seen;
          }) == "nothing after 2");
    CHECK(seen == 3);
  }
}

TEST_CASE(
    "no more is read ahead than asked for, and a loop that is left in the middle ends its reader") {
  for (const int depth : {1, 3}) {
    Counting loader{.batches = 1000};
    auto batches = prefetch_to_device(loader, kCpu, static_cast<std::size_t>(depth));
    int used = 0;
    for (const auto& batch : batches) {
      static_cast<void>(batch);
      if (++used == 5) break;
    }
    const int read = loader.read;  // the reader has ended with the loop
    CHECK(read <= 5 + depth);
    CHECK(loader.read == read);
    int again = 0;
    for (const auto& [tensor, text] : batches) CHECK(tensor.item<std::int64_t>() == again++);
    CHECK(again == 1000);
  }
}

TEST_CASE(
    "a second begin() starts anew, and ends the epoch before; a wrapper may end before its "
    "iterators, and they before it") {
  Counting loader;
  auto batches = prefetch_to_device(loader, kCpu);
  auto first = batches.begin();
  CHECK(std::get<1>(*first) == "batch 0");
  ++first;
  auto second = batches.begin();
  CHECK(std::get<1>(*second) == "batch 0");
  ++first;
  CHECK(first == batches.end());
  CHECK(std::get<1>(*++second) == "batch 1");
  std::optional<hvd::PrefetchedLoader<Counting>> gone(prefetch_to_device(loader, kCpu));
  auto left = gone->begin();
  gone.reset();
  CHECK(std::get<1>(*left) == "batch 0");
  CHECK(std::get<1>(*++left) == "batch 1");
  { auto unused = prefetch_to_device(loader, kCpu).begin(); }  // nothing was ever asked for
}

TEST_CASE(
    "what was read ahead and not used does not count as used: an ElasticSampler deals it again") {
  const std::size_t items = 20 * static_cast<std::size_t>(hvd::size());
  ElasticSampler sampler(items, true, 3);
  auto loader = torch::data::make_data_loader(numbers(items), sampler, 2);
  auto batches = prefetch_to_device(loader, kCpu, 4);
  Items used;
  for (auto& batch : batches) {
    for (std::int64_t i = 0; i < batch.data.size(0); ++i)
      used.push_back(batch.data[i].item<std::int64_t>());
    sampler.record_batch(static_cast<std::size_t>(batch.data.size(0)));
    if (used.size() == 6) break;
  }
  CHECK(sampler.processed() == 6 * static_cast<std::size_t>(hvd::size()));
  const Items rest = items_of(batches);  // of the same epoch
  CHECK(rest.size() == 14);
  used.insert(used.end(), rest.begin(), rest.end());
  std::map<std::int64_t, int> seen;
  for (const auto& part : hvd::allgather_object(used))
    for (const auto item : part) ++seen[item];
  CHECK(seen.size() == items);
  for (const auto& [item, times] : seen) CHECK(times == 1);
  sampler.set_epoch(1);
  CHECK(items_of(batches).size() == 20);
}

TEST_CASE("prefetch_to_device refuses a depth of 0 and a device that is not there, at the call") {
  Counting loader;
  CHECK(contains(error_of<hvd::InvalidArgument>([&] { prefetch_to_device(loader, kCpu, 0); }),
                 "depth of 0"));
  CHECK(contains(error_of<hvd::InvalidArgument>(
                     [&] { prefetch_to_device(loader, at::Device(at::kCUDA, 77)); }),
                 "there is no cuda:77"));
}

}  // namespace

}  // namespace prefetch_test
