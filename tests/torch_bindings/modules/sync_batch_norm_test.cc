// SyncBatchNorm and convert_sync_batchnorm: against ordinary batch normalisation of the batches of
// all ranks together.
#include <memory>
#include <sstream>
#include <string>

#include "examples/train/models/models.h"
#include "tests/torch_bindings/support.h"

namespace {

using namespace hvd::test;
using at::kBFloat16, at::kDouble, at::kFloat, at::kHalf;
using hvd::SyncBatchNorm;
using torch::nn::BatchNormOptions;

constexpr std::int64_t kChannels = 5;

/// How many rows each rank has: equal, different, and none at all on one of them.
std::vector<std::int64_t> rows(int way) {
  std::vector<std::int64_t> all;
  for (int rank = 0; rank < hvd::size(); ++rank)
    all.push_back(way == 0 ? 4 : way == 1 ? rank + 2 : rank == hvd::size() - 1 && rank > 0 ? 0 : 3);
  return all;
}

struct Batch {
  at::Tensor all;  ///< rows of all ranks
  std::int64_t begin = 0;
  std::int64_t end = 0;
  [[nodiscard]] at::Tensor own(const at::Tensor& tensor) const {
    return tensor.slice(0, begin, end);
  }
};
Batch batch(int dimensions, const std::vector<std::int64_t>& counts, at::ScalarType type,
            std::uint64_t seed) {
  Batch made;
  std::int64_t total = 0;
  for (int rank = 0; rank < hvd::size(); ++rank) {
    if (rank == hvd::rank()) made.begin = total;
    total += counts[static_cast<std::size_t>(rank)];
    if (rank == hvd::rank()) made.end = total;
  }
  std::vector<std::int64_t> shape{total, kChannels};
  for (int i = 2; i < dimensions; ++i) shape.push_back(i + 1);
  torch::manual_seed(seed);
  made.all = (torch::randn(shape, kDouble) * 3 +
              10 * torch::arange(total).view(std::vector<std::int64_t>(1, total)).reshape([&] {
                std::vector<std::int64_t> column(shape.size(), 1);
                column[0] = total;
                return column;
              }()))
                 .to(type);  // ranks differ much in their means
  return made;
}

double largest(const at::Tensor& difference) {
  return difference.numel() == 0 ? 0 : difference.abs().max().item<double>();
}
double distance(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() && !b.defined()) return 0;
  REQUIRE(a.defined());
  REQUIRE(b.defined());
  REQUIRE(a.sizes() == b.sizes());
  const at::Tensor right = b.detach().to(kDouble);
  return largest(a.detach().to(kDouble) - right) / (1 + largest(right));
}

/// Ordinary batch normalisation in double, with the same tensors as `layer`.
torch::nn::BatchNorm2d ordinary(const BatchNormOptions& options) {
  return torch::nn::BatchNorm2d(options);
}
at::Tensor apply(torch::nn::BatchNorm2d& layer, const at::Tensor& input) {
  const at::Tensor four = input.dim() == 2 ? input.view({input.size(0), input.size(1), 1, 1})
                                           : input.reshape({input.size(0), input.size(1), -1, 1});
  return layer->forward(four).view(input.sizes());
}
template <class Layer>
void start(Layer& layer, at::ScalarType type) {
  const torch::NoGradGuard no_gradient;
  layer->to(type);
  if (!layer->weight.defined()) return;
  layer->weight.copy_(data({kChannels}, kDouble, 0, 1) + 2);
  layer->bias.copy_(data({kChannels}, kDouble, 0, 2));
}

