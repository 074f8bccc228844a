// DistributedOptimizer: against a reference made by hand, and everything that users do around it.
#include <functional>
#include <memory>
#include <sstream>

#include "tests/torch/support.h"
#include "torch_bindings/reducer.h"

namespace {

using namespace hvd::test;
using at::kDouble, at::kFloat, at::kHalf;
using hvd::DistributedOptimizer;
using hvd::DistributedOptimizerOptions;
using torch::nn::Sequential;
using torch::optim::Optimizer;
using Parameters = std::vector<at::Tensor>;

/// User code: an optimizer that LibTorch does not know, with options of its own.
struct SignOptions : torch::optim::OptimizerCloneableOptions<SignOptions> {
  explicit SignOptions(double rate) : lr(rate) {}
  double lr;
  double get_lr() const override { return lr; }
  void set_lr(const double rate) override { lr = rate; }
};
class SignSgd : public Optimizer {
 public:
  SignSgd(Parameters parameters, SignOptions options) : Optimizer(std::move(parameters), std::make_unique<SignOptions>(options)) {}
  at::Tensor step(LossClosure closure = nullptr) override {
    at::Tensor value = closure ? closure() : at::Tensor();
    const torch::NoGradGuard no_gradient;
    for (auto& group : param_groups())
      for (auto& parameter : group.params())
        if (parameter.grad().defined()) parameter.sub_(parameter.grad().sign() * group.options().get_lr());
    return value;
  }
};

struct Kind {
  std::string name;
  std::function<std::unique_ptr<Optimizer>(Parameters)> make;
  bool closure = false;
};
const std::vector<Kind>& kinds() {
  using namespace torch::optim;
  static const std::vector<Kind> all{
      {"SGD", [](Parameters p) { return std::make_unique<SGD>(p, SGDOptions(0.1).momentum(0.9).weight_decay(0.01)); }},
      {"Adam", [](Parameters p) { return std::make_unique<Adam>(p, AdamOptions(0.01)); }},
      {"AdamW", [](Parameters p) { return std::make_unique<AdamW>(p, AdamWOptions(0.01).amsgrad(true)); }},
      {"RMSprop", [](Parameters p) { return std::make_unique<RMSprop>(p, RMSpropOptions(0.01).centered(true)); }},
      {"Adagrad", [](Parameters p) { return std::make_unique<Adagrad>(p, AdagradOptions(0.05)); }},
      {"the user's own", [](Parameters p) { return std::make_unique<SignSgd>(p, SignOptions(0.01)); }},
      {"SGD with a closure", [](Parameters p) { return std::make_unique<SGD>(p, SGDOptions(0.1)); }, true},
      {"LBFGS", [](Parameters p) { return std::make_unique<LBFGS>(p, LBFGSOptions(0.5).max_iter(6)); }, true},
      {"LBFGS with line search",
       [](Parameters p) { return std::make_unique<LBFGS>(p, LBFGSOptions(1).max_iter(6).line_search_fn("strong_wolfe")); }, true},
  };
  return all;
}
std::unique_ptr<Optimizer> sgd(const Parameters& parameters, double rate = 0.1, double momentum = 0.9) {
  return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(rate).momentum(momentum));
}

/// What the ranks would get together: all of it computed here, for `passes` batches each, reduced as asked.
struct Reference {
  std::vector<int> ranks = everyone();
  int passes = 1;
  hvd::ReduceOp op = hvd::ReduceOp::Average;
  std::optional<at::ScalarType> wire;

  Sequential net = small_model();
  std::unique_ptr<Optimizer> optimizer;

  /// Puts the reduced gradients in place and returns the mean loss.
  at::Tensor backward(int step) {
    std::vector<Parameters> gradients;
    at::Tensor sum;
    for (const int rank : ranks) {
      net->zero_grad();
      for (int pass = 0; pass < passes; ++pass) {
        const at::Tensor value = small_loss(net, rank, step * passes + pass);
        value.backward();
        sum = sum.defined() ? sum + value.detach() : value.detach();
      }
      Parameters own;
      for (const auto& parameter : net->parameters()) own.push_back(wire ? parameter.grad().to(*wire) : parameter.grad().clone());
      gradients.push_back(std::move(own));
    }
    auto parameters = net->parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      std::vector<at::Tensor> all;
      for (const auto& own : gradients) all.push_back(own[i]);
      parameters[i].mutable_grad() = reduced(all, op).to(parameters[i].scalar_type());
    }
    return op == hvd::ReduceOp::Average ? sum / static_cast<double>(ranks.size()) : sum;
  }
  void step(int number) {
    backward(number);
    optimizer->step();
  }
};

