#pragma once
/// This is an encoder of the shape of BERT (Devlin, Chang, Lee, Toutanova: BERT: pre-training of
/// deep bidirectional transformers, 2018) with its pooler and a classifier, for measuring training
/// steps: it has the parameters of a real one, without dropout. It is not for the

/// trainer, which reads images.

#include <cstdint>
#include <memory>

#include "examples/train/models/models.h"

namespace examples {

/// The defaults are the uncased base model: 199 parameters, 109.5 million numbers, and the
/// classifier's two.
struct BertOptions {
  std::int64_t vocabulary = 30522;
  std::int64_t positions = 512;  ///< the longest sequence
  std::int64_t layers = 12;
  std::int64_t width = 768;
  std::int64_t heads = 12;  ///< divides the width
  std::int64_t classes = 2;
};

/// Token numbers [items, sequence] of type int64 to scores [items, classes]. Throws
/// std::invalid_argument if the heads do not divide the width.
std::shared_ptr<Classifier> bert(const BertOptions& options);

}  // namespace examples
