// What happens if a run is broken off and goes on: schedules, scaler, averages, sampler,
// generators, and what each rank has for itself.
#include <ATen/CPUGeneratorImpl.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <numbers>
#include <thread>
#include <vector>

#include "tests/torch_bindings/shared_folder.h"
#include "tests/torch_bindings/support.h"

namespace checkpoint_run {
namespace {

using namespace hvd::test;
using at::kDouble;
using hvd::Checkpoint, hvd::CheckpointError, hvd::DistributedOptimizer, hvd::ReduceOp;
using torch::nn::Sequential;

using MakeSchedule = std::function<std::unique_ptr<hvd::Schedule>(torch::optim::Optimizer&)>;
struct KindOfSchedule {
  std::string name;
  MakeSchedule make;
};
const std::vector<KindOfSchedule>& schedules() {
  using torch::optim::Optimizer;
  static const std::vector<KindOfSchedule> all{
      {"step", [](Optimizer& o) { return std::make_unique<hvd::StepSchedule>(o, 2, 0.3); }},
      {"multi-step",
       [](Optimizer& o) {
         return std::make_unique<hvd::MultiStepSchedule>(o, std::vector<unsigned>{1, 4, 4}, 0.7);
       }},
      {"cosine", [](Optimizer& o) { return std::make_unique<hvd::CosineSchedule>(o, 7, 0.001); }},
      {"linear", [](Optimizer& o) { return std::make_unique<hvd::LinearSchedule>(o, 0.25, 2, 5); }},
      {"warm-up",
       [](Optimizer& o) {
         return std::make_unique<hvd::WarmupScheduler>(
             o,
             hvd::WarmupOptions{.steps = 3, .then = [](unsigned n) { return std::pow(0.9, n); }});
       }},
  };
  return all;
}

constexpr int kSteps = 6;
constexpr int kItems = 53;

/// With a batch norm, of which each rank has statistics of its own.
Sequential normed_model() {
  Sequential net(torch::nn::Linear(torch::nn::LinearOptions(6, 8).bias(false)),
                 torch::nn::BatchNorm1d(8), torch::nn::Tanh(), torch::nn::Linear(8, 3));
  net->to(kDouble);
  int variant = 0;
  const torch::NoGradGuard no_gradient;
  for (auto& parameter : net->parameters())
    parameter.copy_(data(parameter.sizes(), kDouble, 0, variant++) * 0.3);
  return net;
}

/// All that trains.
struct Run {
  Run(const MakeSchedule& make, const hvd::DistributedOptimizerOptions& options)
      : adam(net->parameters(), torch::optim::AdamOptions(0.05)),
        optimizer(adam, net->named_parameters(), options),
        schedule(make(optimizer)),
        noise(at::make_generator<at::CPUGeneratorImpl>(17 + hvd::rank())) {}

  /// Steps `begin` to `end` of two epochs of three steps.
  void steps(int begin, int end) {
    for (int step = begin; step < end; ++step) {
      if (step % 3 == 0) sampler.set_epoch(step / 3);
      const auto items = sampler.next(4).value();
      std::vector<at::Tensor> rows;
      for (const auto item : items) rows.push_back(data({6}, kDouble, 7, static_cast<int>(item)));
      at::Tensor x = torch::stack(rows);
      x = x + 0.1 * torch::randn(x.sizes(), noise, kDouble);
      optimizer.zero_grad();
      scaler.scale(net->forward(x).square().mean()).backward();
      scaler.step(optimizer);
      scaler.update();
      schedule->step();
      average.update();
      sampler.record_batch(items.size());
    }
  }
  void save(const std::string& file, int step) {
    Checkpoint(file).save(net, optimizer, step, {*schedule, scaler, average, sampler, noise});
  }
  int load(const std::string& file) {
    return static_cast<int>(
        Checkpoint(file).load(net, optimizer, {*schedule, scaler, average, sampler, noise}));
  }
  [[nodiscard]] at::Tensor all() const {
    std::vector<at::Tensor> statistics = net->buffers();
    for (const auto& tensor : average.of_rank()) statistics.push_back(tensor);
    for (auto& tensor : statistics) tensor = tensor.flatten();
    return torch::cat(
        {flat(net), torch::cat({average.averages()[0].flatten(), average.averages()[3].flatten()}),
         torch::cat(statistics),
         torch::tensor(
             {adam.param_groups()[0].options().get_lr(), scaler.get_scale(),
              static_cast<double>(schedule->steps()), static_cast<double>(sampler.processed()),
              static_cast<double>(average.updates())},
             kDouble)});
  }