bool same_parameters(const Sequential& a, const Sequential& b, double tolerance = 0) {
  const auto left = a->parameters();
  const auto right = b->parameters();
  for (std::size_t i = 0; i < left.size(); ++i)
    if (!torch::allclose(left[i], right[i], tolerance, tolerance)) return false;
  return true;
}
bool same_everywhere(const Sequential& net) {
  std::vector<at::Tensor> flat;
  for (const auto& parameter : net->parameters()) flat.push_back(parameter.detach().reshape({-1}));
  return same_on_all_ranks(torch::cat(flat));
}

TEST_CASE("every optimizer steps as on the averages of the ranks' gradients") {
  for (const auto& kind : kinds()) {
    CAPTURE(kind.name);
    Sequential net = small_model();
    const auto wrapped = kind.make(net->parameters());
    DistributedOptimizer optimizer(*wrapped, net->named_parameters());
    Reference reference;
    reference.optimizer = kind.make(reference.net->parameters());
    for (int step = 0; step < 4; ++step) {
      if (kind.closure) {
        at::Tensor first;
        const at::Tensor returned = optimizer.step([&] {
          optimizer.zero_grad();
          const at::Tensor value = small_loss(net, hvd::rank(), step);
          value.backward();
          if (!first.defined()) first = value.detach().clone();
          return value;
        });
        CHECK(same(returned.detach(), first));  // this rank's own
        reference.optimizer->step([&] { return reference.backward(step); });
      } else {
        optimizer.zero_grad();
        small_loss(net, hvd::rank(), step).backward();
        CHECK(!optimizer.step().defined());
        reference.step(step);
      }
      CHECK(same_parameters(net, reference.net));
      CHECK(same_everywhere(net));
    }
  }
}

/// Runs `steps` steps on `net` with `optimizer` and on the reference, and compares.
void check_steps(Sequential& net, DistributedOptimizer& optimizer, Reference& reference, int steps = 3, double tolerance = 0) {
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    for (int pass = 0; pass < reference.passes; ++pass) small_loss(net, hvd::rank(), step * reference.passes + pass).backward();
    optimizer.step();
    reference.step(step);
    CHECK(same_parameters(net, reference.net, tolerance));
    CHECK(same_everywhere(net));
  }
}

TEST_CASE("options: op, accumulation, predivide factor, groups, compression") {
  struct Case {
    std::string name;
    DistributedOptimizerOptions options;
    double tolerance = 0;
  };
  std::vector<Case> cases;
  cases.push_back({"defaults", {}});
  cases.push_back({"sum", {.op = hvd::ReduceOp::Sum}});
  cases.push_back({"two passes", {.backward_passes_per_step = 2}});
  cases.push_back({"three passes, compressed", {.compression = hvd::Compression::bf16(), .backward_passes_per_step = 3}});
  cases.push_back({"predivide", {.gradient_predivide_factor = 3}, 1e-13});
  cases.push_back({"predivide by the size", {.gradient_predivide_factor = static_cast<double>(hvd::size())}, 1e-13});
  cases.push_back({"one group", {.groups = 1}});
  cases.push_back({"three groups", {.groups = 3}});
  cases.push_back({"more groups than parameters", {.groups = 100}});
  cases.push_back({"fp16", {.compression = hvd::Compression::fp16()}});
  cases.push_back({"bf16", {.compression = hvd::Compression::bf16(), .groups = 2}});
  for (auto& [name, options, tolerance] : cases) {
    CAPTURE(name);
    Sequential net = small_model();
    const auto wrapped = sgd(net->parameters());
    DistributedOptimizer optimizer(*wrapped, net->named_parameters(), options);
    Reference reference;
    reference.passes = options.backward_passes_per_step;
    reference.op = options.op;
    if (options.compression == hvd::Compression::fp16()) reference.wire = kHalf;
    if (options.compression == hvd::Compression::bf16()) reference.wire = at::kBFloat16;
    reference.optimizer = sgd(reference.net->parameters());
    check_steps(net, optimizer, reference, 3, tolerance);
  }
  {  // groups as lists of parameters; one is in none
    Sequential net = small_model();
    const auto p = net->parameters();
    const auto wrapped = sgd(p);
    DistributedOptimizer optimizer(*wrapped, net->named_parameters(), {.groups = std::vector<Parameters>{{p[3], p[0]}, {p[1]}}});
    Reference reference;
    reference.optimizer = sgd(reference.net->parameters());
    check_steps(net, optimizer, reference);
  }
  {  // a number of passes that is changed
    Sequential net = small_model();
    const auto wrapped = sgd(net->parameters());
    DistributedOptimizer optimizer(*wrapped, net->named_parameters());
    Reference reference;
    reference.optimizer = sgd(reference.net->parameters());
    for (const int passes : {1, 3, 2}) {
      optimizer.set_backward_passes_per_step(passes);
      reference.passes = passes;
      check_steps(net, optimizer, reference, 2);
    }
    CHECK_THROWS_AS(optimizer.set_backward_passes_per_step(0), hvd::InvalidArgument);
  }
}

