#include "examples/train/trainer/trainer.h"

#include <algorithm>
#include <cmath>
#include <sstream>
#include <utility>

#include "examples/train/trainer/atomic_file.h"
#include "examples/train/trainer/collectively.h"

namespace examples {

hvd::EvaluationTally evaluate_share(Classifier& model, const Dataset& data, std::size_t batch_size,
                                    torch::Device device, std::size_t workers,
                                    std::vector<BadImage>* bad, const Precision& precision) {
  const torch::NoGradGuard no_grad;
  const bool was_training = model.is_training();
  model.eval();
  hvd::EvaluationTally tally;
  const hvd::ElasticSampler sampler(static_cast<std::size_t>(data.test.size()), /*shuffle=*/false,
                                    /*seed=*/0, {.shares = hvd::Shares::Uneven});
  const auto loader = torch::data::make_data_loader(
      TestImages(data), sampler, torch::data::DataLoaderOptions(batch_size).workers(workers));
  for (const Batch& batch : *loader) {
    if (bad != nullptr) bad->insert(bad->end(), batch.bad.begin(), batch.bad.end());
    if (batch.target.size(0) == 0) continue;
    tally.add(precision.output(model.forward(precision.input(batch.data.to(device)))),
              batch.target.to(device));
  }
  model.train(was_training);
  return tally;
}

Trainer::Trainer(const Options& options)
    : options_(options),
      display_(hvd::rank()),
      profile_(options.profile, /*skip=*/2, options.profile_steps),
      bad_images_(hvd::rank(), /*names=*/options.bad_images == "skip") {
  if (options_.scale_lr) {
    options_.learning_rate = hvd::scaled_learning_rate(options_.learning_rate, options_.accumulate,
                                                       /*reference_batch_size=*/1);
  }
  // otherwise hvd::init() has shared out the cores
  if (options_.threads > 0) torch::set_num_threads(static_cast<int>(options_.threads));
  load_inputs();
  hvd::broadcast_parameters(*model_, 0);
  hvd::broadcast_optimizer_state(*optimizer_, 0);
  fail_on_all([&] {
    if (options_.sync_bn && synchronize_batch_norm(*model_) == 0)
      display_.line("--sync-bn: the model has no batch norm");
    strategy_.emplace(options_, model_, *optimizer_, device_);
  });
  restore();
  schedule_ = make_schedule(options_, strategy_->optimizer(), steps_per_epoch());
  for (auto done = position_.epoch * steps_per_epoch() + position_.images / images_per_step();
       done > 0; --done)
    schedule_->step();
  learning_rate_ = options_.learning_rate;
  loss_sum_ = torch::zeros({}, torch::dtype(torch::kFloat64).device(device_));
  if (position_.loss_sums.size() == static_cast<std::size_t>(hvd::size())) {
    loss_sum_.fill_(position_.loss_sums[static_cast<std::size_t>(hvd::rank())]);
  } else if (hvd::rank() == 0) {
    loss_sum_.fill_(position_.loss_sum());
  }
  display_.line(describe(options_, data_, *model_, device_));
}

/// Everything that depends on what this rank finds on its own machine.
void Trainer::load_inputs() {
  collectively([&] {
    device_ = choose_device(options_.device);
    data_ = load_dataset({.name = options_.dataset,
                          .directory = options_.data,
                          .seed = options_.seed,
                          .images = {.size = static_cast<int>(options_.image_size),
                                     .resize = static_cast<int>(options_.resize),
                                     .shrink = options_.jpeg_scaling}});
    if (options_.classes > 0 && options_.classes < data_.classes) {
      throw DataError("--classes " + std::to_string(options_.classes) +
                      " is less than the dataset's " + std::to_string(data_.classes));
    }
    if (options_.classes > 0) data_.classes = static_cast<int>(options_.classes);
    batch_size_ = batch_size_of(options_, data_.train.size(), hvd::size());
    sampler_.emplace(static_cast<std::size_t>(data_.train.size()), /*shuffle=*/true, options_.seed,
                     hvd::ElasticSamplerOptions{.shares = hvd::Shares::DropLast});
    const auto workers = static_cast<std::size_t>(options_.workers);
    loader_ = torch::data::make_data_loader(
        TrainingImages(data_, options_.seed, *sampler_), *sampler_,
        torch::data::DataLoaderOptions(static_cast<std::size_t>(batch_size_ * options_.accumulate))
            .workers(workers)
            // two are ahead while one is awaited
            .max_jobs(workers == 0 ? 0 : 2 * workers + 1)
            // every step has as many images
            .drop_last(true));
    model_ = make_model(options_, data_, device_);
    optimizer_ = make_optimizer(options_, *model_);
  });
  if (data_.reader) check_same_files();
}

/// An image is a number in the list of files, so the lists must be the same wherever they were
/// made.
void Trainer::check_same_files() {
  const auto found = hvd::allgather_object(summary_of_files(data_));
  for (std::size_t rank = 1; rank < found.size(); ++rank) {
    if (found[rank] == found[0]) continue;
    throw Refused(hvd::rank() > 0 ? std::string()
                                  : "the ranks find other files in --data " + options_.data +
                                        ": rank 0 " + found[0] + "; rank " + std::to_string(rank) +
                                        " " + found[rank] + "; give every host the same files");
  }
  if (const auto words = remarks(data_); !words.empty()) display_.line("--data: " + words);
}

/// The files: the checkpoint, and the records of rank 0.
void Trainer::restore() {
  if (!options_.checkpoint.empty()) {
    checkpoint_.emplace(
        options_.checkpoint, identity_of(options_, data_),
        [this] { return strategy_->compression_memory(); }, data_.class_names);
    if (options_.resume) {
      fail_on_all([&] {
        auto* const average = options_.ema > 0 ? &average_ : nullptr;
        position_ = checkpoint_->load(*model_, strategy_->optimizer(), *sampler_,
                                      strategy_->scaler(), average, options_.ema);
        strategy_->announce_scale();
      });
    }
  }
  if (options_.ema > 0 && !average_)
    average_.emplace(*model_, hvd::ExponentialMovingAverageOptions{.decay = options_.ema});
  on_rank_zero([&] {
    if (!options_.checkpoint.empty() && !options_.evaluate) check_writable(options_.checkpoint);
    reporter_.emplace(options_, position_.epoch, position_.step);
  });
}

void Trainer::run() {
  if (options_.evaluate) return evaluate_only();
  if (finished()) {
    display_.line("nothing is left to do: the checkpoint is at epoch " +
                  std::to_string(position_.epoch) + ", step " + std::to_string(position_.step) +
                  "; raise --epochs or --max-steps to go on");
  }
  while (!finished()) {
    train_epoch();
    close_epoch();
  }
  if (profile_.finish()) {
    display_.line("the profile is in " + options_.profile);
  } else if (!options_.profile.empty()) {
    display_.line("no profile: it begins after two steps, and there were no more");
  }
  summarize();
}

bool Trainer::finished() const {
  return position_.epoch >= options_.epochs ||
         (options_.max_steps > 0 && position_.step >= options_.max_steps);
}

bool Trainer::epoch_is_over() const {
  return data_.train.size() - static_cast<std::int64_t>(sampler_->processed()) < images_per_step();
}

/// Up to the end of the epoch, or of training.
void Trainer::train_epoch() {
  model_->train();
  reset_peak_bytes();
  reset_device_peak(device_);
  start_clock();
  if (epoch_is_over()) return;  // as the checkpoint had it
  std::optional<hvd::PrefetchedLoader<decltype(loader_)::element_type>> prefetched;
  if (options_.pin_memory && device_.is_cuda())
    prefetched.emplace(hvd::prefetch_to_device(loader_, device_));
  auto batches = prefetched ? prefetched->begin() : loader_->begin();
  const auto end = loader_->end();
  auto more = [&, begun = false]() mutable {
    const Stopwatch watch(spent_.input);
    if (std::exchange(begun, true)) ++batches;
    return batches != end;
  };
  while (!finished() && more()) {
    const Batch batch = std::move(*batches);
    profile_.before_step();
    const auto loss = train_step(batch);
    sampler_->record_batch(static_cast<std::size_t>(batch.target.size(0)));
    position_.images += images_per_step();
    ++position_.step;
    if (position_.step == options_.untimed_steps) start_clock();
    show_progress(loss);
    if (options_.checkpoint_steps > 0 && position_.step % options_.checkpoint_steps == 0) {
      gather_loss();
      save_checkpoint();
    }
  }
}

/// The loss of the batch's last part.
torch::Tensor Trainer::train_step(const Batch& batch) {
  bad_images_.add(batch.bad);
  bad_training_images_ += bad_images_.take_count();
  learning_rate_ = strategy_->optimizer().param_groups().front().options().get_lr();
  // The first rank with a bad image, if any: found out while the step is made, so that it costs no
  // wait of its own.
  std::optional<hvd::Handle<torch::Tensor>> first;
  if (data_.reader && options_.bad_images == "refuse") {
    const auto mine = torch::tensor(batch.bad.empty() ? hvd::size() : hvd::rank(), torch::kInt64);
    first = hvd::allreduce_async(mine, {.name = "train.bad_images", .op = hvd::ReduceOp::Min});
  }
  const auto loss = strategy_->step(
      batch,
      [this](const torch::Tensor& one) {
        loss_sum_ += one.to(torch::kFloat64) * static_cast<double>(batch_size_);
      },
      spent_);
  schedule_->step();
  if (first) {
    const auto rank = first->wait().item<std::int64_t>();
    if (rank < hvd::size())
      throw Refused(rank == hvd::rank() ? refusal_of(batch.bad) : std::string());
  }
  if (average_) {
    const Stopwatch watch(spent_.compute);
    average_->update();
  }
  return loss;
}

/// Of seconds and images per second.
void Trainer::start_clock() {
  images_at_start_ = position_.images;
  epoch_started_ = std::chrono::steady_clock::now();
}

void Trainer::show_progress(const torch::Tensor& loss) {
  const bool due = options_.print_frequency > 0
                       ? hvd::rank() == 0 && position_.step % options_.print_frequency == 0
                       : display_.due();
  if (!due) return;
  const double value = loss.item<double>();
  display_.show({.epoch = position_.epoch + 1,
                 .epochs = options_.epochs,
                 .step = position_.images / images_per_step(),
                 .steps = steps_per_epoch(),
                 .images_per_second = images_per_second()},
                value);
  reporter_->add_loss(position_.step, value, learning_rate_);
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
                .train_loss = position_.loss_sum() /
                              static_cast<double>(std::max<std::int64_t>(position_.images, 1)),
                .test = {},
                .seconds = spent.count(),
                .images_per_second = images_per_second(),
                .world_size = hvd::size(),
                .learning_rate = learning_rate_};
  const bool over = epoch_is_over();
  record.test = evaluate(/*keep_statistics=*/over);
  gather_costs(record);
  if (over) {
    position_ = {.epoch = position_.epoch + 1, .step = position_.step};
    sampler_->set_epoch(static_cast<std::size_t>(position_.epoch));
    loss_sum_.zero_();
  }
  report(record);
  if (!options_.checkpoint.empty()) save_checkpoint();
}