/// Some steps of `layer` on this rank's rows, and of ordinary normalisation on all of them.
template <class Layer>
double compare(Layer& layer, const BatchNormOptions& options, int dimensions, int way,
               at::ScalarType type) {
  auto alone = ordinary(options);
  start(layer, type);
  start(alone, kDouble);
  double worst = 0;
  const auto see = [&](const at::Tensor& a, const at::Tensor& b) {
    worst = std::max(worst, distance(a, b));
  };
  for (std::uint64_t step = 0; step < 3; ++step) {
    const Batch inputs = batch(dimensions, rows(way), type, 10 + step);
    const at::Tensor slopes = batch(dimensions, rows(way), type, 20 + step).all.remainder(7) - 3;
    at::Tensor x = inputs.own(inputs.all).clone().requires_grad_();
    at::Tensor all = inputs.all.to(kDouble).requires_grad_();
    layer->zero_grad();
    alone->zero_grad();
    const at::Tensor y = layer->forward(x);
    const at::Tensor expected = apply(alone, all);
    CHECK((y.scalar_type() == type));
    (y * inputs.own(slopes)).sum().backward();
    (expected * slopes.to(kDouble)).sum().backward();
    see(y, inputs.own(expected));
    see(x.grad(), inputs.own(all.grad()));
    if (options.affine()) {
      see(hvd::allreduce(layer->weight.grad(), {.op = hvd::ReduceOp::Sum}), alone->weight.grad());
      see(hvd::allreduce(layer->bias.grad(), {.op = hvd::ReduceOp::Sum}), alone->bias.grad());
    }
    if (options.track_running_stats()) {
      see(layer->running_mean, alone->running_mean);
      see(layer->running_var, alone->running_var);
      CHECK(layer->num_batches_tracked.template item<std::int64_t>() ==
            static_cast<std::int64_t>(step) + 1);
      CHECK(same_on_all_ranks(layer->running_var));
    }
  }
  // Evaluation: running statistics, nothing sent. Not all ranks need to do it.
  layer->eval();
  alone->eval();
  if (hvd::rank() == 0 && options.track_running_stats()) {
    const Batch inputs = batch(dimensions, rows(0), type, 30);
    see(layer->forward(inputs.all), apply(alone, inputs.all.to(kDouble)));
  }
  return worst;
}

TEST_CASE("SyncBatchNorm is batch normalisation of the whole batch") {
  for (const int way : {0, 1, 2}) {
    CAPTURE(way);
    for (const int dimensions : {2, 3, 4, 5}) {
      CAPTURE(dimensions);
      const BatchNormOptions options(kChannels);
      SyncBatchNorm layer(options);
      CHECK(compare(layer, options, dimensions, way, kDouble) < 1e-12);
    }
    for (const auto& options :
         {BatchNormOptions(kChannels).momentum(std::nullopt).eps(0.01),
          BatchNormOptions(kChannels).affine(false).momentum(0.3),
          BatchNormOptions(kChannels).track_running_stats(false),
          BatchNormOptions(kChannels).affine(false).track_running_stats(false)}) {
      SyncBatchNorm layer(options);
      CHECK(compare(layer, options, 4, way, kDouble) < 1e-12);
    }
    const BatchNormOptions options(kChannels);
    SyncBatchNorm single(options);
    CHECK(compare(single, options, 4, way, kFloat) < 2e-5);
  }
}

TEST_CASE(
    "SyncBatchNorm of 16-bit inputs, with parameters in fp32 and in 16 bits, channels last, and "
    "under autocast") {
  const BatchNormOptions options(kChannels);
  for (const auto type : {kBFloat16, kHalf}) {
    SyncBatchNorm layer(options);
    CHECK(compare(layer, options, 4, 1, type) < (type == kBFloat16 ? 2e-2 : 3e-3));
    SyncBatchNorm wide(options);
    auto alone = ordinary(options);
    const Batch inputs = batch(4, rows(1), type, 3);
    const at::Tensor x =
        inputs.own(inputs.all).clone(at::MemoryFormat::ChannelsLast).requires_grad_();
    const at::Tensor y = [&] {
      const hvd::AutocastGuard guard(at::kCPU, kBFloat16);
      return wide->forward(x);
    }();
    CHECK((y.scalar_type() == type));
    CHECK(y.is_contiguous(at::MemoryFormat::ChannelsLast));
    CHECK(distance(y, inputs.own(apply(alone, inputs.all.to(kFloat)))) < 1e-2);
    y.sum().backward();
    CHECK((wide->running_var.scalar_type() == kFloat));
    CHECK(distance(wide->running_var, alone->running_var) < 1e-6);  // nothing is lost in 16 bits
    CHECK((wide->weight.grad().scalar_type() == kFloat));
  }
}