TEST_CASE("wrong options and names are refused") {
  Sequential net = small_model();
  const auto p = net->parameters();
  const auto wrapped = sgd(p);
  const auto names = net->named_parameters().pairs();
  const auto refused = [&](DistributedOptimizerOptions options, std::vector<std::pair<std::string, at::Tensor>> named) {
    return error_of<hvd::InvalidArgument>([&] { DistributedOptimizer(*wrapped, std::move(named), std::move(options)); });
  };
  auto twice = names;
  twice[1].first = twice[0].first;
  CHECK(contains(refused({}, twice), names[0].first));
  CHECK(contains(refused({}, {names[0], names[1], names[2]}), "no name"));
  CHECK(contains(refused({.backward_passes_per_step = 0}, names), "backward_passes_per_step"));
  CHECK(contains(refused({.backward_passes_per_step = -1}, names), "backward_passes_per_step"));
  CHECK(contains(refused({.op = hvd::ReduceOp::Sum, .gradient_predivide_factor = 2}, names), "gradient_predivide_factor"));
  CHECK(contains(refused({.gradient_predivide_factor = 0}, names), "gradient_predivide_factor"));
  CHECK(contains(refused({.groups = std::vector<Parameters>{{p[0], p[1]}, {p[1]}}}, names), names[1].first));
  CHECK(contains(refused({.groups = std::vector<Parameters>{{torch::ones({2})}}}, names), "groups"));
  CHECK(contains(refused({.groups = 0}, names), "groups"));
  CHECK(contains(refused({.op = hvd::ReduceOp::Min}, names), "min"));
  // What one rank alone has refused does not put the ranks out of step, and the failed ones have left nothing on the parameters.
  if (last()) refused({.groups = -1}, names);
  DistributedOptimizer optimizer(*wrapped);  // without names
  Reference reference;
  reference.optimizer = sgd(reference.net->parameters());
  check_steps(net, optimizer, reference);
}

TEST_CASE("more backward passes than agreed are an error, and zero_grad() puts it right") {
  Sequential net = small_model();
  const auto wrapped = sgd(net->parameters());
  DistributedOptimizer optimizer(*wrapped, net->named_parameters(), {.backward_passes_per_step = 2});
  small_loss(net, hvd::rank(), 0).backward();
  small_loss(net, hvd::rank(), 1).backward();
  const std::string text = error_of<hvd::InvalidArgument>([&] { small_loss(net, hvd::rank(), 2).backward(); });
  INFO(text);
  CHECK(contains(text, "backward_passes_per_step"));
  Reference reference;
  reference.passes = 2;
  reference.optimizer = sgd(reference.net->parameters());
  check_steps(net, optimizer, reference);
}

TEST_CASE("synchronize, clip, step: reduced once") {
  Sequential net = small_model();
  const auto wrapped = sgd(net->parameters());
  DistributedOptimizer optimizer(*wrapped, net->named_parameters());
  Reference reference;
  reference.optimizer = sgd(reference.net->parameters());
  for (int step = 0; step < 4; ++step) {
    const auto before = hvd::stats().tensors_submitted;
    optimizer.zero_grad();
    small_loss(net, hvd::rank(), step).backward();
    optimizer.synchronize();
    CHECK(hvd::stats().tensors_submitted - before == 4);
    torch::nn::utils::clip_grad_norm_(net->parameters(), 0.05);
    if (step < 2) {
      optimizer.step();
    } else {
      const auto guard = optimizer.skip_synchronize();
      optimizer.step();
    }
    CHECK(hvd::stats().tensors_submitted - before == 4);
    reference.backward(step);
    torch::nn::utils::clip_grad_norm_(reference.net->parameters(), 0.05);
    reference.optimizer->step();
    CHECK(same_parameters(net, reference.net));
    CHECK(same_everywhere(net));
  }
  // Without synchronize() the next step reduces again; another backward makes a finished synchronize() count no more.
  const auto before = hvd::stats().tensors_submitted;
  optimizer.zero_grad();
  small_loss(net, hvd::rank(), 9).backward();
  optimizer.step();
  CHECK(hvd::stats().tensors_submitted - before == 4);
  optimizer.synchronize();
  small_loss(net, hvd::rank(), 10).backward();
  optimizer.step();
  CHECK(hvd::stats().tensors_submitted - before == 12);
  CHECK(same_everywhere(net));
}

