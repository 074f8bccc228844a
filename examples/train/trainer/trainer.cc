#include "examples/train/trainer/trainer.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "examples/train/trainer/atomic_file.h"
#include "examples/train/trainer/collectively.h"
#include "examples/train/trainer/setup.h"

namespace examples {
Trainer::Trainer(const Options& options)
    : options_(options), shard_{static_cast<std::size_t>(hvd::rank()), static_cast<std::size_t>(hvd::size())}, display_(hvd::rank()) {
  if (options_.threads > 0) torch::set_num_threads(static_cast<int>(options_.threads));  // otherwise hvd::init() has shared out the cores
  load_inputs();
  hvd::broadcast_parameters(*model_, 0);
  hvd::broadcast_optimizer_state(*optimizer_, 0);
  fail_on_all([&] {
    if (options_.sync_bn && synchronize_batch_norm(*model_) == 0) display_.line("--sync-bn: the model has no batch norm");
    strategy_.emplace(options_, model_, *optimizer_, device_);
  });
  restore();
  loss_sum_ = torch::zeros({}, torch::dtype(torch::kFloat64).device(device_));
  if (position_.loss_sums.size() == shard_.ranks) {
    loss_sum_.fill_(position_.loss_sums[shard_.rank]);
  } else if (shard_.rank == 0) {
    loss_sum_.fill_(position_.loss_sum());
  }
  display_.line(describe(options_, data_, *model_, device_));
}

/// Everything that depends on what this rank finds on its own machine.
void Trainer::load_inputs() {
  collectively([&] {
    device_ = choose_device(options_.device);
    data_ = load_dataset(options_.dataset, options_.data, options_.seed);
    loader_ = std::make_unique<BatchLoader>(
        data_,
        BatchPlan::Options{.items = static_cast<std::size_t>(data_.train.size()),
                           .batch_size = static_cast<std::size_t>(options_.batch_size),
                           .accumulate = static_cast<std::size_t>(options_.accumulate),
                           .shard = shard_,
                           .seed = options_.seed},
        BatchLoader::Options{
            .workers = static_cast<std::size_t>(options_.workers), .ahead = 2, .pinned = options_.pin_memory && device_.is_cuda()});
    model_ = make_model(options_, data_, device_);
    optimizer_ = make_optimizer(options_, *model_);
  });
}

/// The files: the checkpoint, and the records of rank 0.
void Trainer::restore() {
  if (!options_.checkpoint.empty()) {
    checkpoint_.emplace(options_.checkpoint, identity_of(options_, data_), [this] { return strategy_->compression_memory(); });
    if (options_.resume) fail_on_all([&] { position_ = checkpoint_->load(*model_, strategy_->optimizer(), strategy_->scaler()); });
  }
  on_rank_zero([&] {
    if (!options_.checkpoint.empty()) check_writable(options_.checkpoint);
    records_.emplace(options_.json, position_.epoch);
  });
}

void Trainer::run() {
  if (finished()) {
    display_.line("nothing is left to do: the checkpoint is at epoch " + std::to_string(position_.epoch) + ", step " +
                  std::to_string(position_.step) + "; raise --epochs or --max-steps to go on");
  }
  while (!finished()) {
    train_epoch();
    close_epoch();
  }
}

bool Trainer::finished() const {
  return position_.epoch >= options_.epochs || (options_.max_steps > 0 && position_.step >= options_.max_steps);
}

/// Up to the end of the epoch, or of training.
void Trainer::train_epoch() {
  model_->train();
  loader_->start_epoch(static_cast<std::size_t>(position_.epoch), static_cast<std::size_t>(position_.images));
  start_clock();
  while (!finished()) {
    const auto micro_batches = loader_->next();
    if (micro_batches.empty()) break;
    const auto loss = train_step(micro_batches);
    position_.images = static_cast<std::int64_t>(loader_->position());
    ++position_.step;
    if (position_.step == options_.untimed_steps) start_clock();
    show_progress(loss);
    if (options_.checkpoint_steps > 0 && position_.step % options_.checkpoint_steps == 0) {
      gather_loss();
      save_checkpoint();
    }
  }
}

/// The last micro-batch's loss.
torch::Tensor Trainer::train_step(const std::vector<Batch>& micro_batches) {
  return strategy_->step(micro_batches, [this](const torch::Tensor& loss, const Batch& batch) {
    loss_sum_ += loss.to(torch::kFloat64) * static_cast<double>(batch.labels.size(0));
  });
}

/// Of seconds and images per second.
void Trainer::start_clock() {
  images_at_start_ = position_.images;
  epoch_started_ = std::chrono::steady_clock::now();
}

void Trainer::show_progress(const torch::Tensor& loss) {
  if (!display_.due()) return;
  const auto per_step = static_cast<std::int64_t>(loader_->plan().images_per_step());
  display_.show({.epoch = position_.epoch + 1,
                 .epochs = options_.epochs,
                 .step = position_.images / per_step,
                 .steps = static_cast<std::int64_t>(loader_->plan().steps_per_epoch()),
                 .images_per_second = images_per_second()},
                loss.item<double>());
}

double Trainer::images_per_second() const {
  const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - epoch_started_;
  return static_cast<double>(position_.images - images_at_start_) / std::max(spent.count(), 1e-9);
}

/// Evaluates, reports and saves.
void Trainer::close_epoch() {
  gather_loss();
  const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - epoch_started_;
  Record record{.epoch = position_.epoch + 1,
                .step = position_.step,
                .train_loss = position_.loss_sum() / static_cast<double>(std::max<std::int64_t>(position_.images, 1)),
                .seconds = spent.count(),
                .images_per_second = images_per_second(),
                .world_size = hvd::size()};
  const auto batch_size = static_cast<std::size_t>(std::max<std::int64_t>(options_.batch_size, 100));
  {
    const auto mixed = strategy_->autocast();
    hvd::AveragedBuffers means(*model_);  // batch norm's statistics of what each rank saw
    record.test = evaluate_share(*model_, data_, shard_, batch_size, device_).average();
    if (loader_->over()) means.keep();
  }
  if (loader_->over()) {
    position_ = {.epoch = position_.epoch + 1, .step = position_.step};
    loss_sum_.zero_();
  }
  display_.show(record, options_.epochs);
  on_rank_zero([&] { records_->add(record); });
  if (!options_.checkpoint.empty()) save_checkpoint();
}

/// What the images of this epoch lost on each rank. A loss that is no number ends training on all ranks.
void Trainer::gather_loss() {
  position_.loss_sums = hvd::allgather_object(loss_sum_.item<double>());
  if (std::isfinite(position_.loss_sum())) return;
  std::ostringstream words;
  words << "the training loss is " << position_.loss_sum() << " by step " << position_.step
        << ": training diverged; try a smaller --lr than " << options_.learning_rate;
  throw Refused(hvd::rank() == 0 ? words.str() : std::string());
}

void Trainer::save_checkpoint() {
  fail_on_all([&] { checkpoint_->save(*model_, strategy_->optimizer(), position_, strategy_->scaler()); });
}

}  // namespace examples
