#pragma once
/// A Precision is what --opt-level and --amp come to: the types of weights and products, as apex's levels have them. It is a value; the
/// functions change what they are given, in the caller's thread, and own nothing. They do not fail.

#include <torch/torch.h>

#include <string>

#include "examples/train/trainer/options.h"

namespace examples {

struct Precision {
  torch::ScalarType narrow = torch::kBFloat16;  ///< the 16-bit type, where there is one
  bool autocast = false;                        ///< O1: products in `narrow`, weights in fp32
  bool narrow_weights = false;                  ///< O2, O3
  bool masters = false;                         ///< O2: the optimizer steps fp32 masters, and batch norm stays in fp32
  bool scales_loss = false;                     ///< O1, O2 in fp16

  /// Returns images for the network, in the type of its weights.
  [[nodiscard]] torch::Tensor input(const torch::Tensor& images) const;
  /// Returns the network's scores in fp32, in which losses are computed.
  [[nodiscard]] torch::Tensor output(const torch::Tensor& scores) const;
};

Precision precision_of(const Options& options);

/// Takes the weights of a model to 16 bits where the precision says so; what counts (batch norm's batches) stays a whole number.
void take_weights_to(const Precision& precision, torch::nn::Module& model);

/// Returns "fp32", "bf16 with fp32 masters" and the like: what a checkpoint holds.
std::string words_of_weights(const Precision& precision);

}  // namespace examples