TEST_CASE("SyncBatchNorm: a set of its own, one value per rank, and no value at all") {
  if (hvd::size() == 1) return;
  const auto pair = hvd::add_process_set({0, hvd::size() - 1});
  if (pair.included()) {
    SyncBatchNorm layer(BatchNormOptions(2), pair);
    layer->to(kDouble);
    // One row on each of the two: ordinary normalisation would refuse it.
    const at::Tensor y =
        layer->forward(torch::full({1, 2}, pair.rank() == 0 ? -3.0 : 5.0, kDouble));
    CHECK(y[0][0].item<double>() == doctest::Approx(pair.rank() == 0 ? -1 : 1).epsilon(1e-6));
    CHECK(layer->running_mean[0].item<double>() == doctest::Approx(0.1));
    CHECK(layer->running_var[0].item<double>() == doctest::Approx(0.9 + 0.1 * 32));
    CHECK(layer->process_set() == pair);
    const std::string text = error_of<hvd::InvalidArgument>([&] {
      layer->forward(torch::ones({pair.rank(), 2}, kDouble));
    });
    CHECK(contains(text, "one value per channel"));
    const at::Tensor none = torch::ones({0, 2}, kDouble).requires_grad_();
    const at::Tensor empty = layer->forward(none);
    CHECK(empty.sizes() == none.sizes());
    CHECK(layer->running_mean[0].item<double>() == doctest::Approx(0.1));
    empty.sum().backward();  // as one process does: gradients, all zeros
    CHECK(none.grad().sizes() == none.sizes());
    for (const auto& parameter : layer->parameters())
      CHECK(same(parameter.grad(), torch::zeros({2}, kDouble)));
  }
  hvd::remove_process_set(pair);
}

TEST_CASE("SyncBatchNorm in evaluation needs neither its set nor a running library") {
  const auto set = hvd::add_process_set(everyone());
  SyncBatchNorm of_set(BatchNormOptions(2), set), of_all(BatchNormOptions(2));
  hvd::remove_process_set(set);
  const at::Tensor x = data({4, 2}, kFloat, hvd::rank());
  torch::nn::BatchNorm1d alone(BatchNormOptions(2));
  alone->eval();
  of_set->eval();
  CHECK(same(of_set->forward(x), alone->forward(x)));
  hvd::shutdown();
  of_all->eval();
  for (auto layer : {of_set, of_all}) CHECK(same(layer->forward(x), alone->forward(x)));
  of_all->train();
  CHECK_THROWS_AS(of_all->forward(x), hvd::NotInitialized);
  hvd::init();
}

