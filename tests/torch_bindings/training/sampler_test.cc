// ElasticSampler, and the helpers of distributed evaluation.
#include <algorithm>
#include <cmath>
#include <sstream>

#include "tests/torch_bindings/support.h"

namespace sampler_test {
namespace {

using namespace hvd::test;
using hvd::ElasticSampler;
using Items = std::vector<std::size_t>;
const hvd::ElasticSamplerOptions kEachOnce{.shares = hvd::Shares::Uneven};

/// Of all ranks of the set together.
Items gathered(const Items& own, const hvd::ProcessSet& set = {}) {
  Items all;
  for (const auto& part : hvd::allgather_object(own, set))
    all.insert(all.end(), part.begin(), part.end());
  std::sort(all.begin(), all.end());
  return all;
}
Items first(std::size_t count) {
  Items items(count);
  for (std::size_t i = 0; i < count; ++i) items[i] = i;
  return items;
}
Items take_all(ElasticSampler& sampler, std::size_t batch = 3) {
  Items own;
  while (const auto items = sampler.next(batch))
    own.insert(own.end(), items->begin(), items->end());
  return own;
}
std::string saved(const ElasticSampler& sampler) {
  std::ostringstream out;
  torch::save(sampler, out);
  return out.str();
}
void load(ElasticSampler& sampler, const std::string& text) {
  std::istringstream in(text);
  torch::load(sampler, in);
}

TEST_CASE("elastic sampler: each item once, in an order of its own for each epoch and seed") {
  for (const std::size_t items : {0, 1, 2, 3, 50, 53}) {
    for (const bool shuffle : {false, true}) {
      CAPTURE(items);
      ElasticSampler sampler(items, shuffle, 5, kEachOnce);
      const Items own = take_all(sampler);
      CHECK(own.size() == sampler.size());
      CHECK(gathered(own) == first(items));
      CHECK(sampler.batches(3) == (items + 3 * static_cast<std::size_t>(hvd::size()) - 1) /
                                      (3 * static_cast<std::size_t>(hvd::size())));
    }
  }
  const auto order = [](std::uint64_t seed, std::size_t epoch) {
    ElasticSampler sampler(200, true, seed);
    sampler.set_epoch(epoch);
    return take_all(sampler);
  };
  CHECK(order(1, 2) == order(1, 2));
  CHECK(order(1, 2) != order(1, 3));
  CHECK(order(1, 2) != order(2, 2));
  ElasticSampler in_order(10, false);
  CHECK(in_order.next(1)->front() == static_cast<std::size_t>(hvd::rank()));
  if (hvd::size() == 1) {  // the same on every machine
    ElasticSampler ten(10, true, 42);
    CHECK(take_all(ten) == Items{2, 0, 4, 7, 8, 3, 5, 1, 9, 6});
  }
}

TEST_CASE("elastic sampler: what is left is dealt again, also to other ranks, each item once") {
  const std::size_t items = 47;
  ElasticSampler sampler(items, true, 3, kEachOnce), in_loader = sampler;  // a loader has a copy
  sampler.set_epoch(4);
  Items used;
  for (int step = 0; step < 3; ++step) {
    const auto batch = in_loader.next(2);
    if (step == 2) break;  // taken, but not recorded: lost with its rank
    used.insert(used.end(), batch->begin(), batch->end());
    sampler.record_batch(batch->size());
  }
  CHECK(sampler.processed() == 4 * static_cast<std::size_t>(hvd::size()));
  const std::string state = hvd::broadcast_object(saved(sampler), 0);
  const Items before = gathered(used);
  CHECK(before.size() == sampler.processed());

  sampler.reset();  // the same ranks
  Items rest = gathered(take_all(in_loader));
  rest.insert(rest.end(), before.begin(), before.end());
  std::sort(rest.begin(), rest.end());
  CHECK(rest == first(items));

  std::vector<int> survivors;  // all but the last rank
  for (int rank = 0; rank < std::max(1, hvd::size() - 1); ++rank) survivors.push_back(rank);
  const auto fewer = hvd::add_process_set(survivors);
  if (fewer.included()) {
    ElasticSampler again(items, true, 3, {.shares = hvd::Shares::Uneven, .process_set = fewer});
    load(again, state);
    CHECK(again.epoch() == 4);
    CHECK(again.processed() == before.size());
    // Twice over: some of them, and then the rest.
    Items later = *again.next(5);
    again.record_batch(5);
    again.reset();
    const Items last_ones = take_all(again);
    later.insert(later.end(), last_ones.begin(), last_ones.end());
    again.record_batch(last_ones.size());
    CHECK(again.processed() == items);
    Items all = gathered(later, fewer);
    all.insert(all.end(), before.begin(), before.end());
    std::sort(all.begin(), all.end());
    CHECK(all == first(items));
    again.reset();
    CHECK(!again.next(1));
    again.set_epoch(5);
    CHECK(gathered(take_all(again), fewer) == first(items));
    again.record_batch(2);
    again.reset(10);
    CHECK(gathered(take_all(again), fewer) == first(10));
  }
  hvd::remove_process_set(fewer);
  ElasticSampler other(items + 1, true, 3);
  CHECK(contains(error_of<hvd::InvalidArgument>([&] { load(other, state); }), "47 items"));
  ElasticSampler of_other_seed(items, true, 4);
  CHECK(contains(error_of<hvd::InvalidArgument>([&] { load(of_other_seed, state); }), "seed 3"));
}

struct Numbers : torch::data::datasets::Dataset<Numbers> {
  torch::data::Example<> get(std::size_t index) override {
    return {torch::full({1}, static_cast<double>(index), torch::kFloat64), torch::zeros({1})};
  }
  std::optional<std::size_t> size() const override { return 29; }
};

TEST_CASE("elastic sampler: in a data loader") {
  ElasticSampler sampler(29, true, 1, kEachOnce);
  auto loader = torch::data::make_data_loader(Numbers().map(torch::data::transforms::Stack<>()),
                                              sampler, torch::data::DataLoaderOptions(4));
  Items own;
  std::size_t batches = 0;
  for (const auto& batch : *loader) {
    for (std::int64_t i = 0; i < batch.data.size(0); ++i)
      own.push_back(static_cast<std::size_t>(batch.data[i].item<double>()));
    sampler.record_batch(static_cast<std::size_t>(batch.data.size(0)));
    ++batches;
  }
  CHECK(gathered(own) == first(29));
  CHECK(sampler.processed() == 29);
  CHECK(batches <= sampler.batches(4) + 1);
}

// -------------------------------------------------------------------------------------- evaluation

TEST_CASE("evaluation: the ranks together find what one process finds, whatever their shares") {
  const std::int64_t items = 53;
  const at::Tensor scores =
      torch::randn({items, 12}, at::detail::createCPUGenerator(4), torch::kFloat64);
  const at::Tensor labels = data({items}, torch::kInt64, 0).abs();
  hvd::EvaluationTally alone;
  alone.add(scores, labels);
  const auto share = hvd::evaluation_share(53);
  CHECK(gathered(share) == first(53));
  hvd::EvaluationTally tally;
  for (std::size_t begin = 0; begin < share.size(); begin += 4) {  // in small batches
    std::vector<std::int64_t> batch(
        share.begin() + static_cast<std::ptrdiff_t>(begin),
        share.begin() + static_cast<std::ptrdiff_t>(std::min(begin + 4, share.size())));
    const at::Tensor rows = torch::tensor(batch);
    tally.add(scores.index_select(0, rows), labels.index_select(0, rows));
  }
  const auto together = tally.average();
  CHECK(together.samples == items);
  CHECK(std::abs(together.loss - alone.loss / 53) < 1e-12);
  CHECK(together.top1 == alone.top1 / 53);
  CHECK(together.top5 == alone.top5 / 53);
  CHECK(std::abs(alone.loss / 53 -
                 torch::nn::functional::cross_entropy(scores, labels).item<double>()) < 1e-12);
  CHECK(alone.top1 == scores.argmax(1).eq(labels).sum().item<double>());
  CHECK(hvd::EvaluationTally().average().samples == 0);
  CHECK_THROWS_AS(tally.add(scores, labels.narrow(0, 0, 3)), hvd::InvalidArgument);
}

TEST_CASE("evaluation: metrics averaged by count; predictions gathered, each sample once") {
  const int ranks = hvd::size();
  double sum = 0, count = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    sum += rank * (0.5 + rank);
    count += rank;
  }
  // Rank 0 has no samples, and nonsense for a mean.
  const auto means = hvd::average_metrics(
      {{"loss", hvd::rank() == 0 ? NAN : 0.5 + hvd::rank()}, {"one", 1}}, hvd::rank());
  CHECK(std::abs(means.at("loss") - (count > 0 ? sum / count : 0)) < 1e-12);
  CHECK(means.at("one") == (count > 0 ? 1 : 0));
  if (ranks > 1) {
    CHECK_THROWS_AS(hvd::average_metrics({{last() ? "other" : "loss", 1}}, 1), hvd::Mismatch);
    CHECK(hvd::average_metrics({{"loss", 2}}, 1).at("loss") == 2);
  }
  // 11 samples, dealt as a sampler that pads deals them: some come twice.
  const std::int64_t items = 11;
  std::vector<std::int64_t> own;
  for (std::int64_t i = 0; i < (items + ranks - 1) / ranks; ++i)
    own.push_back((i * ranks + hvd::rank()) % items);
  const at::Tensor indices = torch::tensor(own);
  const at::Tensor predictions =
      torch::stack({indices * 10, torch::full_like(indices, hvd::rank())}, 1);
  const at::Tensor all = hvd::gather_predictions(predictions, indices, items);
  const at::Tensor sample = torch::arange(items), lowest = sample.remainder(ranks);
  CHECK(torch::equal(all, torch::stack({sample * 10, lowest}, 1)));
  CHECK(contains(error_of<hvd::InvalidArgument>(
                     [&] { hvd::gather_predictions(predictions, indices, items + 1); }),
                 "sample 11"));
  CHECK(contains(error_of<hvd::InvalidArgument>(
                     [&] { hvd::gather_predictions(predictions, indices, items - 1); }),
                 "sample 10 of 10"));
  CHECK_THROWS_AS(hvd::gather_predictions(predictions, indices.to(torch::kInt), items),
                  hvd::InvalidArgument);
}

}  // namespace

}  // namespace sampler_test