TEST_CASE("zero_grad, both ways, also with reductions in flight and after a skipped step") {
  for (const bool to_none : {true, false}) {
    CAPTURE(to_none);
    Sequential net = small_model();
    const auto wrapped = sgd(net->parameters());
    DistributedOptimizer optimizer(*wrapped, net->named_parameters(), {.groups = 2});
    Reference reference;
    reference.optimizer = sgd(reference.net->parameters());
    optimizer.zero_grad(to_none);
    for (int step = 0; step < 4; ++step) {
      small_loss(net, hvd::rank(), 50 + step).backward();  // thrown away
      optimizer.zero_grad(to_none);
      for (const auto& parameter : net->parameters()) {
        CHECK(parameter.grad().defined() == !to_none);
        if (!to_none) CHECK(same(parameter.grad(), torch::zeros_like(parameter)));
      }
      small_loss(net, hvd::rank(), step).backward();
      optimizer.step();
      reference.step(step);
      CHECK(same_parameters(net, reference.net));
      if (step % 2 == 0) {
        optimizer.zero_grad(to_none);
      } else {
        net->zero_grad(to_none);  // the module's own, and the base class's
        static_cast<Optimizer&>(optimizer).zero_grad(to_none);
      }
    }
  }
}

/// Two branches and a part that nobody uses.
struct Branches {
  torch::nn::Linear left{6, 3}, right{6, 3}, idle{6, 3};
  std::vector<std::pair<std::string, at::Tensor>> named;
  Parameters parameters;
  Branches() {
    int variant = 0;
    for (auto& [name, layer] : std::vector<std::pair<std::string, torch::nn::Linear>>{{"left", left}, {"right", right}, {"idle", idle}}) {
      layer->to(kDouble);
      const torch::NoGradGuard no_gradient;
      for (auto& item : layer->named_parameters()) {
        item.value().copy_(data(item.value().sizes(), kDouble, 0, variant++));
        named.emplace_back(name + "." + item.key(), item.value());
        parameters.push_back(item.value());
      }
    }
  }
};

TEST_CASE("ranks take different branches; what nobody used stays without a gradient") {
  for (const auto& compression : {hvd::Compression::none(), hvd::Compression::bf16()}) {
    Branches net;
    const auto wrapped = sgd(net.parameters);
    DistributedOptimizer optimizer(*wrapped, net.named, {.compression = compression});
    const auto gradient = [](int rank, int step) { return data({4, 6}, kDouble, rank, step).sum(0).expand({3, 6}); };
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      auto& mine = hvd::rank() % 2 == 0 ? net.left : net.right;
      mine->forward(data({4, 6}, kDouble, hvd::rank(), step)).sum().backward();
      optimizer.synchronize();
      at::Tensor left = torch::zeros({3, 6}, kDouble);
      at::Tensor right = left.clone();
      for (int r = 0; r < hvd::size(); ++r) (r % 2 == 0 ? left : right) += gradient(r, step);
      CHECK(torch::allclose(net.left->weight.grad(), left / hvd::size(), 1e-2, 1e-2));
      if (compression == hvd::Compression::none()) CHECK(torch::allclose(net.left->weight.grad(), left / hvd::size(), 1e-14, 1e-14));
      CHECK(net.right->weight.grad().defined() == (hvd::size() > 1));
      if (hvd::size() > 1) CHECK(torch::allclose(net.right->weight.grad(), right / hvd::size(), 1e-2, 1e-2));
      CHECK(!net.idle->weight.grad().defined());
      CHECK(!net.idle->bias.grad().defined());
      optimizer.step();
      for (const auto& parameter : net.parameters) CHECK(same_on_all_ranks(parameter));
    }
    CHECK(same(net.idle->weight.detach(), Branches().idle->weight.detach()));
  }
}

TEST_CASE("requires_grad is toggled between steps") {
  Branches net;
  const auto wrapped = sgd(net.parameters, 0.1, 0);
  DistributedOptimizer optimizer(*wrapped, net.named);
  const auto step = [&](int number) {
    optimizer.zero_grad();
    const at::Tensor x = data({4, 6}, kDouble, hvd::rank(), number);
    (net.left->forward(x) + net.right->forward(x)).sum().backward();
    optimizer.step();
    for (const auto& parameter : net.parameters) CHECK(same_on_all_ranks(parameter));
  };
  step(0);
  const auto freeze = [&](bool frozen) {
    for (auto& parameter : net.left->parameters()) parameter.requires_grad_(!frozen);
  };
  freeze(true);
  const at::Tensor left = net.left->weight.detach().clone();
  const at::Tensor right = net.right->weight.detach().clone();
  step(1);
  CHECK(same(net.left->weight.detach(), left));
  CHECK(!torch::equal(net.right->weight, right));
  freeze(false);
  step(2);
  CHECK(!torch::equal(net.left->weight, left));
}

