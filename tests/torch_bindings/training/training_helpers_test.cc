// What stands around the optimizer: data parallelism in one process, moving averages, warm-up and
// scaling of the learning rate, clipping.
#include <sched.h>

#include <atomic>
#include <cmath>
#include <functional>
#include <latch>
#include <memory>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <vector>

#include "hvd/base/cores.h"
#include "tests/torch_bindings/support.h"
#include "torch_bindings/replicas/replica_passes.h"

namespace {

using namespace hvd::test;
using at::kBFloat16, at::kDouble, at::kFloat;
using torch::nn::Linear;
using torch::nn::Sequential;

Sequential model() {
  Sequential net(Linear(6, 8), torch::nn::Tanh(), Linear(8, 3));
  int variant = 0;
  const torch::NoGradGuard no_gradient;
  for (auto& parameter : net->parameters())
    parameter.copy_(data(parameter.sizes(), kDouble, 0, variant++) * 0.3);
  net->to(kDouble);
  return net;
}
double gradients_differ(const Sequential& a, const Sequential& b) {
  double worst = 0;
  for (std::size_t i = 0; i < a->parameters().size(); ++i) {
    REQUIRE(a->parameters()[i].grad().defined() == b->parameters()[i].grad().defined());
    if (a->parameters()[i].grad().defined())
      worst = std::max(worst, difference(a->parameters()[i].grad(), b->parameters()[i].grad()));
  }
  return worst;
}

// -------------------------------------------------------------------------------- data parallelism

TEST_CASE("data_parallel: replicas on threads give what one forward and backward pass gives") {
  for (const int replicas : {1, 2, 3, 5}) {
    CAPTURE(replicas);
    for (const std::int64_t items : {1, 4, 7, 12}) {
      Sequential net = model();
      Sequential alone = model();
      const at::Tensor x = data({items, 6}, kDouble, hvd::rank()).requires_grad_();
      const at::Tensor same_x = x.detach().clone().requires_grad_();
      const at::Tensor y = hvd::data_parallel(net, x, replicas);
      const at::Tensor expected = alone->forward(same_x);
      CHECK(difference(y, expected) < 1e-12);
      // a parameter also used elsewhere
      (y.square().mean() + net->parameters()[0].sum()).backward();
      (expected.square().mean() + alone->parameters()[0].sum()).backward();
      CHECK(gradients_differ(net, alone) < 1e-12);
      CHECK(difference(x.grad(), same_x.grad()) < 1e-12);
    }
  }
}

TEST_CASE(
    "data_parallel: inside a rank, another dimension, frozen parameters, no gradients, autocast") {
  // Ranks that each have replicas, and their optimizer: the hooks on the parameters fire.
  Sequential net = model();
  Sequential alone = model();
  torch::optim::SGD sgd(net->parameters(), 0.1);
  hvd::DistributedOptimizer optimizer(sgd, net->named_parameters());
  torch::optim::SGD reference(alone->parameters(), 0.1);
  hvd::data_parallel(net, data({6, 6}, kDouble, hvd::rank()), 2).square().mean().backward();
  optimizer.step();
  at::Tensor sum = torch::zeros({}, kDouble);
  for (const int rank : everyone())
    sum = sum + alone->forward(data({6, 6}, kDouble, rank)).square().mean();
  (sum / hvd::size()).backward();
  reference.step();
  CHECK(difference(net->parameters()[0], alone->parameters()[0]) < 1e-12);

  optimizer.zero_grad();
  alone->zero_grad();
  const at::Tensor x = data({2, 5, 6}, kDouble, hvd::rank());
  net->parameters()[0].set_requires_grad(false);
  alone->parameters()[0].set_requires_grad(false);
  hvd::data_parallel(net, x, {.replicas = 2, .dim = 1}).square().sum().backward();
  CHECK_FALSE(net->parameters()[0].grad().defined());
  optimizer.zero_grad();  // all ranks take part in what was sent
  const torch::NoGradGuard no_gradient;
  const at::Tensor y = hvd::data_parallel(net, x, {.replicas = 3, .dim = 1});
  CHECK_FALSE(y.requires_grad());
  CHECK(difference(y, net->forward(x)) < 1e-12);
  net->to(kFloat);
  const hvd::AutocastGuard guard(at::kCPU, kBFloat16);
  CHECK((hvd::data_parallel(net, x.to(kFloat), 2).scalar_type() == kBFloat16));
}

/// Calls back from each replica.
struct Calling : torch::nn::Module {
  explicit Calling(std::function<void()> call) : inside(std::move(call)) {}
  at::Tensor forward(const at::Tensor& x) const {
    inside();
    return x * 2;
  }
  std::function<void()> inside;
};
/// What a thread made now begins with.
int threads_of_new_thread() {
  int number = 0;
  std::thread([&] { number = torch::get_num_threads(); }).join();
  return number;
}

TEST_CASE(
    "data_parallel: replicas share the caller's threads; every other thread keeps its number, also "
    "if two call at once") {
  const int own = torch::get_num_threads();
  torch::set_num_threads(6);
  const at::Tensor x = torch::ones({4, 2});
  int here = 0, elsewhere = 0;
  std::once_flag once;
  const auto look = std::make_shared<Calling>([&] {
    std::call_once(once, [&] {
      here = torch::get_num_threads();
      elsewhere = threads_of_new_thread();
    });
  });
  hvd::data_parallel(look, x, 2);
  CHECK(here == 3);
  CHECK(elsewhere == 6);
  CHECK(torch::get_num_threads() == 6);
  CHECK(threads_of_new_thread() == 6);

  // The second pass begins while the first is under way, and ends after it.
  std::latch first_inside(2), second_inside(2), first_over(1);
  std::vector<int> of_second, of_callers(2);
  std::mutex mutex;
  const auto first = std::make_shared<Calling>([&] {
    first_inside.count_down();
    second_inside.wait();
  });
  const auto second = std::make_shared<Calling>([&] {
    second_inside.count_down();
    first_over.wait();
    const std::lock_guard lock(mutex);
    of_second.push_back(torch::get_num_threads());
  });
  std::thread one([&] {
    hvd::data_parallel(first, x, 2);
    first_over.count_down();
    of_callers[0] = torch::get_num_threads();
  });
  std::thread two([&] {
    first_inside.wait();
    hvd::data_parallel(second, x, 2);
    of_callers[1] = torch::get_num_threads();
  });
  one.join();
  two.join();
  CHECK(of_second == std::vector<int>{3, 3});
  CHECK(of_callers == std::vector<int>{6, 6});
  CHECK(threads_of_new_thread() == 6);

  // A caller with a number of its own.
  std::thread([&] {
    torch::get_num_threads();  // the first look would undo what follows
    torch::set_num_threads(2);
    std::thread([] { torch::set_num_threads(6); }).join();
    hvd::data_parallel(std::make_shared<Calling>([] {}), x, 2);
    of_callers[0] = torch::get_num_threads();
  }).join();
  CHECK(of_callers[0] == 2);
  CHECK(threads_of_new_thread() == 6);
  torch::set_num_threads(own);
}

TEST_CASE("init() gives LibTorch no more threads than the cores that its caller is bound to") {
  if (hvd::thread_count_is_fixed()) return;
  cpu_set_t before, one;
  REQUIRE(::sched_getaffinity(0, sizeof before, &before) == 0);
  CPU_ZERO(&one);
  unsigned core = 0;
  while (!CPU_ISSET(core, &before)) ++core;
  CPU_SET(core, &one);
  hvd::shutdown();
  CHECK(::sched_setaffinity(0, sizeof one, &one) == 0);
  hvd::init();
  CHECK(torch::get_num_threads() == 1);
  hvd::shutdown();
  CHECK(::sched_setaffinity(0, sizeof before, &before) == 0);
  hvd::init();
  CHECK(torch::get_num_threads() <= static_cast<int>(hvd::detail::bound_cores()));
}

/// Not cloneable.
struct PlainModule : torch::nn::Module {
  explicit PlainModule(bool with_norm) : layer(register_module("layer", Linear(6, 3))) {
    if (with_norm) norm = register_module("norm", torch::nn::BatchNorm1d(3));
    to(kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    if (x.size(1) != 6) throw std::invalid_argument("the user's");
    return norm.is_empty() ? layer(x) : norm(layer(x));
  }
  Linear layer;
  torch::nn::BatchNorm1d norm{nullptr};
};

TEST_CASE(
    "data_parallel: running statistics of the first replica, modules that cannot be copied, "
    "errors") {
  Sequential net(Linear(6, 3), torch::nn::BatchNorm1d(3));
  net->to(kDouble);
  const at::Tensor x = data({8, 6}, kDouble, hvd::rank());
  const at::Tensor y = hvd::data_parallel(net, x, 2);
  Sequential halves(Linear(std::dynamic_pointer_cast<torch::nn::LinearImpl>(net[0]->clone())),
                    torch::nn::BatchNorm1d(3));
  halves->to(kDouble);
  const at::Tensor first = halves->forward(x.slice(0, 0, 4));
  CHECK(difference(y.slice(0, 0, 4), first) < 1e-12);
  CHECK(difference(net[1]->as<torch::nn::BatchNorm1d>()->running_mean,
                   halves[1]->as<torch::nn::BatchNorm1d>()->running_mean) < 1e-12);

  const auto plain = std::make_shared<PlainModule>(false);
  CHECK(difference(hvd::data_parallel(plain, x, 3), plain->forward(x)) < 1e-12);
  const auto normal = std::make_shared<PlainModule>(true);
  CHECK(contains(error_of<hvd::InvalidArgument>([&] { hvd::data_parallel(normal, x, 2); }),
                 "Cloneable"));
  normal->eval();
  CHECK(difference(hvd::data_parallel(normal, x, 2), normal->forward(x)) < 1e-12);
  CHECK(error_of<std::invalid_argument>([&] {
          hvd::data_parallel(plain, torch::ones({4, 5}, kDouble), 2);
        }) == "the user's");
  CHECK(contains(error_of<hvd::InvalidArgument>([&] { hvd::data_parallel(plain, x, -1); }),
                 "-1 replicas"));
  const at::Tensor once = hvd::data_parallel(plain, x, 2).sum();
  once.backward({}, /*retain_graph=*/true);
  CHECK(contains(error_of<hvd::InvalidArgument>([&] { once.backward(); }), "second backward"));
}

TEST_CASE(
    "data_parallel: gradients of one pass for all replicas, as GPUs need it, are those of a pass "
    "for each") {
  const Sequential one = model(), other = model();
  const at::Tensor x = data({6, 6}, kDouble, hvd::rank()),
                   unused = torch::ones({2}, kDouble).set_requires_grad(true);
  const auto passes = [&](const Sequential& second) {
    std::vector<hvd::detail::ReplicaPass> made;
    for (Sequential net : {one, second}) {
      const at::Tensor output =
          net->forward(x.slice(0, made.empty() ? 0 : 3, made.empty() ? 3 : 6));
      made.push_back({at::kCPU,
                      {output},
                      {data({3, 3}, kDouble, hvd::rank(), static_cast<int>(made.size()))},
                      net->parameters()});
    }
    made.front().wanted.push_back(unused);
    // nothing of it is trained
    made.push_back({at::kCPU, {torch::ones({3}, kDouble)}, {torch::ones({3}, kDouble)}, {unused}});
    return made;
  };
  for (const auto& second : {other, one}) {
    const auto apart = hvd::detail::gradients_in_parallel(passes(second)),
               together = hvd::detail::gradients_in_one_pass(passes(second));
    REQUIRE(together.size() == 3);
    for (std::size_t i = 0; i < one->parameters().size(); ++i) {
      const bool shared = second.get() == one.get();
      CHECK(difference(together[0][i], shared ? apart[0][i] + apart[1][i] : apart[0][i]) < 1e-12);
      CHECK(together[1][i].defined() != shared);  // the first has what both have together
      if (!shared) CHECK(difference(together[1][i], apart[1][i]) < 1e-12);
    }
    CHECK_FALSE(together[0].back().defined());
    CHECK_FALSE(together[2].front().defined());
  }
}

TEST_CASE("local_device: the rank's GPU, or the CPU where there is none") {
  const at::Device device = hvd::local_device();
  if (torch::cuda::is_available() && hvd::cuda_built()) {
    CHECK(device == at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(
                                              hvd::local_rank() %
                                              static_cast<int>(torch::cuda::device_count()))));
  } else {
    CHECK(device.is_cpu());
  }
  hvd::shutdown();
  CHECK_THROWS_AS(hvd::local_device(), hvd::NotInitialized);
  hvd::init();
}

/// Counts how often one is made, which a clone() is too.
struct Counted : torch::nn::Cloneable<Counted> {
  Counted() { Counted::reset(); }
  void reset() override {
    ++made;
    body = register_module("body", Sequential(Linear(6, 8), torch::nn::BatchNorm1d(8),
                                              torch::nn::Tanh(), Linear(8, 3)));
    offset = register_buffer("offset", torch::zeros({3}));
  }
  at::Tensor forward(const at::Tensor& x) {
    if (x.size(1) != 6) throw std::invalid_argument("the user's");
    return factor * (body->forward(x) + offset);
  }
  Sequential body{nullptr};
  at::Tensor offset;
  double factor = 1;  // neither parameter nor buffer
  static inline std::atomic<int> made{0};
};

/// A module whose replicas are kept, beside a twin whose replicas are made for each call.
struct Twins {
  Twins() {
    int variant = 0;
    const torch::NoGradGuard no_gradient;
    for (std::size_t i = 0; i < kept->parameters().size(); ++i) {
      const at::Tensor value = data(kept->parameters()[i].sizes(), kFloat, 0, variant++) * 0.3;
      kept->parameters()[i].copy_(value);
      cloned->parameters()[i].copy_(value);
    }
    both([](Counted& net) { net.to(kDouble); });
  }
  template <class Change>
  void both(const Change& change) {
    change(*kept);
    change(*cloned);
  }
  at::Tensor forward(const at::Tensor& x) {
    const int before = Counted::made;
    const at::Tensor y = parallel.forward(x);
    made += Counted::made - before;
    return y;
  }
  [[nodiscard]] at::Tensor input(std::int64_t items, int variant) const {
    return data({items, 6}, kDouble, hvd::rank(), variant).to(kept->parameters()[0].scalar_type());
  }
  /// A step of training with both, or an evaluation: the same bits.
  void check(std::int64_t items = 9) {
    const at::Tensor x = input(items, ++steps).requires_grad_();
    const at::Tensor same_x = x.detach().clone().requires_grad_();
    const at::Tensor y = forward(x);
    const at::Tensor expected = hvd::data_parallel(cloned, same_x, 3);
    CHECK(same(y, expected));
    y.square().mean().backward();
    expected.square().mean().backward();
    CHECK(same(x.grad(), same_x.grad()));
    compare_and_step();
  }
  void compare_and_step() {
    const torch::NoGradGuard no_gradient;
    for (std::size_t i = 0; i < kept->parameters().size(); ++i) {
      at::Tensor parameter = kept->parameters()[i], twin = cloned->parameters()[i];
      REQUIRE(parameter.grad().defined() == twin.grad().defined());
      if (!parameter.grad().defined()) continue;
      CHECK(torch::equal(parameter.grad(), twin.grad()));
      parameter.sub_(parameter.grad(), 0.1);
      twin.sub_(twin.grad(), 0.1);
    }
    for (std::size_t i = 0; i < kept->buffers().size(); ++i)
      CHECK(torch::equal(kept->buffers()[i], cloned->buffers()[i]));
    both([](Counted& net) { net.zero_grad(); });
  }
  std::shared_ptr<Counted> kept = std::make_shared<Counted>(), cloned = std::make_shared<Counted>();
  hvd::DataParallel<Counted> parallel{kept, {.replicas = 3}};
  int made = 0;  ///< replicas of the one
  int steps = 0;
};

TEST_CASE("DataParallel: replicas are kept, and follow what becomes of the module") {
  Twins twins;
  for (int i = 0; i < 3; ++i) twins.check();
  CHECK(twins.made == 2);
  twins.check(4);  // two pieces only
  twins.check(8);
  twins.both([](Counted& net) { net.eval(); });
  twins.check();
  twins.both([](Counted& net) { net.train(); });
  twins.check();
  twins.both([](Counted& net) { net.body->ptr(1)->eval(); });
  twins.check();
  twins.both([](Counted& net) { net.train(); });
  twins.both([](Counted& net) { net.parameters()[0].set_requires_grad(false); });
  twins.check();
  twins.both([](Counted& net) { net.parameters()[0].set_requires_grad(true); });
  twins.both([](Counted& net) { net.offset.fill_(0.5); });
  twins.check();
  twins.both([](Counted& net) {  // to other memory, as DistributedOptimizer's sharding does
    for (auto& parameter : net.parameters()) parameter.set_data(parameter.detach().clone() * 0.9);
  });
  twins.check();
  {
    const torch::NoGradGuard no_gradient;
    CHECK(same(twins.forward(twins.input(9, 0)),
               hvd::data_parallel(twins.cloned, twins.input(9, 0), 3)));
  }
  CHECK(twins.made == 2);  // nothing of all that needs new ones
  twins.both([](Counted& net) { net.to(kFloat); });
  twins.check();
  twins.check();
  CHECK(twins.made == 4);
  const Linear more(3, 3);
  const Linear same_more(std::dynamic_pointer_cast<torch::nn::LinearImpl>(more->clone()));
  twins.kept->body->push_back(more);
  twins.cloned->body->push_back(same_more);
  twins.check();
  CHECK(twins.made == 6);
  twins.both([](Counted& net) {  // another module of the same shapes
    torch::manual_seed(4);
    net.body = Sequential(Linear(6, 8), torch::nn::BatchNorm1d(8), torch::nn::ReLU(), Linear(8, 3),
                          Linear(3, 3));
    net.replace_module("body", net.body.ptr());
  });
  twins.check();
  CHECK(twins.made == 8);
  // Nobody can see this one.
  twins.both([](Counted& net) { net.factor = 2; });
  twins.parallel.forget_replicas();
  twins.check();
  CHECK(twins.made == 10);
  // clone() does not make that one
  twins.both([](Counted& net) { net.register_parameter("more", torch::ones({2})); });
  for (const auto& forward :
       {std::function<void()>([&] { twins.forward(twins.input(9, 0)); }),
        std::function<void()>([&] { hvd::data_parallel(twins.cloned, twins.input(9, 0), 3); })})
    CHECK(contains(error_of<hvd::InvalidArgument>(forward), "Cloneable"));
}

TEST_CASE(
    "DataParallel: replicas of a pass in inference mode do not serve where gradients are made") {
  Twins twins;
  for (int i = 0; i < 2; ++i) {
    {
      const c10::InferenceMode inference;
      for (int again = 0; again < 2; ++again)
        CHECK(same(twins.forward(twins.input(9, again)),
                   hvd::data_parallel(twins.cloned, twins.input(9, again), 3)));
    }
    twins.check();
  }
}

TEST_CASE(
    "DataParallel: passes under way have replicas of their own; two modules in turn; threads; a "
    "pass that fails") {
  Twins twins;
  for (const int made : {4, 4}) {  // the second time there are enough
    const at::Tensor x = twins.input(9, 1), z = twins.input(6, 2);
    const at::Tensor one = twins.forward(x), two = twins.forward(z);
    const at::Tensor expected_one = hvd::data_parallel(twins.cloned, x, 3),
                     expected_two = hvd::data_parallel(twins.cloned, z, 3);
    (one.square().sum() * two.square().sum()).backward();
    (expected_one.square().sum() * expected_two.square().sum()).backward();
    twins.compare_and_step();
    CHECK(twins.made == made);
  }
  twins.forward(twins.input(9, 3));  // dropped without a backward pass
  hvd::data_parallel(twins.cloned, twins.input(9, 3), 3);
  twins.check();
  CHECK(twins.made == 4);
  CHECK(error_of<std::invalid_argument>([&] {
          twins.forward(torch::ones({9, 5}, kDouble));
        }) == "the user's");
  twins.check();
  twins.check();

  Sequential first = model(), second = model();
  second->parameters()[0].detach().mul_(2);
  const hvd::DataParallel of_first(first, {.replicas = 2}), of_second(second, {.replicas = 3});
  for (int i = 0; i < 3; ++i) {
    const at::Tensor x = data({7, 6}, kDouble, hvd::rank(), i);
    CHECK(difference(of_first(x), first->forward(x)) < 1e-12);
    CHECK(difference(of_second(x), second->forward(x)) < 1e-12);
  }

  const int cores = threads_of_new_thread();
  twins.kept->eval();  // so that the first replica changes no statistics
  twins.parallel.forget_replicas();
  const int before = Counted::made;
  std::vector<double> worst(2, 0);
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 10; ++i) {
        const at::Tensor x = data({6 + 3 * t, 6}, kDouble, hvd::rank(), i);
        const auto got = torch::autograd::grad({twins.parallel.forward(x).square().mean()},
                                               twins.kept->parameters());
        const auto expected = torch::autograd::grad({twins.kept->forward(x).square().mean()},
                                                    twins.kept->parameters());
        for (std::size_t p = 0; p < got.size(); ++p)
          worst[static_cast<std::size_t>(t)] +=
              difference(got[p], expected[p]) / (1 + expected[p].abs().max().item<double>());
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK(threads_of_new_thread() == cores);
  CHECK(worst[0] < 1e-12);
  CHECK(worst[1] < 1e-12);
  CHECK(Counted::made - before <= 4);
}

// --------------------------------------------------------------------------------- moving averages

TEST_CASE("ExponentialMovingAverage: the closed form, its guard, its file") {
  const at::Tensor parameter = torch::zeros({3}, kDouble);
  const double decay = 0.9;
  hvd::ExponentialMovingAverage average({parameter}, {.decay = decay});
  constexpr int kUpdates = 40;
  for (int t = 1; t <= kUpdates; ++t) {
    parameter.fill_(t);
    average.update();
  }
  // sum over t of 0.1 * 0.9^(n - t) * t = n - 9 + 9 * 0.9^n
  const double expected = kUpdates - decay / (1 - decay) * (1 - std::pow(decay, kUpdates));
  CHECK(average.averages()[0][1].item<double>() == doctest::Approx(expected).epsilon(1e-13));
  CHECK(average.updates() == kUpdates);
  {
    const auto guard = average.averaged();
    CHECK(parameter[0].item<double>() == doctest::Approx(expected).epsilon(1e-13));
  }
  CHECK(parameter[0].item<double>() == kUpdates);
  std::stringstream file;
  torch::serialize::OutputArchive out;
  average.save(out);
  out.save_to(file);
  hvd::ExponentialMovingAverage other({torch::ones({3}, kDouble)});
  torch::serialize::InputArchive in;
  in.load_from(file);
  other.load(in);
  CHECK(other.updates() == kUpdates);
  CHECK(torch::equal(other.averages()[0], average.averages()[0]));
  // Those of more parameters, of which the first fit.
  std::stringstream file_of_more;
  torch::serialize::OutputArchive out_of_more;
  hvd::ExponentialMovingAverage({torch::ones({3}, kDouble), torch::ones({2}, kDouble)})
      .save(out_of_more);
  out_of_more.save_to(file_of_more);
  torch::serialize::InputArchive in_of_more;
  in_of_more.load_from(file_of_more);
  CHECK(contains(error_of<c10::Error>([&] { other.load(in_of_more); }),
                 "more parameters than the model's 1"));
  CHECK(other.updates() == kUpdates);
  CHECK(torch::equal(other.averages()[0], average.averages()[0]));
  average.copy_to_parameters();
  CHECK(parameter[2].item<double>() == doctest::Approx(expected).epsilon(1e-13));

  // With a warm-up the first updates weigh 0.9, 9/11, 9/12...
  const at::Tensor second = torch::zeros({1}, kDouble);
  hvd::ExponentialMovingAverage warm({second}, {.decay = 0.25, .warm_up = true});
  double value = 0;
  for (int t = 0; t < 6; ++t) {
    second.fill_(t + 1);
    warm.update();
    const double now = std::min(0.25, (1.0 + t) / (10.0 + t));
    value = now * value + (1 - now) * (t + 1);
    CHECK(warm.averages()[0].item<double>() == doctest::Approx(value).epsilon(1e-13));
  }
  CHECK(contains(error_of<hvd::InvalidArgument>(
                     [&] { hvd::ExponentialMovingAverage bad({parameter}, {.decay = 1}); }),
                 "decay is 1"));
}

TEST_CASE("ExponentialMovingAverage takes what holds a module, with its buffers") {
  const torch::nn::BatchNorm1d holder(3);
  const std::shared_ptr<torch::nn::Module> pointer = holder.ptr();
  hvd::ExponentialMovingAverage of_holder(holder, {.decay = 0.5}),
      of_pointer(pointer, {.decay = 0.5});
  holder->running_mean.fill_(8);
  for (auto* const average : {&of_holder, &of_pointer}) {
    CHECK(average->averages().size() == 2);
    average->update();
    const auto guard = average->averaged();
    CHECK(torch::equal(holder->running_mean, torch::full({3}, 4.0F)));
  }
  // A file of when there were no averages of buffers: these stay.
  torch::serialize::OutputArchive out;
  out.write("updates", c10::IValue(std::int64_t{5}));
  for (const char* const key : {"average.0", "average.1"}) out.write(key, torch::full({3}, 2.0F));
  std::stringstream file;
  out.save_to(file);
  torch::serialize::InputArchive in;
  in.load_from(file);
  of_holder.load(in);
  CHECK(of_holder.updates() == 5);
  CHECK(torch::equal(of_holder.averages()[1], torch::full({3}, 2.0F)));
  {
    const auto guard = of_holder.averaged();
    CHECK(torch::equal(holder->running_mean, torch::full({3}, 4.0F)));
  }
  CHECK(contains(error_of<hvd::InvalidArgument>([] {
                   hvd::ExponentialMovingAverage none(std::shared_ptr<torch::nn::LinearImpl>{});
                 }),
                 "a null pointer"));
}

TEST_CASE("ExponentialMovingAverage of 16-bit parameters is in fp32") {
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    const at::Tensor parameter = torch::full({3}, 1, type), wide = torch::full({3}, 1, kFloat);
    hvd::ExponentialMovingAverage average({parameter}, {.decay = 0.9999}),
        average_of_wide({wide}, {.decay = 0.9999});
    parameter.fill_(2);
    wide.fill_(2);
    for (int t = 0; t < 20; ++t) {  // each adds a 10,000th, of which 16 bits would keep nothing
      average.update();
      average_of_wide.update();
      const auto guard = average.averaged();
      CHECK(torch::equal(parameter, average_of_wide.averages()[0].to(type)));
    }
    CHECK(same(average.averages()[0], average_of_wide.averages()[0]));
    CHECK(average.averages()[0][0].item<double>() > 1.001);
    CHECK(torch::equal(parameter, torch::full({3}, 2, type)));
    average.copy_to_parameters();
    CHECK(torch::equal(parameter, average_of_wide.averages()[0].to(type)));
  }
}

