// What happens if I ... : samplers in real data loaders, loss scaling.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "tests/torch_bindings/support.h"

namespace {

using namespace hvd::test;
using hvd::Compression;
using hvd::DistributedOptimizer;
using hvd::ElasticSampler;
using hvd::GradScaler;
using hvd::Shares;
using torch::optim::SGD;
using torch::optim::SGDOptions;
using Items = std::vector<std::size_t>;

// ---------------------------------------------------------------------------------------- samplers

struct Numbers : torch::data::datasets::Dataset<Numbers> {
  explicit Numbers(std::size_t items) : items_(items) {}
  torch::data::Example<> get(std::size_t index) override {
    return {torch::full({1}, static_cast<double>(index), torch::kDouble),
            torch::zeros({1}, torch::kDouble)};
  }
  std::optional<std::size_t> size() const override { return items_; }

 private:
  std::size_t items_;
};
auto numbers(std::size_t items) { return Numbers(items).map(torch::data::transforms::Stack<>()); }

template <class Loader>
Items items_of(Loader& loader) {
  Items own;
  for (const auto& batch : loader)
    for (std::int64_t i = 0; i < batch.data.size(0); ++i)
      own.push_back(static_cast<std::size_t>(batch.data[i].template item<double>()));
  return own;
}
Items take_all(ElasticSampler& sampler, std::size_t batch = 3) {
  Items own;
  while (const auto items = sampler.next(batch))
    own.insert(own.end(), items->begin(), items->end());
  return own;
}
/// How often each item came, on all ranks together.
std::map<std::size_t, int> counts(const Items& own, const hvd::ProcessSet& set = {}) {
  std::map<std::size_t, int> all;
  for (const auto& part : hvd::allgather_object(own, set))
    for (const auto item : part) ++all[item];
  return all;
}
bool same_number_on_all(const Items& own, const hvd::ProcessSet& set = {}) {
  const auto all = hvd::allgather_object(own.size(), set);
  return std::all_of(all.begin(), all.end(), [&](auto size) { return size == own.size(); });
}

TEST_CASE(
    "what happens if I train on items that the ranks cannot share evenly: all get as many; some "
    "come twice, or are left out") {
  const auto ranks = static_cast<std::size_t>(hvd::size());
  for (const std::size_t items : {0, 1, 2, 3, 5, 50, 53}) {
    for (const bool shuffle : {false, true}) {
      CAPTURE(items);
      ElasticSampler padded(items, shuffle, 5);
      const std::size_t each = (items + ranks - 1) / ranks;
      const Items own = take_all(padded);
      CHECK(own.size() == each);
      CHECK(padded.size() == each);
      CHECK(padded.batches(3) == (each + 2) / 3);
      const auto all = counts(own);
      CHECK(all.size() == items);
      for (const auto& [item, times] : all)
        CHECK(times <= (items < ranks ? static_cast<int>(each * ranks) : 2));

      ElasticSampler dropping(items, shuffle, 5, {.shares = Shares::DropLast});
      const Items fewer = take_all(dropping);
      CHECK(fewer.size() == items / ranks);
      CHECK(dropping.size() == items / ranks);
      CHECK(dropping.batches(2) == (items / ranks + 1) / 2);
      CHECK(counts(fewer).size() == items / ranks * ranks);  // none twice

      ElasticSampler uneven(items, shuffle, 5, {.shares = Shares::Uneven});
      const Items once = take_all(uneven);
      CHECK(once.size() == uneven.size());
      const auto exactly = counts(once);
      CHECK(exactly.size() == items);
      for (const auto& [item, times] : exactly) CHECK(times == 1);
    }
  }
}

TEST_CASE(
    "what happens if I train on a data set that divides by nothing, in batches that divide by "
    "nothing: every epoch ends on all ranks") {
  auto net = small_model();
  SGD sgd(net->parameters(), SGDOptions(0.1));
  DistributedOptimizer optimizer(sgd, net->named_parameters());
  const std::size_t items = 4 * static_cast<std::size_t>(hvd::size()) + 1;
  ElasticSampler sampler(items);
  const auto loader = torch::data::make_data_loader(numbers(items), sampler,
                                                    torch::data::DataLoaderOptions(3).workers(2));
  for (std::size_t epoch = 0; epoch < 3; ++epoch) {
    sampler.set_epoch(epoch);
    std::size_t steps = 0;
    for (const auto& batch : *loader) {
      optimizer.zero_grad();
      net->forward(batch.data.expand({-1, 6})).pow(2).mean().backward();
      optimizer.step();
      sampler.record_batch(static_cast<std::size_t>(batch.data.size(0)));
      ++steps;
    }
    CHECK(steps == 2);
    CHECK(sampler.processed() == items);
  }
  CHECK(same_on_all_ranks(flat(net)));
}

TEST_CASE(
    "what happens if ranks leave in the middle of an epoch: what is left is dealt evenly to those "
    "that stay, and none is missed") {
  for (const Shares shares : {Shares::Pad, Shares::DropLast}) {
    const std::size_t items = 47;
    ElasticSampler sampler(items, true, 3, {.shares = shares});
    sampler.set_epoch(4);
    const Items used = *sampler.next(3);
    sampler.record_batch(3);
    CHECK(sampler.processed() == 3 * static_cast<std::size_t>(hvd::size()));
    std::ostringstream out;
    torch::save(sampler, out);
    auto all = counts(used);

    std::vector<int> staying;
    for (int rank = 0; rank < std::max(1, hvd::size() - 1); ++rank) staying.push_back(rank);
    const auto fewer = hvd::add_process_set(staying);
    if (fewer.included()) {
      ElasticSampler again(items, true, 3, {.shares = shares, .process_set = fewer});
      std::istringstream in(out.str());
      torch::load(again, in);
      const Items rest = take_all(again);
      CHECK(again.epoch() == 4);
      CHECK(rest.size() == again.size());
      CHECK(same_number_on_all(rest, fewer));
      for (const auto& [item, times] : counts(rest, fewer)) {
        CHECK(all[item] == 0);  // none of those that were used
        all[item] += times;
      }
      std::size_t seen = 0;
      for (const auto& [item, times] : all) seen += times > 0 ? 1 : 0;
      const std::size_t left = items - used.size() * static_cast<std::size_t>(hvd::size());
      CHECK(seen == (shares == Shares::Pad ? items : items - left % staying.size()));
      again.record_batch(rest.size());
      CHECK(again.processed() == items);
      again.reset();
      CHECK(!again.next(1));
    }
    hvd::remove_process_set(fewer);
  }
}

TEST_CASE(
    "what happens if I call set_epoch on the sampler that I gave to make_data_loader: the loader's "
    "copy has that epoch's order") {
  const std::size_t items = 37;
  for (const std::size_t workers : {0, 2}) {
    ElasticSampler sampler(items);
    const auto loader = torch::data::make_data_loader(
        numbers(items), sampler, torch::data::DataLoaderOptions(4).workers(workers));
    std::set<Items> orders;
    for (std::size_t epoch = 0; epoch < 4; ++epoch) {
      sampler.set_epoch(epoch);
      const Items own = items_of(*loader);
      CHECK(counts(own).size() == items);
      CHECK(same_number_on_all(own));
      orders.insert(own);
    }
    CHECK(orders.size() == 4);
    sampler.set_epoch(2);
    CHECK(orders.contains(items_of(*loader)));  // an epoch's order is its own, whenever it comes
    CHECK(orders.contains(items_of(*loader)));  // and without set_epoch it stays
  }
}

TEST_CASE(
    "what happens if I use LibTorch's DistributedRandomSampler: set_epoch counts for loaders that "
    "are made after it") {
  const std::size_t items = 37;
  const auto dataset = numbers(items);
  torch::data::samplers::DistributedRandomSampler sampler(
      items, static_cast<std::size_t>(hvd::size()), static_cast<std::size_t>(hvd::rank()));
  std::set<Items> orders;
  for (std::size_t epoch = 0; epoch < 4; ++epoch) {
    sampler.set_epoch(epoch);
    const auto loader = torch::data::make_data_loader(dataset, sampler, 4);  // it copies both
    const Items own = items_of(*loader);
    CHECK(counts(own).size() == items);
    CHECK(same_number_on_all(own));
    orders.insert(own);
    sampler.set_epoch(epoch + 100);
    CHECK(items_of(*loader) == own);  // too late for this one
  }
  CHECK(orders.size() == 4);
}

TEST_CASE(
    "what happens if I begin a second epoch without set_epoch: recorded items do not come again") {
  ElasticSampler sampler(10);
  const auto loader = torch::data::make_data_loader(numbers(10), sampler, 2);
  sampler.record_batch(items_of(*loader).size());
  CHECK(items_of(*loader).empty());  // with a warning
  sampler.set_epoch(1);
  CHECK(counts(items_of(*loader)).size() == 10);
}

TEST_CASE("what happens if I evaluate through a loader: with uneven shares each item counts once") {
  const std::size_t items = 4 * static_cast<std::size_t>(hvd::size()) + 1;
  const ElasticSampler sampler(items, false, 0, {.shares = Shares::Uneven});
  const auto loader = torch::data::make_data_loader(numbers(items), sampler, 3);
  const Items own = items_of(*loader);
  CHECK(own.size() == (hvd::rank() == 0 ? 5 : 4));
  for (const auto& [item, times] : counts(own)) CHECK(times == 1);
}

TEST_CASE(
    "what happens if the ranks cannot share a batch evenly: with global_batch all make the same "
    "batches, and none loses an item") {
  const auto ranks = static_cast<std::size_t>(hvd::size());
  const auto rank = static_cast<std::size_t>(hvd::rank());
  for (const std::size_t batch : {4, 5, 7, 64}) {
    for (const std::size_t items : {0, 1, 3, 64, 130, 200}) {
      for (const Shares shares : {Shares::Pad, Shares::DropLast, Shares::Uneven}) {
        CAPTURE(batch);
        CAPTURE(items);
        ElasticSampler sampler(items, true, 5, {.shares = shares, .global_batch = batch});
        const std::size_t share = hvd::share_of_batch(static_cast<std::int64_t>(batch));
        std::vector<Items> batches;
        while (const auto next = sampler.next(share)) batches.push_back(*next);
        const std::size_t rest = items % batch;
        const std::size_t own_rest = shares == Shares::DropLast ? rest / ranks
                                     : shares == Shares::Pad
                                         ? std::min(share, (rest + ranks - 1) / ranks)
                                         : rest / ranks + (rank < rest % ranks ? 1 : 0);
        CHECK(batches.size() == items / batch + (own_rest > 0 ? 1 : 0));
        if (shares != Shares::Uneven) CHECK(sampler.batches(share) == batches.size());
        std::size_t own = 0;
        for (std::size_t b = 0; b < batches.size(); ++b) {
          CHECK(batches[b].size() == (b < items / batch ? share : own_rest));
          own += batches[b].size();
        }
        CHECK(sampler.size() == own);
        // The first batch of all ranks is the beginning of the order, each item once; so a rest can
        // be dealt to other ranks.
        if (items < batch) continue;
        sampler.set_epoch(0);
        const Items first = *sampler.next(share);
        sampler.record_batch(share);
        CHECK(sampler.processed() == batch);
        const auto together = counts(first);
        CHECK(together.size() == batch);
        sampler.reset();
        auto all = together;
        for (const auto& [item, times] : counts(take_all(sampler, share))) all[item] += times;
        if (shares != Shares::DropLast) CHECK(all.size() == items);
        sampler.record_batch(sampler.size());
        CHECK(sampler.processed() == items);
      }
    }
  }
  ElasticSampler sampler(64, true, 0, {.global_batch = 64});
  CHECK(contains(error_of<hvd::InvalidArgument>([&] { sampler.next(65); }), "share_of_batch(64)"));
  if (ranks > 1)
    CHECK(contains(error_of<hvd::InvalidArgument>(
                       [&] { ElasticSampler(9, true, 0, {.global_batch = ranks - 1}); }),
                   "cannot share"));
}

TEST_CASE(
    "what happens if I train with a global batch that the ranks cannot share evenly, and weights: "
    "as one process does") {
  const std::size_t items = 40, batch = 7;
  const auto loss = [](torch::nn::Sequential& net, const at::Tensor& x) {
    return net->forward(x.expand({-1, 6}) / 40).pow(2).mean();
  };
  auto net = small_model(), alone = small_model();
  SGD sgd(net->parameters(), SGDOptions(0.1).momentum(0.9)),
      reference(alone->parameters(), SGDOptions(0.1).momentum(0.9));
  DistributedOptimizer optimizer(sgd, net->named_parameters());
  ElasticSampler sampler(items, true, 3, {.shares = Shares::Uneven, .global_batch = batch});
  const auto loader = torch::data::make_data_loader(
      numbers(items), sampler, hvd::share_of_batch(static_cast<std::int64_t>(batch)));
  std::vector<at::Tensor> seen;
  for (const auto& rows : *loader) {
    optimizer.zero_grad();
    optimizer.set_weight(static_cast<double>(rows.data.size(0)));
    loss(net, rows.data).backward();
    optimizer.step();
    seen.push_back(hvd::allgather(rows.data));
  }
  CHECK(seen.size() == 6);  // the last one of 5 items
  for (const auto& rows : seen) {
    reference.zero_grad();
    loss(alone, rows).backward();
    reference.step();
  }
  CHECK(difference(flat(net), flat(alone)) < 1e-12);
}

TEST_CASE(
    "what happens if I ask for batches of 0 items: InvalidArgument, not an epoch without batches") {
  ElasticSampler sampler(10);
  CHECK(contains(error_of<hvd::InvalidArgument>([&] { sampler.next(0); }), "a batch of 0 items"));
  for (const std::size_t workers : {0, 1}) {
    const auto loader = torch::data::make_data_loader(
        numbers(10), sampler, torch::data::DataLoaderOptions(0).workers(workers));
    CHECK(
        contains(error_of<hvd::InvalidArgument>([&] { items_of(*loader); }), "a batch of 0 items"));
  }
  CHECK(take_all(sampler).size() == sampler.size());
}

// ------------------------------------------------------------------------------------ loss scaling

constexpr double kOverflow = std::numeric_limits<double>::infinity();

hvd::ProcessSet all_but_the_last() {
  std::vector<int> ranks;
  for (int rank = 0; rank < std::max(1, hvd::size() - 1); ++rank) ranks.push_back(rank);
  return hvd::add_process_set(ranks);
}

TEST_CASE(
    "what happens if I scale the loss of an optimizer on a process set: its ranks decide, the "
    "others need not be there") {
  const auto set = all_but_the_last();
  for (const bool ddp : {false, true}) {
    CAPTURE(ddp);
    if (set.included()) {
      auto net = small_model();
      auto alone = small_model();
      SGD sgd(net->parameters(), SGDOptions(0.1).momentum(0.9));
      SGD reference(alone->parameters(), SGDOptions(0.1).momentum(0.9));
      std::optional<DistributedOptimizer> wrapper;
      std::optional<hvd::DistributedDataParallel<torch::nn::SequentialImpl>> parallel;
      if (ddp) {
        parallel.emplace(net.ptr(), hvd::DistributedDataParallelOptions{.process_set = set});
      } else {
        wrapper.emplace(sgd, net->named_parameters(),
                        hvd::DistributedOptimizerOptions{.process_set = set});
      }
      torch::optim::Optimizer& optimizer =
          ddp ? static_cast<torch::optim::Optimizer&>(sgd) : *wrapper;
      GradScaler scaler({.init_scale = 64});
      for (int step = 0; step < 4; ++step) {
        const bool bad = step == 1;
        net->zero_grad();
        alone->zero_grad();
        if (wrapper) wrapper->zero_grad();
        const at::Tensor x = data({5, 6}, at::kDouble, hvd::rank(), step);
        const at::Tensor y = data({5, 3}, at::kDouble, hvd::rank(), step + 1);
        at::Tensor loss = torch::mse_loss(ddp ? parallel->forward(x) : net->forward(x), y);
        if (bad && hvd::rank() == 0) loss = loss * kOverflow;
        scaler.scale(loss).backward();
        scaler.step(optimizer);
        scaler.update();
        if (bad) continue;
        at::Tensor sum;
        for (const int rank : set.ranks())
          sum = sum.defined() ? sum + small_loss(alone, rank, step) : small_loss(alone, rank, step);
        (sum / set.size()).backward();
        reference.step();
      }
      CHECK(difference(flat(net), flat(alone)) < 1e-12);
      CHECK(scaler.get_scale() == 32);
    } else {
      // Trains something of its own, by itself.
      auto net = small_model();
      SGD sgd(net->parameters(), SGDOptions(0.1));
      GradScaler scaler({.init_scale = 8, .agree = false});
      scaler.scale(small_loss(net, hvd::rank(), 0)).backward();
      scaler.step(sgd);
      scaler.update();
      CHECK(scaler.get_scale() == 8);
    }
  }
  hvd::remove_process_set(set);
}

TEST_CASE(
    "what happens if one scaler serves optimizers on different process sets: the scales of all "
    "ranks stay one") {
  const auto set = all_but_the_last();
  for (const bool small_first : {true, false}) {
    CAPTURE(small_first);
    auto own = small_model();     // on the set
    auto common = small_model();  // on all ranks
    SGD own_sgd(own->parameters(), SGDOptions(0.1));
    SGD common_sgd(common->parameters(), SGDOptions(0.1));
    std::optional<DistributedOptimizer> of_set;
    if (set.included())
      of_set.emplace(own_sgd, own->named_parameters(),
                     hvd::DistributedOptimizerOptions{.process_set = set});
    DistributedOptimizer of_all(common_sgd, common->named_parameters());
    GradScaler scaler({.init_scale = 64});
    int steps_of_all = 0;
    for (int step = 0; step < 5; ++step) {
      if (of_set) of_set->zero_grad();
      of_all.zero_grad();
      at::Tensor loss = small_loss(common, hvd::rank(), step);
      if (of_set)
        loss = loss + small_loss(own, hvd::rank(), step) *
                          (step == 1 && hvd::rank() == 0 ? kOverflow : 1.0);
      // An infinite sum has finite gradients where its finite part comes from.
      scaler.scale(loss).backward();
      const at::Tensor before = flat(common);
      if (of_set && small_first) scaler.step(*of_set);
      scaler.step(of_all);
      if (of_set && !small_first) scaler.step(*of_set);
      scaler.update();
      if (!same(flat(common), before)) ++steps_of_all;
      CHECK(same_on_all_ranks(flat(common)));
      CHECK(flat(common).isfinite().all().item<bool>());
    }
    const bool parted = !small_first && hvd::size() > 1;
    CHECK(steps_of_all == (parted ? 4 : 5));
    CHECK(scaler.get_scale() == 32);
    if (of_set) CHECK(flat(own).isfinite().all().item<bool>());
    if (of_set) CHECK(!same(flat(own), flat(small_model())));
  }
  hvd::remove_process_set(set);
}

TEST_CASE(
    "what happens if one rank sets another scale: a step is left out with a warning, and all have "
    "the smallest") {
  for (const float other : {64.0F, std::nextafter(16.0F, 17.0F)}) {
    auto net = small_model();
    SGD sgd(net->parameters(), SGDOptions(0.1));
    DistributedOptimizer optimizer(sgd, net->named_parameters());
    GradScaler scaler({.init_scale = last() ? 16.0 : other});
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      const at::Tensor before = flat(net);
      scaler.scale(small_loss(net, hvd::rank(), step)).backward();
      scaler.step(optimizer);
      scaler.update();
      CHECK(same(flat(net), before) == (step == 0 && hvd::size() > 1));
      CHECK(scaler.get_scale() == 16);
      CHECK(same_on_all_ranks(flat(net)));
    }
  }
}