void Trainer::evaluate_only() {
  model_->eval();
  Record record{
      .epoch = position_.epoch, .step = position_.step, .test = {}, .world_size = hvd::size()};
  record.test = evaluate(/*keep_statistics=*/false);
  gather_costs(record);
  report(record);
}

/// On the test images that all ranks share out, with batch norm's statistics of what each has seen.
hvd::Evaluation Trainer::evaluate(bool keep_statistics) {
  const Stopwatch watch(spent_.evaluation);
  const auto batch_size =
      static_cast<std::size_t>(std::max<std::int64_t>(options_.batch_size, 100));
  const auto mixed = strategy_->autocast();
  hvd::AveragedBuffers means(*model_);
  std::optional<hvd::ExponentialMovingAverage::Averaged> averaged;
  std::optional<hvd::AveragedBuffers> means_of_averages;
  if (average_) {
    averaged.emplace(*average_);
    means_of_averages.emplace(*model_);  // each rank has averages of its own statistics
  }
  std::vector<BadImage> bad;
  const auto tally =
      evaluate_share(*model_, data_, batch_size, device_,
                     static_cast<std::size_t>(options_.workers), &bad, precision_of(options_));
  if (data_.reader) {
    bad_images_.add(bad);
    bad_test_images_ += bad_images_.take_count();
    collectively([&] {
      if (!bad.empty() && options_.bad_images == "refuse")
        throw std::runtime_error(refusal_of(bad));
    });
  }
  const auto evaluation = tally.average();
  if (keep_statistics) means.keep();
  return evaluation;
}

