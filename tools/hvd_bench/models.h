#pragma once
/// This header has the gradients of well-known networks, as numbers of elements in the order in
/// which the backward pass makes them (torchvision's parameters from the last to the first; 1,000
/// classes; BERT's as its uncased base model names them).

#include <cstddef>
#include <string>
#include <vector>

namespace bench {

const std::vector<std::string>& model_names();
/// resnet18: 62 tensors, 44.6 MiB of fp32; resnet50: 161 tensors, 97.5 MiB; bert-base (embeddings,
/// 12 layers, pooler): 199 tensors, 417.6 MiB. `name` is one of model_names().
std::vector<std::size_t> gradients_of(const std::string& name);

}  // namespace bench