TEST_CASE("ExponentialMovingAverage of a model that ranks train together is the same on all") {
  Sequential net = model();
  torch::optim::SGD sgd(net->parameters(), 0.1);
  hvd::DistributedOptimizer optimizer(sgd, net->named_parameters());
  hvd::ExponentialMovingAverage average(*net, {.decay = 0.5});
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    net->forward(data({5, 6}, kDouble, hvd::rank(), step)).square().mean().backward();
    optimizer.step();
    average.update();
  }
  for (const auto& tensor : average.averages()) CHECK(same_on_all_ranks(tensor));
  CHECK(difference(average.averages()[0], net->parameters()[0]) > 0);
}

// ------------------------------------------------------------------------ learning rates, clipping

TEST_CASE(
    "learning rates: linear scaling, warm-up, what follows it, on every group and through the "
    "wrapper") {
  CHECK(hvd::scaled_learning_rate(0.1, 64) ==
        doctest::Approx(0.1 * 64 * hvd::size() / 256).epsilon(1e-15));
  CHECK(hvd::scaled_learning_rate(0.2, 8, 16) == doctest::Approx(0.1 * hvd::size()).epsilon(1e-15));
  CHECK(contains(error_of<hvd::InvalidArgument>([] { hvd::scaled_learning_rate(0.1, 0); }),
                 "batch sizes 0"));

  Sequential net = model();
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<at::Tensor>{net->parameters()[0], net->parameters()[1]},
                      std::make_unique<torch::optim::SGDOptions>(0.8));
  groups.emplace_back(std::vector<at::Tensor>{net->parameters()[2], net->parameters()[3]},
                      std::make_unique<torch::optim::SGDOptions>(0.4));
  torch::optim::SGD sgd(groups, torch::optim::SGDOptions(0.8));
  hvd::DistributedOptimizer optimizer(sgd, net->named_parameters());
  const auto decay = [](unsigned step) { return std::pow(0.5, step + 1); };
  hvd::WarmupScheduler scheduler(optimizer, {.steps = 5, .then = decay});
  for (unsigned step = 0; step < 9; ++step) {
    // Goyal et al.: from the rate of one process to that of all by equal increments.
    const double k = hvd::size();
    const double expected = step < 5 ? (1 + (k - 1) * step / 5) / k : decay(step - 5);
    CHECK(optimizer.param_groups()[0].options().get_lr() ==
          doctest::Approx(0.8 * expected).epsilon(1e-14));
    CHECK(optimizer.param_groups()[1].options().get_lr() ==
          doctest::Approx(0.4 * expected).epsilon(1e-14));
    CHECK(scheduler.factor(step) == doctest::Approx(expected).epsilon(1e-14));
    const at::Tensor before = net->parameters()[1].detach().clone();
    optimizer.zero_grad();
    net->forward(data({5, 6}, kDouble, hvd::rank())).square().mean().backward();
    optimizer.step();
    CHECK(difference(before - net->parameters()[1], net->parameters()[1].grad() * 0.8 * expected) <
          1e-14);
    scheduler.step();
  }
  torch::optim::SGD plain(net->parameters(), 1.0);
  hvd::WarmupScheduler from_zero(plain, {.steps = 4, .start_factor = 0});
  CHECK(plain.param_groups()[0].options().get_lr() == 0);
  for (int i = 0; i < 6; ++i) from_zero.step();
  CHECK(plain.param_groups()[0].options().get_lr() == 1);
  CHECK(contains(error_of<hvd::InvalidArgument>(
                     [&] { hvd::WarmupScheduler bad(plain, {.start_factor = -1}); }),
                 "start_factor is -1"));
}

