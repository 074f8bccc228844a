#pragma once
/// These functions say how much of a GPU's memory LibTorch had in use at most; of the host they say nothing.

#include <torch/torch.h>

#include <cstdint>

namespace examples {

/// Begins a new measurement.
void reset_device_peak(torch::Device device);
/// The most bytes of tensors since then; 0 for the host.
std::int64_t device_peak(torch::Device device);

}  // namespace examples