TEST_CASE("SyncBatchNorm: what is refused, how it is shown, copied and kept") {
  if (hvd::size() == 1)
    CHECK_THROWS_AS(hvd::SyncBatchNorm(2)->forward(torch::ones({1, 2})), hvd::InvalidArgument);
  SyncBatchNorm layer(BatchNormOptions(3).momentum(std::nullopt));
  const auto text = [&](std::vector<std::int64_t> shape) {
    return error_of<hvd::InvalidArgument>([&] { layer->forward(torch::ones(shape)); });
  };
  CHECK(contains(text({3}), "[N, 3]"));
  CHECK(contains(text({2, 4}), "shape [2, 4]"));
  CHECK(contains(text({1, 3, 1, 1, 1, 1}), "[N, 3]"));
  std::ostringstream shown;
  shown << *layer;
  CHECK(shown.str() ==
        "hvd::SyncBatchNorm(3, eps=1e-05, momentum=None, affine=true, track_running_stats=true)");
  if (hvd::size() > 1) {
    const at::Tensor x = data({4, 3}, kFloat, hvd::rank()).requires_grad_();
    const at::Tensor y = layer->forward(x);
    CHECK(contains(error_of<hvd::InvalidArgument>(
                       [&] { torch::autograd::grad({y.sum()}, {x}, {}, true, true); }),
                   "differentiated twice"));
  }
  const auto copy = std::dynamic_pointer_cast<hvd::SyncBatchNormImpl>(layer->clone());
  CHECK(torch::equal(copy->running_mean, layer->running_mean));
  CHECK_FALSE(copy->running_mean.is_alias_of(layer->running_mean));
  // Its file is that of an ordinary layer.
  std::stringstream file;
  torch::save(layer, file);
  torch::nn::BatchNorm1d other(3);
  torch::load(other, file);
  CHECK(torch::equal(other->running_mean, layer->running_mean));
}

/// Users' modules: typed members, members in containers, and a layer that cannot be told from
/// others.
struct Block : torch::nn::Module {
  Block()
      : first(kChannels),
        inside(torch::nn::Conv2d(torch::nn::Conv2dOptions(kChannels, kChannels, 1)),
               torch::nn::BatchNorm2d(kChannels)) {
    register_module("first", first);
    register_module("inside", inside);
  }
  at::Tensor forward(const at::Tensor& input) { return inside->forward(torch::relu(first(input))); }
  torch::nn::BatchNorm2d first;
  torch::nn::Sequential inside;
};
struct TypedNet : torch::nn::Module {
  TypedNet() {
    blocks = register_module("blocks", torch::nn::Sequential(Block(), Block()));
    last = register_module("last", torch::nn::BatchNorm1d(kChannels));
    auto volume = torch::nn::BatchNorm3d(kChannels);
    any = torch::nn::AnyModule(volume);
    register_module("any", any.ptr());
    list = register_module("list", torch::nn::ModuleList(torch::nn::BatchNorm1d(kChannels)));
    dictionary = register_module(
        "dictionary", torch::nn::ModuleDict(
                          std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>>{
                              {"norm", torch::nn::BatchNorm1d(kChannels).ptr()}}));
  }
  at::Tensor forward(const at::Tensor& input) {
    const at::Tensor x = blocks->forward(input);
    const at::Tensor y = any.forward(x.unsqueeze(2)).squeeze(2);
    const at::Tensor z = last(y.flatten(2));
    const auto normalize = [](const std::shared_ptr<torch::nn::Module>& layer,
                              const at::Tensor& what) {
      if (auto* const sync = layer->as<hvd::SyncBatchNorm>()) return sync->forward(what);
      return layer->as<torch::nn::BatchNorm1d>()->forward(what);
    };
    return normalize((*dictionary)["norm"], normalize(list->ptr(0), z * z));
  }
  torch::nn::Sequential blocks{nullptr};
  torch::nn::BatchNorm1d last{nullptr};
  torch::nn::AnyModule any;
  torch::nn::ModuleList list{nullptr};
  torch::nn::ModuleDict dictionary{nullptr};
};