/// Where this epoch's time went, memory and bad images, of all ranks.
void Trainer::gather_costs(Record& record) {
  const auto together = [](std::vector<double> mine, hvd::ReduceOp op) {
    const auto all = hvd::allreduce(torch::tensor(mine, torch::kFloat64), {.op = op});
    return std::vector<double>(all.data_ptr<double>(), all.data_ptr<double>() + all.numel());
  };
  const auto means =
      together({spent_.compute, spent_.input, spent_.communication}, hvd::ReduceOp::Average);
  const auto most =
      together({static_cast<double>(peak_bytes()), static_cast<double>(device_peak(device_))},
               hvd::ReduceOp::Max);
  const auto sums =
      together({static_cast<double>(bad_training_images_), static_cast<double>(bad_test_images_)},
               hvd::ReduceOp::Sum);
  record.seconds_input = means[1];
  record.seconds_communication = means[2];
  record.peak_bytes = static_cast<std::int64_t>(most[0]);
  record.gpu_peak_bytes = static_cast<std::int64_t>(most[1]);
  record.bad_training_images = static_cast<std::int64_t>(sums[0]);
  record.bad_test_images = static_cast<std::int64_t>(sums[1]);
  spent_.compute = means[0];
  spent_.input = means[1];
  spent_.communication = means[2];
  spent_before_ += spent_;
  spent_ = {};
  bad_training_images_ = bad_test_images_ = 0;
}