TEST_CASE("two optimizers in one process, as a GAN has them") {
  for (const bool with_names : {true, false}) {
    CAPTURE(with_names);
    const auto run = [&](bool distributed) {
      Sequential generator = small_model();
      Sequential critic = small_model(kDouble, 4);
      torch::nn::Linear bridge(torch::nn::LinearOptions(3, 6).bias(false));
      bridge->to(kDouble);
      torch::nn::init::constant_(bridge->weight, 0.25);
      const auto one = sgd(generator->parameters());
      const auto two = std::make_unique<torch::optim::Adam>(critic->parameters(), torch::optim::AdamOptions(0.01));
      std::unique_ptr<DistributedOptimizer> first;
      std::unique_ptr<DistributedOptimizer> second;
      if (distributed) {
        first = with_names ? std::make_unique<DistributedOptimizer>(*one, generator->named_parameters())
                           : std::make_unique<DistributedOptimizer>(*one);
        second = with_names ? std::make_unique<DistributedOptimizer>(*two, critic->named_parameters())  // the same names again
                            : std::make_unique<DistributedOptimizer>(*two);
      }
      // Every rank has the same data: the average is what one process would have.
      for (int step = 0; step < 3; ++step) {
        const at::Tensor x = data({5, 6}, kDouble, 0, step);
        if (distributed)
          second->zero_grad();
        else
          critic->zero_grad();
        critic->forward(bridge->forward(generator->forward(x).detach())).square().sum().backward();
        if (distributed)
          second->step();
        else
          two->step();
        if (distributed)
          first->zero_grad();
        else
          generator->zero_grad();
        critic->forward(bridge->forward(generator->forward(x))).sum().backward();  // also fills the critic's gradients
        if (distributed)
          first->step();
        else
          one->step();
      }
      std::vector<at::Tensor> flat;
      for (const auto& net : {generator, critic})
        for (const auto& parameter : net->parameters()) flat.push_back(parameter.detach().reshape({-1}));
      return torch::cat(flat);
    };
    CHECK(torch::allclose(run(true), run(false), 1e-13, 1e-13));
  }
}

TEST_CASE("learning-rate schedulers on the wrapper and on the wrapped; param_groups()") {
  for (const bool on_wrapper : {true, false}) {
    for (const auto& kind : kinds()) {
      if (kind.closure) continue;
      CAPTURE(kind.name);
      CAPTURE(on_wrapper);
      Sequential net = small_model();
      const auto wrapped = kind.make(net->parameters());
      DistributedOptimizer optimizer(*wrapped, net->named_parameters());
      Optimizer& scheduled = on_wrapper ? static_cast<Optimizer&>(optimizer) : *wrapped;
      torch::optim::StepLR scheduler(scheduled, 2, 0.1);
      Reference reference;
      reference.optimizer = kind.make(reference.net->parameters());
      torch::optim::StepLR reference_scheduler(*reference.optimizer, 2, 0.1);
      for (int step = 0; step < 5; ++step) {
        optimizer.zero_grad();
        small_loss(net, hvd::rank(), step).backward();
        optimizer.step();
        scheduler.step();
        reference.step(step);
        reference_scheduler.step();
        CHECK(same_parameters(net, reference.net));
        const double rate = reference.optimizer->param_groups()[0].options().get_lr();
        CHECK(optimizer.param_groups()[0].options().get_lr() == rate);
        CHECK(wrapped->param_groups()[0].options().get_lr() == rate);
      }
    }
  }
  Sequential net = small_model();
  const auto p = net->parameters();
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(Parameters{p[0], p[1]}, std::make_unique<torch::optim::SGDOptions>(0.1));
  groups.emplace_back(Parameters{p[2], p[3]}, std::make_unique<torch::optim::SGDOptions>(0.2));
  torch::optim::SGD wrapped(groups, torch::optim::SGDOptions(0.3));
  DistributedOptimizer optimizer(wrapped, net->named_parameters());
  REQUIRE(optimizer.param_groups().size() == 2);
  static_cast<torch::optim::SGDOptions&>(optimizer.param_groups()[1].options()).lr(0).momentum(0.5);
  const at::Tensor frozen = p[2].detach().clone();
  const at::Tensor other = p[0].detach().clone();
  small_loss(net, hvd::rank(), 0).backward();
  optimizer.step();
  CHECK(same(p[2].detach(), frozen));
  CHECK(!torch::equal(p[0], other));
  CHECK(static_cast<torch::optim::SGDOptions&>(wrapped.param_groups()[1].options()).momentum() == 0.5);
}

