#include "examples/train/trainer/reporter.h"

namespace examples {

Reporter::Reporter(const Options& options, std::int64_t epochs_done, std::int64_t steps_done)
    : records_(options.json, options.csv, epochs_done) {
  if (!options.tensorboard.empty()) events_.emplace(options.tensorboard, steps_done);
}

void Reporter::add(const Record& record) {
  records_.add(record);
  if (!events_) return;
  const std::pair<const char*, double> scalars[] = {{"train/loss", record.train_loss},
                                                    {"train/learning_rate", record.learning_rate},
                                                    {"train/images_per_second", record.images_per_second},
                                                    {"test/loss", record.test.loss},
                                                    {"test/top1", record.test.top1},
                                                    {"test/top5", record.test.top5},
                                                    {"time/seconds", record.seconds},
                                                    {"time/input", record.seconds_input},
                                                    {"time/communication", record.seconds_communication},
                                                    {"memory/peak_bytes", static_cast<double>(record.peak_bytes)},
                                                    {"memory/gpu_peak_bytes", static_cast<double>(record.gpu_peak_bytes)}};
  for (const auto& [tag, value] : scalars) events_->scalar(tag, record.step, value);
  events_->flush();
}

void Reporter::add_loss(std::int64_t step, double loss, double learning_rate) {
  if (!events_) return;
  events_->scalar("step/loss", step, loss);
  events_->scalar("step/learning_rate", step, learning_rate);
}

}  // namespace examples
