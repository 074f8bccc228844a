#pragma once
/// What training tells: a record after each epoch, which goes to files (--json, --csv,
/// --tensorboard) and, while training runs, to people. Rank 0 alone writes. What writes files fails
/// by throwing std::runtime_error that names the file and what to do.

#include <hvd/torch.h>

#include <chrono>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "examples/train/images/reader.h"
#include "examples/train/trainer/event_file.h"
#include "examples/train/trainer/options.h"

namespace examples {

/// What is known after each epoch.
struct Record {
  std::int64_t epoch = 0;        ///< from 1
  std::int64_t step = 0;         ///< since the beginning
  double train_loss = 0;         ///< mean over the images of the epoch, as they were trained on
  hvd::Evaluation test;          ///< in the file: loss, top1, top5
  double seconds = 0;            ///< of training, without evaluation
  double images_per_second = 0;  ///< of all ranks together
  int world_size = 1;
  double learning_rate = 0;  ///< of the last step
  double seconds_input = 0;  ///< of the training's seconds, mean over ranks: waiting for batches
  double seconds_communication = 0;  ///< and waiting for other ranks' gradients after backward
  std::int64_t peak_bytes = 0;       ///< of memory, of the rank that had most
  std::int64_t gpu_peak_bytes = 0;  ///< and of its GPU's, as LibTorch allocates it; 0 without a GPU
  std::int64_t bad_training_images = 0;  ///< files that were tried in vain, by all ranks
  std::int64_t bad_test_images = 0;
};

nlohmann::json to_json(const Record& record);

/// A JSON array with an object per epoch, and the same as comma-separated values, whole at every
/// moment.
class RecordFile {
 public:
  /// Writes the files at once, so that one that cannot be written is found out before training.
  /// Of a resumed run, records of so many epochs are kept where a file is there already, and that
  /// of the next one, which was begun, up to `steps_done`; 0 begins anew. An empty path: no file.
  RecordFile(std::string json, std::string csv, std::int64_t epochs_done, std::int64_t steps_done);
  /// Instead of the record of the epoch that was begun, if it is of that one.
  void add(const Record& record);

 private:
  void read_json(std::int64_t steps_done);
  void read_csv(std::int64_t steps_done);
  void write() const;

  std::string json_, csv_;
  std::int64_t begun_;  ///< epoch that goes on
  std::vector<nlohmann::json> records_;
  std::vector<std::string> lines_;
};

/// Where rank 0's records go: files, and TensorBoard.
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

/// Where training stands, for people.
struct Moment {
  std::int64_t epoch = 1, epochs = 1;
  std::int64_t step = 0, steps = 1;  ///< within the epoch
  double images_per_second = 0;
};

/// What training says while it runs: a bar that is redrawn in place on a terminal, a plain line now
/// and then elsewhere. It is silent on all ranks but 0, writes to standard output and never fails.
class Display {
 public:
  explicit Display(int rank);

  /// Whether it is time to show something again. The loss costs a wait for the device: ask first.
  bool due() const;
  void show(const Moment& moment, double loss);
  void show(const Record& record, std::int64_t epochs);
  void line(const std::string& text);

 private:
  void clear_bar();

  bool shown_;
  bool terminal_;
  bool bar_drawn_ = false;
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

/// Counts the image files that could not be used and, if asked, names them on standard error, each
/// once, at most twenty. Each rank has one, which never fails.
class BadImageLog {
 public:
  BadImageLog(int rank, bool names) : rank_(rank), names_(names) {}

  void add(const std::vector<BadImage>& images);
  /// How many were added since this was last called.
  std::int64_t take_count();

 private:
  int rank_;
  bool names_;
  std::int64_t count_ = 0;
  std::set<std::string> named_;
};

/// The first one, for an error.
std::string refusal_of(const std::vector<BadImage>& images);

}  // namespace examples