TEST_CASE("torch::save and torch::load on the wrapper") {
  for (const auto& kind : kinds()) {
    if (kind.name == "the user's own" || kind.name == "LBFGS with line search") continue;
    CAPTURE(kind.name);
    const auto steps = [](Sequential& net, DistributedOptimizer& optimizer, int from, int to) {
      for (int step = from; step < to; ++step)
        optimizer.step([&] {
          optimizer.zero_grad();
          const at::Tensor value = small_loss(net, hvd::rank(), step);
          value.backward();
          return value;
        });
    };
    Sequential net = small_model();
    const auto wrapped = kind.make(net->parameters());
    DistributedOptimizer optimizer(*wrapped, net->named_parameters());
    steps(net, optimizer, 0, 2);
    optimizer.param_groups()[0].options().set_lr(0.02);
    std::stringstream weights;
    std::stringstream state;
    torch::save(net, weights);
    torch::save(optimizer, state);
    steps(net, optimizer, 2, 4);

    Sequential resumed = small_model();
    torch::load(resumed, weights);
    const auto fresh = kind.make(resumed->parameters());
    DistributedOptimizer loaded(*fresh, resumed->named_parameters());
    torch::load(loaded, state);
    CHECK(loaded.param_groups()[0].options().get_lr() == 0.02);
    steps(resumed, loaded, 2, 4);
    CHECK(same_parameters(net, resumed));
  }
}

TEST_CASE("gradients live in shared memory: no copies, the same place every step") {
  Sequential net = small_model(kFloat);
  const auto wrapped = sgd(net->parameters());
  DistributedOptimizer optimizer(*wrapped, net->named_parameters());
  std::vector<const void*> places;
  std::int64_t bytes = 0;
  for (const auto& parameter : net->parameters()) bytes += parameter.numel() * 4;
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    const auto before = hvd::stats();
    small_loss(net, hvd::rank(), step).backward();
    optimizer.step();
    const auto after = hvd::stats();
    if (hvd::Config::from_environment().shared_memory == hvd::SharedMemory::Auto)
      CHECK(after.bytes_zero_copy - before.bytes_zero_copy == static_cast<std::uint64_t>(bytes));
    CHECK(after.bytes_reduced - before.bytes_reduced == static_cast<std::uint64_t>(bytes));
    std::vector<const void*> now;
    for (const auto& parameter : net->parameters()) {
      now.push_back(parameter.grad().const_data_ptr());
      CHECK(parameter.grad().strides() == parameter.strides());
    }
    if (step > 0) CHECK(now == places);
    places = now;
  }
}

TEST_CASE("fusion: the 62 gradients of a model travel in few batches, and start before step()") {
  Sequential net;
  for (int i = 0; i < 31; ++i) net->push_back(torch::nn::Linear(16, 16));
  const auto wrapped = sgd(net->parameters());
  DistributedOptimizer optimizer(*wrapped, net->named_parameters());
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    const auto before = hvd::stats();
    net->forward(torch::ones({2, 16}) * (hvd::rank() + 1)).sum().backward();
    CHECK(hvd::stats().tensors_submitted - before.tensors_submitted == 62);
    optimizer.step();
    const auto after = hvd::stats();
    CHECK(after.tensors_submitted - before.tensors_submitted == 62);
    CHECK(after.batches_run - before.batches_run <= 4);
    CHECK(after.tensors_fused - before.tensors_fused >= 58);
  }
}

TEST_CASE("gradients taken when their bucket is complete are those taken one by one") {
  // How gradients on a GPU get to where they are reduced; it needs none.
  using hvd::GradientReducer;
  CHECK(hvd::allocate_on_device(64, {}, hvd::DataType::Float32) == nullptr);  // the host's is allocate_shared
  int number = 0;
  for (const auto& compression : {hvd::Compression::none(), hvd::Compression::fp16()}) {
    for (const int passes : {1, 2}) {
      for (const bool set_to_none : {true, false}) {
        std::vector<std::vector<at::Tensor>> all;
        for (const auto taking : {GradientReducer::Taking::ByDevice, GradientReducer::Taking::Together}) {
          auto net = small_model(kFloat);
          std::vector<GradientReducer::Named> named;
          for (const auto& item : net->named_parameters()) named.push_back({item.key(), item.value()});
          const DistributedOptimizerOptions options{
              .compression = compression, .backward_passes_per_step = passes, .gradient_predivide_factor = 2, .groups = 2};
          const auto reducer = std::make_shared<GradientReducer>(named, options, number++, "taken", taking);
          reducer->hook();
          auto& gradients = all.emplace_back();
          std::vector<const void*> homes;
          for (int step = 0; step < 4; ++step) {
            for (int pass = 0; pass < passes; ++pass) {
              // The last layer gets no gradient on the last rank now and then, and nowhere in the last step.
              const bool whole = step < 3 && (step != 1 || hvd::rank() + 1 < hvd::size());
              const at::Tensor x = data({5, 6}, kFloat, hvd::rank(), step * 2 + pass);
              (whole ? small_loss(net, hvd::rank(), step * 2 + pass) : net[0]->as<torch::nn::Linear>()->forward(x).square().mean())
                  .backward();
            }
            reducer->synchronize();
            for (const auto& each : named) {
              const at::Tensor& gradient = each.parameter.grad();
              gradients.push_back(gradient.defined() ? gradient.clone() : at::Tensor());
              if (compression == hvd::Compression::none() && step == 0) homes.push_back(gradient.const_data_ptr());
              if (compression == hvd::Compression::none() && gradient.defined())
                CHECK(gradient.const_data_ptr() == homes[static_cast<std::size_t>(&each - named.data())]);
              if (set_to_none) {
                each.parameter.mutable_grad() = at::Tensor();
              } else if (gradient.defined()) {
                gradient.zero_();
              }
            }
            reducer->begin_step();
          }
          reducer->unhook();
        }
        REQUIRE(all[0].size() == all[1].size());
        for (std::size_t i = 0; i < all[0].size(); ++i) {
          CHECK(all[0][i].defined() == all[1][i].defined());
          if (all[0][i].defined()) CHECK(all[0][i].equal(all[1][i]));
        }
        CHECK(all[0].back().defined() == !set_to_none);
      }
    }
  }
}