TEST_CASE("convert_sync_batchnorm: a model with layers of every kind trains as one process") {
  torch::manual_seed(3);
  const auto alone = std::make_shared<TypedNet>();
  torch::manual_seed(3);
  const auto net = std::make_shared<TypedNet>();
  alone->to(kDouble);
  net->to(kDouble);
  const auto names = net->named_parameters().keys();
  torch::optim::SGD sgd(net->parameters(), 0.1);
  torch::optim::SGD reference(alone->parameters(), 0.1);
  const std::shared_ptr<TypedNet> converted = hvd::convert_sync_batchnorm(net);
  CHECK(converted == net);
  CHECK(net->named_parameters().keys() == names);
  CHECK(hvd::is_sync_batchnorm(*net->last));
  CHECK(hvd::is_sync_batchnorm(*net->any.ptr()));
  CHECK_FALSE(hvd::is_sync_batchnorm(*alone->last));
  CHECK(net->list->ptr(0)->as<SyncBatchNorm>() != nullptr);
  CHECK((*net->dictionary)["norm"]->as<SyncBatchNorm>() != nullptr);
  int sync = 0;
  for (const auto& module : net->modules()) sync += hvd::is_sync_batchnorm(*module) ? 1 : 0;
  CHECK(sync == 8);

  hvd::DistributedOptimizer optimizer(sgd, net->named_parameters());
  double worst = 0;
  for (std::uint64_t step = 0; step < 4; ++step) {
    const Batch inputs = batch(4, rows(0), kDouble, step);
    optimizer.zero_grad();
    alone->zero_grad();
    const at::Tensor target = inputs.all.flatten(2).remainder(3);
    const at::Tensor here =
        torch::mse_loss(converted->forward(inputs.own(inputs.all)), inputs.own(target));
    here.backward();
    torch::mse_loss(alone->forward(inputs.all), target).backward();
    optimizer.step();
    reference.step();
    for (const auto& parameter : net->named_parameters())
      worst =
          std::max(worst, distance(parameter.value(), alone->named_parameters()[parameter.key()]));
    for (const auto& buffer : net->named_buffers())
      worst = std::max(worst, distance(buffer.value(), alone->named_buffers()[buffer.key()]));
  }
  CHECK(worst < 1e-12);
  net->eval();
  alone->eval();
  const at::Tensor x = batch(4, rows(0), kDouble, 9).all;
  if (hvd::rank() == 0) CHECK(distance(net->forward(x), alone->forward(x)) < 1e-12);
}

TEST_CASE("convert_sync_batchnorm: a layer itself, holders, handles kept, and other models") {
  const BatchNormOptions options(kChannels);
  torch::nn::BatchNorm1d itself(options);
  torch::nn::BatchNorm1d converted = hvd::convert_sync_batchnorm(itself);
  CHECK(converted.ptr() == itself.ptr());
  CHECK(compare(converted, options, 2, 1, kDouble) < 1e-12);

  // A handle kept from a Sequential shares the tensors and is converted with it; so does a layer
  // that stands there twice.
  torch::nn::BatchNorm2d kept(BatchNormOptions(kChannels).momentum(0.3));
  const at::Tensor weight = kept->weight;
  torch::nn::Sequential sequence(kept, torch::nn::ReLU(), kept);
  hvd::convert_sync_batchnorm(*sequence);
  const auto first = sequence->ptr(0);
  CHECK(first == sequence->ptr(2));
  REQUIRE(first->as<SyncBatchNorm>() != nullptr);
  CHECK(first->as<SyncBatchNorm>()->weight.is_same(weight));
  CHECK(sequence->named_children()["0"] == first);
  CHECK(compare(kept, BatchNormOptions(kChannels).momentum(0.3), 4, 1, kDouble) < 1e-12);
  CHECK(first->as<SyncBatchNorm>()->running_mean.is_same(kept->running_mean));

  // Without parameters, known by its running statistics.
  const BatchNormOptions bare = BatchNormOptions(kChannels).affine(false);
  torch::nn::BatchNorm3d unlearned(bare);
  hvd::convert_sync_batchnorm(unlearned);
  CHECK(compare(unlearned, bare, 5, 2, kDouble) < 1e-12);

  // Two that share what they learn are two: one evaluates while the other trains.
  torch::nn::BatchNorm1d trains(options), evaluates(options);
  evaluates->weight = trains->weight;
  evaluates->bias = trains->bias;
  hvd::convert_sync_batchnorm(trains);
  hvd::convert_sync_batchnorm(evaluates);
  evaluates->eval();
  CHECK(compare(trains, options, 2, 1, kDouble) < 1e-12);

  // Others stay ordinary: only rank 0 goes through this one.
  if (hvd::rank() == 0) {
    torch::nn::BatchNorm2d other(2);
    const at::Tensor x = data({3, 2, 2, 2}, kFloat, 0);
    CHECK(std::abs(other->forward(x).mean().item<double>()) < 1e-6);
    CHECK_FALSE(hvd::is_sync_batchnorm(*other));
    const auto copy = kept->clone();
    CHECK_FALSE(hvd::is_sync_batchnorm(*copy));
  }
}