  Sequential net = normed_model();
  torch::optim::Adam adam;
  DistributedOptimizer optimizer;
  std::unique_ptr<hvd::Schedule> schedule;
  hvd::GradScaler scaler{{.init_scale = 256, .growth_interval = 2}};
  hvd::ExponentialMovingAverage average{*net, {.decay = 0.8, .warm_up = true}};
  hvd::ElasticSampler sampler{kItems, true, 3};
  at::Generator noise;
};

void goes_on_after_each_step(const KindOfSchedule& kind,
                             const hvd::DistributedOptimizerOptions& options) {
  CAPTURE(kind.name);
  Run unbroken(kind.make, options);
  unbroken.steps(0, kSteps);
  for (int at = 1; at < kSteps; ++at) {
    CAPTURE(at);
    const SharedFolder folder;
    {
      Run first(kind.make, options);
      first.steps(0, at);
      first.save(folder.file(), at);
    }
    Run second(kind.make, options);
    if (at == 1)  // without parts, of which each rank has some for itself
      CHECK(Checkpoint(folder.file()).load(second.net, second.optimizer) == at);
    CHECK(second.load(folder.file()) == at);
    second.steps(at, kSteps);
    CHECK(same(second.all(), unbroken.all()));
  }
}

TEST_CASE(
    "what happens if I break a run off after any step of an epoch, with any schedule: it goes on "
    "with the same bits") {
  for (const auto& kind : schedules()) goes_on_after_each_step(kind, {});
  goes_on_after_each_step(schedules()[2], {.shard_optimizer_state = true});
  goes_on_after_each_step(schedules()[4], {.shard_optimizer_state = true, .shard_gradients = true});
  goes_on_after_each_step(schedules()[3], {.share_parameters = true});
}

TEST_CASE(
    "what happens if I break off Adasum with an optimizer that has a state: each rank gets its "
    "own") {
  for (int at = 1; at < 4; ++at) {
    CAPTURE(at);
    const auto train = [](Sequential& net, DistributedOptimizer& optimizer, int begin, int end) {
      for (int step = begin; step < end; ++step) {
        optimizer.zero_grad();
        small_loss(net, hvd::rank(), step).backward();
        optimizer.step();
      }
    };
    const hvd::DistributedOptimizerOptions options{.op = ReduceOp::Adasum};
    Sequential net = small_model();
    DistributedOptimizer optimizer(std::make_unique<torch::optim::Adam>(net->parameters(), 0.05),
                                   net->named_parameters(), options);
    const SharedFolder folder;
    train(net, optimizer, 0, at);
    Checkpoint(folder.file()).save(net, optimizer, at);
    train(net, optimizer, at, 5);
    Sequential other = small_model();
    DistributedOptimizer resumed(std::make_unique<torch::optim::Adam>(other->parameters(), 0.05),
                                 other->named_parameters(), options);
    CHECK(Checkpoint(folder.file()).load(other, resumed) == at);
    train(other, resumed, at, 5);
    CHECK(same(flat(other), flat(net)));
  }
}

/// A generator whose state may be seen and set only under its mutex, as another thread may draw.
class GuardedGenerator : public at::CPUGeneratorImpl {
 public:
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    check();
    return CPUGeneratorImpl::get_state();
  }
  void set_state(const c10::TensorImpl& state) override {
    check();
    CPUGeneratorImpl::set_state(state);
  }
  [[nodiscard]] int looks() const { return looks_; }