TEST_CASE("sparse gradients travel as indices and values, also where some ranks have none; the same as dense ones") {
  struct Net : torch::nn::Module {
    torch::nn::Embedding table{nullptr};
    torch::nn::Linear head{nullptr};
    explicit Net(bool sparse) {
      table = register_module("table", torch::nn::Embedding(torch::nn::EmbeddingOptions(10, 4).sparse(sparse)));
      head = register_module("head", torch::nn::Linear(4, 2));
      const torch::NoGradGuard no_gradient;
      for (auto& parameter : parameters()) parameter.copy_(torch::arange(parameter.numel()).reshape(parameter.sizes()) * 0.01);
    }
  };
  const auto train = [](bool sparse, hvd::DistributedOptimizerOptions options) {
    const auto net = std::make_shared<Net>(sparse);
    const auto wrapped = sgd(net->parameters(), 0.1, 0);
    DistributedOptimizer optimizer(*wrapped, net->named_parameters(), std::move(options));
    for (int step = 0; step < 5; ++step) {
      optimizer.zero_grad();
      const bool uses_table = step % 2 == 1 || hvd::rank() != 0;
      const at::Tensor words =
          uses_table ? net->table->forward(torch::tensor({hvd::rank(), step, (step + hvd::rank()) % 10})) : torch::ones({3, 4});
      net->head->forward(words).pow(2).sum().backward();
      optimizer.step();
    }
    CHECK(same_on_all_ranks(net->table->weight));
    return std::pair(net->table->weight.detach().clone(), net->head->weight.detach().clone());
  };
  const auto expected = train(false, {});
  const auto travelled = train(true, {});
  const auto made_dense = train(true, {.sparse_as_dense = true});
  CHECK(torch::allclose(travelled.first, expected.first));
  CHECK(torch::allclose(travelled.second, expected.second));
  CHECK(torch::allclose(made_dense.first, expected.first));
  const auto predivided = train(true, {.gradient_predivide_factor = 5});  // by the same rule, in and out of buckets
  CHECK(torch::allclose(predivided.first, expected.first));
  CHECK(torch::allclose(predivided.second, expected.second));
}

TEST_CASE("models that differ between ranks: Mismatch on all of them") {
  if (hvd::size() == 1) return;
  {
    Sequential net = small_model(kFloat, last() ? 9 : 8);
    const auto wrapped = sgd(net->parameters());
    DistributedOptimizer optimizer(*wrapped, net->named_parameters());
    for (int attempt = 0; attempt < 2; ++attempt) {
      optimizer.zero_grad();
      const std::string text = error_of<hvd::Mismatch>([&] {
        small_loss(net, hvd::rank(), 0).backward();
        optimizer.step();
      });
      INFO(text);
      CHECK(contains(text, "rank " + std::to_string(hvd::size() - 1) + ": "));
      CHECK(contains(text, "9]"));
      CHECK(contains(text, "8]"));
      if (attempt == 0) continue;
    }
  }
  {  // the difference is in the last of many
    Sequential net;
    for (int i = 0; i < 20; ++i) net->push_back(torch::nn::Linear(4, 4));
    net->push_back(torch::nn::Linear(4, last() ? 5 : 6));
    net->push_back(torch::nn::Flatten());
    const auto wrapped = sgd(net->parameters());
    DistributedOptimizer optimizer(*wrapped, net->named_parameters());
    net->forward(torch::ones({2, 4})).sum().backward();
    const std::string text = error_of<hvd::Mismatch>([&] { optimizer.step(); });
    INFO(text);
    CHECK(contains(text, "tensor '20.bias' is "));
    CHECK(contains(text, "[5]"));
    CHECK(contains(text, "[6]"));
  }
  {  // in the first
    Sequential net(torch::nn::Linear(last() ? 5 : 6, 4));
    for (int i = 0; i < 20; ++i) net->push_back(torch::nn::Linear(4, 4));
    const auto wrapped = sgd(net->parameters());
    DistributedOptimizer optimizer(*wrapped, net->named_parameters());
    net->forward(torch::ones({2, last() ? 5 : 6})).sum().backward();
    const std::string text = error_of<hvd::Mismatch>([&] { optimizer.step(); });
    INFO(text);
    CHECK(contains(text, "[4, 5]"));
    CHECK(contains(text, "[4, 6]"));
  }
  Sequential net = small_model();
  const auto wrapped = sgd(net->parameters());
  DistributedOptimizer optimizer(*wrapped, net->named_parameters());
  Reference reference;
  reference.optimizer = sgd(reference.net->parameters());
  check_steps(net, optimizer, reference);
}