TEST_CASE("convert_sync_batchnorm: ResNet-18, whose layers are typed members and in Sequential") {
  const auto made = [] {
    torch::manual_seed(5);
    auto net = examples::resnet18({.classes = 10});
    net->to(kDouble);
    return net;
  };
  const auto alone = made();
  const std::shared_ptr<examples::Classifier> net = hvd::convert_sync_batchnorm(made());
  int sync = 0;
  for (const auto& module : net->modules()) sync += hvd::is_sync_batchnorm(*module) ? 1 : 0;
  CHECK(sync == 20);
  const at::Tensor images = torch::randn({2 * hvd::size(), 3, 32, 32}, kDouble);
  const at::Tensor labels = torch::arange(2 * hvd::size()).remainder(10);
  const auto own = [](const at::Tensor& all) {
    return all.slice(0, 2 * hvd::rank(), 2 * hvd::rank() + 2);
  };
  torch::optim::SGD sgd(net->parameters(), 0.01);
  hvd::DistributedOptimizer optimizer(sgd, net->named_parameters());
  const at::Tensor scores = net->forward(own(images));
  torch::nn::functional::cross_entropy(scores, own(labels)).backward();
  optimizer.synchronize();
  const at::Tensor expected = alone->forward(images);
  torch::nn::functional::cross_entropy(expected, labels).backward();
  double worst = distance(scores, own(expected));
  for (const auto& parameter : net->named_parameters())
    worst = std::max(worst, distance(parameter.value().grad(),
                                     alone->named_parameters()[parameter.key()].grad()));
  for (const auto& buffer : net->named_buffers())
    worst = std::max(worst, distance(buffer.value(), alone->named_buffers()[buffer.key()]));
  CHECK(worst < 1e-10);  // twenty layers deep
}

struct Nameless : torch::nn::Module {
  Nameless() {
    good = register_module(
        "good",
        torch::nn::Sequential(
            torch::nn::BatchNorm1d(2),
            torch::nn::BatchNorm1d(BatchNormOptions(2).affine(false).track_running_stats(false))));
    inner = register_module("inner", std::make_shared<torch::nn::Module>("user's"));
    bad = inner->register_module(
        "bad",
        torch::nn::BatchNorm1d(BatchNormOptions(2).affine(false).track_running_stats(false)));
  }
  torch::nn::Sequential good{nullptr};
  std::shared_ptr<torch::nn::Module> inner;
  torch::nn::BatchNorm1d bad{nullptr};
};

TEST_CASE("convert_sync_batchnorm: where it would change nothing it says so, and changes nothing") {
  const auto net = std::make_shared<Nameless>();
  const std::string text =
      error_of<hvd::InvalidArgument>([&] { hvd::convert_sync_batchnorm(net); });
  CHECK(contains(text, "'inner.bad'"));
  CHECK(net->good->ptr(0)->as<SyncBatchNorm>() == nullptr);
  hvd::convert_sync_batchnorm(net->good);  // those can be replaced
  CHECK(net->good->ptr(1)->as<SyncBatchNorm>() != nullptr);
  torch::nn::BatchNorm1dImpl on_the_stack{BatchNormOptions(2)};
  CHECK(contains(error_of<hvd::InvalidArgument>([&] { hvd::convert_sync_batchnorm(on_the_stack); }),
                 "no shared_ptr owns"));
}

}  // namespace
