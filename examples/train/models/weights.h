#pragma once
/// These functions read weights that Python wrote, `torch.save(dict(model.state_dict()), FILE)`, for a model of this folder: torchvision's
/// fit the ResNets. They fail by throwing std::runtime_error that names the file, the parameter and what to do; then the model is as it
/// was.

#include <torch/torch.h>

#include <map>
#include <string>

namespace examples {

/// The tensors, by name, of a file that Python wrote with torch.save(dict, FILE); other values are passed over.
std::map<std::string, torch::Tensor> read_tensors(const std::string& file);

/// Every parameter and buffer of `module` gets the values that the file has under its name. Throws where one is missing, has another
/// shape, or the file has a name that the module lacks.
void load_weights(torch::nn::Module& module, const std::string& file);

}  // namespace examples