TEST_CASE("wrapped again: the last wrapper reduces, the first one's end does not disturb it") {
  Sequential net = small_model();
  const auto wrapped = sgd(net->parameters());
  auto first = std::make_unique<DistributedOptimizer>(*wrapped, net->named_parameters());
  auto second = std::make_unique<DistributedOptimizer>(*wrapped, net->named_parameters());
  first.reset();
  const auto before = hvd::stats().tensors_submitted;
  small_loss(net, hvd::rank(), 7).backward();
  CHECK(hvd::stats().tensors_submitted - before == 4);
  second->zero_grad();
  Reference reference;
  reference.optimizer = sgd(reference.net->parameters());
  check_steps(net, *second, reference);
  // Without a wrapper the parameters are ordinary again.
  second.reset();
  const auto after = hvd::stats().tensors_submitted;
  net->zero_grad();
  small_loss(net, 0, 7).backward();
  wrapped->step();
  CHECK(hvd::stats().tensors_submitted == after);
}

TEST_CASE("an optimizer in a process set, and one that outlives shutdown and init") {
  const int size = hvd::size();
  hvd::Config config;
  std::vector<int> low;
  for (int r = 0; r < (size + 1) / 2; ++r) low.push_back(r);
  config.process_sets = {low};
  Sequential survivor = small_model();
  const auto survivor_wrapped = sgd(survivor->parameters());
  DistributedOptimizer survivor_optimizer(*survivor_wrapped, survivor->named_parameters());
  Reference survivor_reference;
  survivor_reference.optimizer = sgd(survivor_reference.net->parameters());
  check_steps(survivor, survivor_optimizer, survivor_reference);
  {
    const Restarted world(config);
    const hvd::ProcessSet set = hvd::process_set(1);
    if (set.included()) {
      Sequential net = small_model();
      const auto wrapped = sgd(net->parameters());
      DistributedOptimizer optimizer(*wrapped, net->named_parameters(), {.gradient_predivide_factor = 2, .process_set = set});
      Reference reference;
      reference.ranks = low;
      reference.optimizer = sgd(reference.net->parameters());
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        small_loss(net, hvd::rank(), step).backward();
        optimizer.step();
        reference.step(step);
        CHECK(same_parameters(net, reference.net, 1e-13));
      }
    }
    hvd::barrier();
  }
  check_steps(survivor, survivor_optimizer, survivor_reference);
}

TEST_CASE("parameters in other layouts, empty ones, and of several types") {
  at::Tensor image = data({2, 3, 4, 5}, kFloat, 0).contiguous(at::MemoryFormat::ChannelsLast).requires_grad_();
  at::Tensor turned = data({4, 6}, kFloat, 0).t().requires_grad_();
  at::Tensor empty = torch::empty({0, 3}).requires_grad_();
  at::Tensor scalar = torch::tensor(2.0, kDouble).requires_grad_();
  at::Tensor half = data({7}, kHalf, 0).requires_grad_();
  const auto wrapped = sgd({image, turned, empty, scalar, half});
  for (const auto& compression : {hvd::Compression::none(), hvd::Compression::fp16()}) {
    DistributedOptimizer optimizer(*wrapped, {}, {.compression = compression});
    optimizer.zero_grad();
    const float scale = static_cast<float>(hvd::rank() + 1);
    const float mean = static_cast<float>(hvd::size() + 1) / 2;
    (image.square().sum() * scale + turned.square().sum() * scale + empty.sum() + scalar * scale + (half * scale).sum()).backward();
    optimizer.synchronize();
    CHECK(torch::allclose(image.grad(), 2 * mean * image, 1e-3, 1e-3));
    CHECK(torch::allclose(turned.grad(), 2 * mean * turned, 1e-3, 1e-3));
    CHECK(torch::allclose(scalar.grad(), torch::tensor(mean, kDouble)));
    CHECK(torch::allclose(half.grad().to(kFloat), torch::full({7}, mean)));
    CHECK(image.grad().strides() == image.strides());
    optimizer.step();
    for (const auto& parameter : {image, turned, scalar, half}) CHECK(same_on_all_ranks(parameter));
  }
}

}  // namespace
