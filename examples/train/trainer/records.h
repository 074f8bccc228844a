#pragma once
/// A record is what is known after each epoch; this header has it and the file that it goes to (--json). Rank 0 alone uses it. It fails by
/// throwing std::runtime_error that names the file and what to do.

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "examples/train/trainer/evaluation.h"

namespace examples {

struct Record {
  std::int64_t epoch = 0;        ///< from 1
  std::int64_t step = 0;         ///< since the beginning
  double train_loss = 0;         ///< mean over the images of the epoch, as they were trained on
  hvd::Evaluation test;          ///< in the file: loss, top1, top5
  double seconds = 0;            ///< of training, without evaluation
  double images_per_second = 0;  ///< of all ranks together
  int world_size = 1;
};

nlohmann::json to_json(const Record& record);

/// A JSON array with an object per epoch, whole at every moment.
class RecordFile {
 public:
  /// Writes the file at once, so that one that cannot be written is found out before training. `epochs_done`: records of so many epochs
  /// are kept if the file is there already (a resumed run); 0 begins anew. An empty path: no file.
  RecordFile(std::string path, std::int64_t epochs_done);
  void add(const Record& record);

 private:
  void write() const;

  std::string path_;
  nlohmann::json records_ = nlohmann::json::array();
};

}  // namespace examples