 private:
  void check() const {
    ++looks_;
    auto& mutex = const_cast<GuardedGenerator*>(this)->mutex_;
    bool is_free = false;
    std::thread([&] {
      is_free = mutex.try_lock();
      if (is_free) mutex.unlock();
    }).join();
    CHECK_FALSE(is_free);
  }
  mutable int looks_ = 0;
};

TEST_CASE("what happens if a thread draws random numbers while I save: it waits so long") {
  const SharedFolder folder;
  Sequential net = small_model();
  torch::optim::SGD sgd(net->parameters(), 0.1);
  const at::Generator noise = at::make_generator<GuardedGenerator>();
  const auto& guarded = *noise.get<GuardedGenerator>();
  Checkpoint(folder.file()).save(net, sgd, 1, {noise});
  CHECK(guarded.looks() > 0);
  const int before = guarded.looks();
  Checkpoint(folder.file()).load(net, sgd, {noise});
  CHECK(guarded.looks() > before + 1);
}

TEST_CASE("what happens if parts do not fit: refused on all ranks, and nothing is changed") {
  const SharedFolder folder;
  Sequential net = small_model();
  torch::optim::SGD sgd(net->parameters(), 0.5);
  hvd::StepSchedule schedule(sgd, 1, 0.5);
  hvd::ExponentialMovingAverage average(*net);
  schedule.step();
  const Checkpoint checkpoint(folder.file());
  checkpoint.save(net, sgd, 1, {schedule, average});
  schedule.step();
  const at::Tensor before = flat(net);
  const auto refused = [&](const std::string& text, const std::string& why) {
    CHECK_MESSAGE(contains(text, why), text);
    CHECK(sgd.param_groups()[0].options().get_lr() == 0.125);
    CHECK(schedule.steps() == 2);
    CHECK(same(flat(net), before));
  };
  hvd::GradScaler scaler;
  refused(error_of<CheckpointError>([&] { checkpoint.load(net, sgd, {schedule}); }),
          "it has 2 parts, and the program 1");
  refused(error_of<CheckpointError>([&] {
            checkpoint.load(net, sgd, {schedule, scaler});
          }),
          "its part 1 is a hvd::ExponentialMovingAverage, that of the program a hvd::GradScaler");
  // On the last rank alone; the schedule, which fits, is as it was.
  Sequential wider = small_model(kDouble, last() ? 9 : 8);
  hvd::ExponentialMovingAverage of_another(*wider);
  refused(error_of<CheckpointError>([&] {
            checkpoint.load(net, sgd, {schedule, of_another});
          }),
          last_rank() + ": its part 1, a hvd::ExponentialMovingAverage, does not fit");
  hvd::CosineSchedule other(sgd, 4);
  if (hvd::size() > 1) {
    const std::string text = error_of<hvd::Mismatch>([&] {
      last() ? checkpoint.save(net, sgd, 2, {other, average})
             : checkpoint.save(net, sgd, 2, {schedule, average});
    });
    CHECK_MESSAGE(contains(text, "the ranks differ"), text);
    CHECK_MESSAGE(contains(text, "hvd::CosineSchedule"), text);
    CHECK(contains(error_of<hvd::Mismatch>([&] { checkpoint.save(net, sgd, last() ? 3 : 2); }),
                   last_rank() + ": the step is 3"));
  }
  CHECK(checkpoint.load(net, sgd) == 1);  // without parts
  CHECK(checkpoint.load(net, sgd, {schedule, average}) == 1);
  CHECK(schedule.steps() == 1);
  CHECK(sgd.param_groups()[0].options().get_lr() == 0.25);
  checkpoint.save(net, sgd, 3);
  CHECK(contains(error_of<CheckpointError>([&] { checkpoint.load(net, sgd, {schedule}); }),
                 "saved without parts"));
  // A part is of the type that it is, whatever it is called.
  const std::unique_ptr<hvd::Schedule> cosine = std::make_unique<hvd::CosineSchedule>(sgd, 4);
  checkpoint.save(net, sgd, 4, {*cosine});
  CHECK(checkpoint.load(net, sgd, {other}) == 4);
  CHECK(contains(error_of<CheckpointError>([&] { checkpoint.load(net, sgd, {schedule}); }),
                 "its part 0 is a hvd::CosineSchedule, that of the program a hvd::StepSchedule"));
}

TEST_CASE(
    "what happens if a load is refused before the ranks' weights are equal: averages begin with "
    "what is broadcast afterwards") {
  const SharedFolder folder;
  Sequential net = small_model();
  torch::optim::SGD sgd(net->parameters(), 0.1);
  hvd::ExponentialMovingAverage average(*net), of_zeros({torch::zeros({8}, kDouble)});
  average.update();
  const Checkpoint checkpoint(folder.file());
  checkpoint.save(net, sgd, 1, {average, of_zeros});
  {
    const torch::NoGradGuard no_gradient;
    for (auto& parameter : net->parameters()) parameter.add_(hvd::rank() + 1);
  }
  hvd::ExponentialMovingAverage fresh(*net), unfit({torch::zeros({last() ? 9 : 8}, kDouble)});
  CHECK(contains(error_of<CheckpointError>([&] {
                   checkpoint.load(net, sgd, {fresh, unfit});
                 }),
                 "its part 1, a hvd::ExponentialMovingAverage, does not fit"));
  CHECK(fresh.updates() == 0);
  hvd::broadcast_parameters(*net, 0);
  for (std::size_t i = 0; i < fresh.averages().size(); ++i)
    CHECK(same(fresh.averages()[i], net->parameters()[i].detach()));
}

TEST_CASE("schedules: the rates of PyTorch's schedulers, on every group") {
  const auto rates = [](const MakeSchedule& make, int steps) {
    const at::Tensor a = torch::ones({1}, kDouble), b = torch::ones({1}, kDouble);
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<at::Tensor>{a},
                        std::make_unique<torch::optim::SGDOptions>(0.8));
    groups.emplace_back(std::vector<at::Tensor>{b},
                        std::make_unique<torch::optim::SGDOptions>(0.4));
    torch::optim::SGD sgd(groups, torch::optim::SGDOptions(0.8));
    const auto schedule = make(sgd);
    std::vector<double> found;
    for (int step = 0; step <= steps; ++step) {
      found.push_back(sgd.param_groups()[0].options().get_lr());
      found.push_back(sgd.param_groups()[1].options().get_lr());
      schedule->step();
    }
    return found;
  };
  const auto alike = [](const std::vector<double>& is, const std::vector<double>& expected) {
    CHECK(is.size() == expected.size());
    for (std::size_t i = 0; i < std::min(is.size(), expected.size()); ++i)
      CHECK(is[i] == doctest::Approx(expected[i]).epsilon(1e-14));
  };
  using torch::optim::Optimizer;
  alike(rates([](Optimizer& o) { return std::make_unique<hvd::StepSchedule>(o, 2); }, 4),
        {.8, .4, .8, .4, .08, .04, .08, .04, .008, .004});
  alike(rates(
            [](Optimizer& o) {
              return std::make_unique<hvd::MultiStepSchedule>(o, std::vector<unsigned>{1, 3}, 0.5);
            },
            3),
        {.8, .4, .4, .2, .4, .2, .2, .1});
  const double third = (1 + std::cos(std::numbers::pi / 3)) / 2;
  alike(rates([](Optimizer& o) { return std::make_unique<hvd::CosineSchedule>(o, 3, 0.1); }, 4),
        {.8, .4, .1 + .7 * third, .1 + .3 * third, .1 + .7 * (1 - third), .1 + .3 * (1 - third), .1,
         .1, .1, .1});
  alike(rates([](Optimizer& o) { return std::make_unique<hvd::LinearSchedule>(o, 0.5, 1, 2); }, 3),
        {.4, .2, .6, .3, .8, .4, .8, .4});
  torch::optim::SGD sgd({torch::ones({1})}, 0.1);
  CHECK(contains(error_of<hvd::InvalidArgument>([&] { hvd::StepSchedule(sgd, 0); }),
                 "step_size is 0"));
  CHECK(
      contains(error_of<hvd::InvalidArgument>([&] { hvd::CosineSchedule(sgd, 0); }), "steps is 0"));
  CHECK(contains(error_of<hvd::InvalidArgument>([&] { hvd::LinearSchedule(sgd, 0, 1, 0); }),
                 "steps is 0"));
}