TEST_CASE(
    "what happens if I scale the loss in join(): ranks that have ended have no scale to differ by, "
    "and every step is made") {
  for (const double scale : {8.0, 3.7}) {
    auto net = small_model();
    SGD sgd(net->parameters(), SGDOptions(0.01));
    DistributedOptimizer optimizer(sgd, net->named_parameters());
    GradScaler scaler({.init_scale = scale});
    {
      const auto guard = optimizer.join();
      for (int step = 0; step < 1 + hvd::rank(); ++step) {
        optimizer.zero_grad();
        const at::Tensor before = flat(net);
        scaler.scale(small_loss(net, hvd::rank(), step)).backward();
        scaler.step(optimizer);
        scaler.update();
        CHECK(!same(flat(net), before));
        CHECK(scaler.get_scale() == static_cast<float>(scale));
      }
    }
    CHECK(same_on_all_ranks(flat(net)));
  }
}

/// Trains for some steps, of which those in `bad` overflow on the last rank; or, without a scaler,
/// leaves those out.
struct Trained {
  at::Tensor parameters;
  std::vector<at::Tensor> memory;
};
Trained train(const Compression& compression, bool ddp, bool scaled, const std::set<int>& bad) {
  auto net = small_model(at::kDouble, 16);
  SGD sgd(net->parameters(), SGDOptions(0.05).momentum(0.9));
  std::optional<DistributedOptimizer> wrapper;
  std::optional<hvd::DistributedDataParallel<torch::nn::SequentialImpl>> parallel;
  if (ddp) {
    parallel.emplace(net.ptr(), hvd::DistributedDataParallelOptions{.compression = compression});
  } else {
    wrapper.emplace(sgd, net->named_parameters(),
                    hvd::DistributedOptimizerOptions{.compression = compression});
  }
  torch::optim::Optimizer& optimizer = ddp ? static_cast<torch::optim::Optimizer&>(sgd) : *wrapper;
  GradScaler scaler({.init_scale = 1024, .growth_interval = 2, .enabled = scaled});
  for (int step = 0; step < 9; ++step) {
    if (!scaled && bad.contains(step)) continue;
    net->zero_grad();
    if (wrapper) wrapper->zero_grad();
    const at::Tensor x = data({5, 6}, at::kDouble, hvd::rank(), step);
    const at::Tensor y = data({5, 3}, at::kDouble, hvd::rank(), step + 1);
    at::Tensor loss = torch::mse_loss(ddp ? parallel->forward(x) : net->forward(x), y);
    if (bad.contains(step) && last()) loss = loss * kOverflow;
    scaler.scale(loss).backward();
    scaler.step(optimizer);
    scaler.update();
  }
  return {flat(net).clone(), wrapper ? wrapper->compression_memory() : std::vector<at::Tensor>()};
}

TEST_CASE(
    "what happens if I scale the loss and compress with a memory: it trains as without a scale, "
    "steps left out lose nothing") {
  for (const auto& compression :
       {Compression::int8(), Compression::topk(0.1), Compression::powersgd(1)}) {
    for (const bool ddp : {false, true}) {
      for (const std::set<int>& bad : {std::set<int>{0, 1, 4}, std::set<int>{3}}) {
        CAPTURE(static_cast<int>(compression.kind()));
        CAPTURE(ddp);
        CAPTURE(bad.size());
        const Trained scaled = train(compression, ddp, true, bad);
        const Trained plain = train(compression, ddp, false, bad);
        CHECK(difference(scaled.parameters, plain.parameters) < 1e-12);
        REQUIRE(scaled.memory.size() == plain.memory.size());
        for (std::size_t i = 0; i < plain.memory.size(); ++i)
          CHECK(difference(scaled.memory[i].to(at::kDouble), plain.memory[i].to(at::kDouble)) <
                1e-9);
        CHECK(same_on_all_ranks(scaled.parameters));
      }
    }
  }
}

}  // namespace
