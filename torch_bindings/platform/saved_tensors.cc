#include "torch_bindings/platform/saved_tensors.h"

#include <torch/csrc/autograd/engine.h>

#include <atomic>
#include <utility>

namespace hvd::detail {

namespace {

using torch::autograd::Engine;

thread_local SavedTensorTaker* this_threads_taker = nullptr;

/// Gives hooks, and lets the engine that was there before (LibTorch's, or Python's) do all the
/// rest: it has the threads and queues.
class HookingEngine final : public Engine {
 public:
  static void stand_before_the_other() {
    static auto* const made = new HookingEngine;  // autograd's threads may outlive main()
    Engine& present = Engine::get_default_engine();
    if (&present == made) return;
    made->behind_ = &present;
    torch::autograd::set_default_engine_stub([]() -> Engine& { return *made; });
  }

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return this_threads_taker != nullptr ? this_threads_taker->hooks()
                                         : behind_.load()->get_default_saved_variable_hooks();
  }
  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs,
                                         bool keep_graph, bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    return behind_.load()->execute(roots, inputs, keep_graph, create_graph, accumulate_grad,
                                   outputs);
  }
  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& graph_task,
      std::shared_ptr<torch::autograd::Node> graph_root,
      torch::autograd::InputBuffer&& input_buffer) override {
    return behind_.load()->execute_with_graph_task(graph_task, std::move(graph_root),
                                                   std::move(input_buffer));
  }
  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return behind_.load()->make_anomaly_metadata();
  }

 private:
  HookingEngine() = default;
  std::atomic<Engine*> behind_ = nullptr;
};

}  // namespace

SavedTensorScope::SavedTensorScope(SavedTensorTaker* taker) : before_(this_threads_taker) {
  if (taker != nullptr) HookingEngine::stand_before_the_other();
  this_threads_taker = taker;
}

SavedTensorScope::~SavedTensorScope() { this_threads_taker = before_; }

}  // namespace hvd::detail
