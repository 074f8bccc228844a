#pragma once
/// This is a TorchScript module from a file (`torch.jit.save` of Python, traced or scripted) as a classifier that trains like one written
/// in C++. Its parameters and buffers are registered under their own names, so optimizers, checkpoints and broadcasts see them. It throws
/// std::runtime_error that names the file where it is none.

#include <memory>
#include <string>

#include "examples/train/models/models.h"

namespace examples {

/// The module must take images [items, channels, height, width] and give scores [items, classes].
std::shared_ptr<Classifier> script_model(const std::string& file);

}  // namespace examples