TEST_CASE("schedules: a group that is added later starts with its own rate") {
  const at::Tensor first = torch::zeros({2}), second = torch::zeros({2});
  torch::optim::SGD sgd({first}, 1.0);
  hvd::StepSchedule schedule(sgd, 2, 0.5);
  const auto rates = [](torch::optim::Optimizer& optimizer) {
    std::vector<double> all;
    for (const auto& group : optimizer.param_groups()) all.push_back(group.options().get_lr());
    return all;
  };
  for (int step = 0; step < 7; ++step) {
    if (step == 3)
      sgd.add_param_group(torch::optim::OptimizerParamGroup(
          {second}, std::make_unique<torch::optim::SGDOptions>(0.75)));
    schedule.step();
    const double factor = std::pow(0.5, (step + 1) / 2);
    CHECK(rates(sgd).front() == factor);
    if (step >= 3) CHECK(rates(sgd).back() == 0.75 * factor / 0.5);
  }
  hvd::CosineSchedule cosine(sgd, 4, 0.01);
  cosine.step();
  sgd.add_param_group(torch::optim::OptimizerParamGroup(
      {torch::zeros({2})}, std::make_unique<torch::optim::SGDOptions>(0.5)));
  torch::serialize::OutputArchive archive;
  cosine.save(archive);
  std::stringstream file;
  archive.save_to(file);
  torch::serialize::InputArchive saved;
  saved.load_from(file);
  const auto before = rates(sgd);
  for (auto& group : sgd.param_groups()) group.options().set_lr(9);
  cosine.load(saved);
  for (std::size_t group = 0; group < 3; ++group)
    CHECK(rates(sgd)[group] == doctest::Approx(before[group]).epsilon(1e-14));
  CHECK(rates(sgd)[2] == doctest::Approx(0.5).epsilon(1e-14));
  for (int step = 0; step < 3; ++step) cosine.step();
  CHECK(rates(sgd) == std::vector<double>{0.01, 0.01, 0.01});
}

