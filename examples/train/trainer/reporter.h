#pragma once
/// A Reporter is where rank 0's records go: files, and TensorBoard. It fails by throwing std::runtime_error that names the file.

#include <optional>

#include "examples/train/trainer/event_file.h"
#include "examples/train/trainer/options.h"
#include "examples/train/trainer/records.h"

namespace examples {

class Reporter {
 public:
  /// Makes the files. `epochs_done`, `steps_done`: of a run that goes on.
  Reporter(const Options& options, std::int64_t epochs_done, std::int64_t steps_done);

  /// After an epoch, or an evaluation.
  void add(const Record& record);
  /// Within an epoch.
  void add_loss(std::int64_t step, double loss, double learning_rate);

 private:
  RecordFile records_;
  std::optional<EventFile> events_;
};

}  // namespace examples