TEST_CASE(
    "what happens if I load a file with more than the model has: refused by name on all ranks") {
  const SharedFolder folder;
  Sequential more(torch::nn::Linear(3, 3), torch::nn::BatchNorm1d(3), torch::nn::Linear(3, 2));
  torch::manual_seed(3);
  hvd::broadcast_parameters(*more, 0);
  torch::optim::SGD of_more(more->parameters(), 0.1);
  Checkpoint(folder.file()).save(more, of_more, 1);
  Sequential fewer(torch::nn::Linear(3, 3), torch::nn::BatchNorm1d(3));
  torch::optim::SGD of_fewer(fewer->parameters(), 0.1);
  CHECK(
      contains(error_of<CheckpointError>([&] { Checkpoint(folder.file()).load(fewer, of_fewer); }),
               "it has '2', which the model has not"));
  Sequential plain(torch::nn::Linear(3, 3),
                   torch::nn::BatchNorm1d(torch::nn::BatchNorm1dOptions(3).affine(false)),
                   torch::nn::Linear(3, 2));
  torch::optim::SGD of_plain(plain->parameters(), 0.1);
  CHECK(
      contains(error_of<CheckpointError>([&] { Checkpoint(folder.file()).load(plain, of_plain); }),
               "'1.weight', which the model has not"));
}

