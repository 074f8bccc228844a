#pragma once
/// A record is what is known after each epoch; this header has it and the file that it goes to (--json). Rank 0 alone uses it. It fails by
/// throwing std::runtime_error that names the file and what to do.

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

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
  double learning_rate = 0;              ///< of the last step
  double seconds_input = 0;              ///< of the training's seconds, mean over ranks: waiting for batches
  double seconds_communication = 0;      ///< and waiting for other ranks' gradients after backward
  std::int64_t peak_bytes = 0;           ///< of memory, of the rank that had most
  std::int64_t gpu_peak_bytes = 0;       ///< and of its GPU's, as LibTorch allocates it; 0 without a GPU
  std::int64_t bad_training_images = 0;  ///< files that were tried in vain, by all ranks
  std::int64_t bad_test_images = 0;
};

nlohmann::json to_json(const Record& record);

/// A JSON array with an object per epoch, and the same as comma-separated values, whole at every moment.
class RecordFile {
 public:
  /// Writes the files at once, so that one that cannot be written is found out before training. `epochs_done`: records of so many epochs
  /// are kept where a file is there already (a resumed run); 0 begins anew. An empty path: no file.
  RecordFile(std::string json, std::string csv, std::int64_t epochs_done);
  void add(const Record& record);

 private:
  void read_json(std::int64_t epochs_done);
  void read_csv(std::int64_t epochs_done);
  void write() const;

  std::string json_, csv_;
  nlohmann::json records_ = nlohmann::json::array();
  std::vector<std::string> lines_;
};

}  // namespace examples
