#pragma once
/// This function says how good a model is on a test set that all ranks share out: it fills the library's tally with this data. It is for
/// one thread.

#include <hvd/torch.h>
#include <torch/torch.h>

#include "examples/train/data/batches.h"
#include "examples/train/models/models.h"
#include "examples/train/trainer/precision.h"

namespace examples {

/// What this rank's share of the test images adds up to. The model is left in the mode it was in. `workers` threads make batches ahead.
/// Images that cannot be used are left out and added to `bad`.
hvd::EvaluationTally evaluate_share(Classifier& model, const Dataset& data, Shard shard, std::size_t batch_size, torch::Device device,
                                    std::size_t workers = 0, std::vector<BadImage>* bad = nullptr, const Precision& precision = {});

}  // namespace examples