void Trainer::report(const Record& record) {
  display_.show(record, options_.epochs);
  if (record.bad_training_images + record.bad_test_images > 0) {
    display_.line("bad images: " + std::to_string(record.bad_training_images) +
                  " in training, for which others stood in, " +
                  std::to_string(record.bad_test_images) + " left out of the evaluation");
  }
  on_rank_zero([&] { reporter_->add(record); });
}

/// Where the time went: means over the ranks.
void Trainer::summarize() {
  const double all =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - started_).count();
  const auto& spent = spent_before_;
  const double other = all - spent.compute - spent.input - spent.communication - spent.evaluation -
                       spent.checkpoints;
  char text[256];
  std::snprintf(text, sizeof(text),
                "time: %.1f s, of which compute %.1f %%, input %.1f %%, exposed communication %.1f "
                "%%, evaluation %.1f %%, checkpoints %.1f %%, "
                "other (start, records) %.1f %%",
                all, 100 * spent.compute / all, 100 * spent.input / all,
                100 * spent.communication / all, 100 * spent.evaluation / all,
                100 * spent.checkpoints / all, 100 * std::max(other, 0.0) / all);
  display_.line(text);
}

/// What the images of this epoch lost on each rank. A loss that is no number ends training on all
/// ranks.
void Trainer::gather_loss() {
  position_.loss_sums = hvd::allgather_object(loss_sum_.item<double>());
  if (std::isfinite(position_.loss_sum())) return;
  std::ostringstream words;
  words << "the training loss is " << position_.loss_sum() << " by step " << position_.step
        << ": training diverged; try a smaller --lr than " << options_.learning_rate;
  throw Refused(hvd::rank() == 0 ? words.str() : std::string());
}

void Trainer::save_checkpoint() {
  const Stopwatch watch(spent_before_.checkpoints);
  fail_on_all([&] {
    checkpoint_->save(*model_, strategy_->optimizer(), *sampler_, position_, strategy_->scaler(),
                      average_ ? &*average_ : nullptr);
  });
}

}  // namespace examples