TEST_CASE(
    "what happens if replicas differ when I save: told on all ranks, by parameter, and no file is "
    "written") {
  if (hvd::size() == 1) return;
  const SharedFolder folder;
  Sequential net = small_model();
  torch::optim::SGD sgd(net->parameters(), 0.1);
  const Checkpoint checkpoint(folder.file());
  const auto change = [&](double by) {
    const torch::NoGradGuard no_gradient;
    if (last()) net->parameters()[1][2] += by;
  };
  change(1);
  const std::string text = error_of<hvd::Mismatch>([&] { checkpoint.save(net, sgd, 1); });
  CHECK_MESSAGE(contains(text, "parameters are not equal"), text);
  CHECK_MESSAGE(contains(text, "'0.bias'"), text);
  CHECK_FALSE(checkpoint.exists());
  hvd::broadcast_parameters(*net, 0);
  checkpoint.save(net, sgd, 1);
  CHECK(checkpoint.exists());
}

TEST_CASE(
    "what happens if a GradScaler steps Adasum on a process set: its ranks agree among "
    "themselves") {
  if (hvd::size() < 3) return;
  const hvd::ProcessSet set = hvd::add_process_set({0, 1});
  {
    hvd::GradScaler scaler;
    Sequential net = small_model();
    if (set.included()) {
      DistributedOptimizer optimizer(std::make_unique<torch::optim::SGD>(net->parameters(), 0.1),
                                     net->named_parameters(),
                                     {.op = ReduceOp::Adasum, .process_set = set});
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        at::Tensor loss = small_loss(net, hvd::rank(), step);
        if (step == 1 && hvd::rank() == 1) loss = loss * std::numeric_limits<double>::infinity();
        scaler.scale(loss).backward();
        scaler.step(optimizer);
        scaler.update();
      }
      CHECK(scaler.get_scale() == 32768);  // on both, for what one has found
      CHECK(torch::isfinite(flat(net)).all().item<bool>());
    }
  }
  hvd::remove_process_set(set);
}

TEST_CASE(
    "what happens if a tensor of one rank cannot be written: told on all ranks, and no file is "
    "written") {
  const SharedFolder folder;
  Sequential net = small_model();
  torch::optim::SGD sgd(net->parameters(), 0.1);
  bool good = !last();
  const Checkpoint checkpoint(folder.file(), {.of_rank = [&good] {
                                return std::vector{good ? torch::ones({1}) : at::Tensor()};
                              }});
  const std::string text = error_of<CheckpointError>([&] { checkpoint.save(net, sgd, 1); });
  CHECK_MESSAGE(contains(text, last_rank() + ": "), text);
  CHECK_FALSE(checkpoint.exists());
  good = true;
  checkpoint.save(net, sgd, 1);
  CHECK(checkpoint.load(net, sgd) == 1);
}

}  // namespace
}  // namespace checkpoint_run