TEST_CASE(
    "clipping by the global norm between synchronize() and step() is that of the global gradient") {
  Sequential net = model();
  Sequential alone = model();
  torch::optim::SGD sgd(net->parameters(), 1.0);
  torch::optim::SGD reference(alone->parameters(), 1.0);
  hvd::DistributedOptimizer optimizer(sgd, net->named_parameters());
  const std::uint64_t before = hvd::stats().tensors_submitted;
  net->forward(data({5, 6}, kDouble, hvd::rank())).square().sum().backward();
  optimizer.synchronize();
  const std::uint64_t once = hvd::stats().tensors_submitted - before;
  const double norm = torch::nn::utils::clip_grad_norm_(net->parameters(), 0.1);
  optimizer.step();
  CHECK(hvd::stats().tensors_submitted - before == once);  // reduced once
  at::Tensor sum = torch::zeros({}, kDouble);
  for (const int rank : everyone())
    sum = sum + alone->forward(data({5, 6}, kDouble, rank)).square().sum();
  (sum / hvd::size()).backward();
  const double expected = torch::nn::utils::clip_grad_norm_(alone->parameters(), 0.1);
  reference.step();
  CHECK(norm == doctest::Approx(expected).epsilon(1e-12));
  CHECK(expected > 0.1);
  for (std::size_t i = 0; i < 4; ++i)
    CHECK(difference(net->parameters()[i], alone->parameters()[i]) < 1e-12);
}

}  // namespace
