// Trains a small network of 16-bit weights with MasterWeights and a GradScaler, and prints weights
// and masters after each step; master_weights_trace.py does the same in PyTorch with fp32 masters
// by hand, and compares.
#include <hvd/torch.h>
#include <torch/torch.h>

#include <cstdio>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

namespace {

at::Tensor numbers(at::IntArrayRef sizes, int variant, double factor) {
  std::int64_t count = 1;
  for (const auto size : sizes) count *= size;
  const at::Tensor number = torch::arange(count, torch::kInt64);
  return ((number * 3 + number * number + variant * 5).remainder(11) - 4)
             .to(torch::kFloat32)
             .reshape(sizes) *
         factor;
}

void print(const char* what, const at::Tensor& tensor) {
  std::cout << what;
  const at::Tensor flat = tensor.detach().to(torch::kFloat64).reshape({-1}).contiguous();
  for (std::int64_t i = 0; i < flat.numel(); ++i) {
    char text[64];
    std::snprintf(text, sizeof text, " %.17g", flat.const_data_ptr<double>()[i]);
    std::cout << text;
  }
  std::cout << "\n";
}

void train(const std::string& optimizer_name, at::ScalarType type) {
  std::vector<at::Tensor> weights;
  int variant = 0;
  for (const std::vector<std::int64_t>& sizes : {std::vector<std::int64_t>{6, 9}, {9}, {9, 3}})
    weights.push_back(numbers(sizes, variant++, 0.11).to(type).requires_grad_());
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (optimizer_name == "sgd") {
    optimizer = std::make_unique<torch::optim::SGD>(
        weights, torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01));
  } else {
    optimizer = std::make_unique<torch::optim::AdamW>(
        weights, torch::optim::AdamWOptions(0.01).weight_decay(0.1));
  }
  hvd::MasterWeights masters(*optimizer);
  hvd::GradScaler scaler({.init_scale = 1000, .agree = false});
  for (int step = 0; step < 8; ++step) {
    masters.zero_grad();
    const at::Tensor x = numbers({5, 6}, step, 0.25).to(type), y = numbers({5, 3}, step + 1, 0.25);
    const at::Tensor out =
        torch::tanh(x.matmul(weights[0]) + weights[1]).matmul(weights[2]).to(torch::kFloat32);
    scaler.scale((out - y).square().mean()).backward();
    scaler.step(masters);
    scaler.update();
    std::cout << "step " << step << " " << optimizer_name << " "
              << (type == torch::kHalf ? "float16" : "bfloat16") << "\n";
    for (const auto& [weight, master] : masters.masters()) {
      print("weight", weight);
      print("master", master);
    }
  }
}

}  // namespace

int main() {
  try {
    torch::set_num_threads(1);
    for (const char* optimizer : {"sgd", "adamw"})
      for (const auto type : {torch::kBFloat16, torch::kHalf}) train(optimizer, type);
  } catch (const std::exception& error) {
    std::cerr << "master_weights_trace: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
