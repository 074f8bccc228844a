#include "examples/train/trainer/report.h"

#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <stdexcept>

#include "examples/train/trainer/atomic_file.h"

namespace examples {
namespace {

/// In the order in which the comma-separated values have them.
nlohmann::ordered_json fields(const Record& record) {
  return {{"epoch", record.epoch},
          {"step", record.step},
          {"train_loss", record.train_loss},
          {"loss", record.test.loss},
          {"top1", record.test.top1},
          {"top5", record.test.top5},
          {"test_images", record.test.samples},
          {"seconds", record.seconds},
          {"images_per_second", record.images_per_second},
          {"world_size", record.world_size},
          {"learning_rate", record.learning_rate},
          {"seconds_input", record.seconds_input},
          {"seconds_communication", record.seconds_communication},
          {"peak_bytes", record.peak_bytes},
          {"gpu_peak_bytes", record.gpu_peak_bytes},
          {"bad_training_images", record.bad_training_images},
          {"bad_test_images", record.bad_test_images}};
}

std::string csv_names() {
  std::string line;
  const auto names = fields({});
  for (const auto& [name, value] : names.items()) line += (line.empty() ? "" : ",") + name;
  return line;
}

std::string csv_values(const Record& record) {
  std::string line;
  const auto values = fields(record);
  for (const auto& value : values) line += (line.empty() ? "" : ",") + value.dump();
  return line;
}

constexpr int kBarWidth = 30;
constexpr std::chrono::milliseconds kRedraw{100};
constexpr std::chrono::seconds kNextLine{5};

/// Open MPI gives its ranks a terminal of their own wherever its output really goes: then what
/// counts is mpirun's output.
bool is_terminal() {
  if (::isatty(STDOUT_FILENO) == 0) return false;
  std::error_code error;
  const std::string parent = "/proc/" + std::to_string(::getppid());
  const auto program = std::filesystem::read_symlink(parent + "/exe", error).filename().string();
  if (error || (program != "orterun" && program != "mpirun" && program.rfind("prte", 0) != 0))
    return true;
  const auto output = std::filesystem::read_symlink(parent + "/fd/1", error).string();
  return !error && (output.rfind("/dev/pts/", 0) == 0 || output.rfind("/dev/tty", 0) == 0);
}

constexpr std::size_t kMostNamed = 20;

}  // namespace

nlohmann::json to_json(const Record& record) { return fields(record); }

RecordFile::RecordFile(std::string json, std::string csv, std::int64_t epochs_done,
                       std::int64_t steps_done)
    : json_(std::move(json)), csv_(std::move(csv)), begun_(epochs_done + 1) {
  if (steps_done > 0 && std::filesystem::exists(json_)) read_json(steps_done);
  if (steps_done > 0 && std::filesystem::exists(csv_)) read_csv(steps_done);
  write();
}

void RecordFile::read_json(std::int64_t steps_done) {
  std::ifstream in(json_);
  const auto old = nlohmann::json::parse(in, nullptr, /*allow_exceptions=*/false);
  if (!old.is_array())
    throw std::runtime_error(json_ +
                             " is not a file of records; remove it or give --json another name");
  for (const auto& record : old) {
    if (record.is_object() && record.value("epoch", begun_ + 1) <= begun_ &&
        record.value("step", steps_done + 1) <= steps_done)
      records_.push_back(record);
  }
}

void RecordFile::read_csv(std::int64_t steps_done) {
  std::ifstream in(csv_);
  std::string line;
  if (!std::getline(in, line) || line != csv_names()) {
    throw std::runtime_error(csv_ +
                             " does not begin with the names of this program's records; remove it "
                             "or give --csv another name");
  }
  while (std::getline(in, line)) {
    char* comma = nullptr;
    const auto epoch = std::strtoll(line.c_str(), &comma, 10);
    const auto step = *comma == ',' ? std::strtoll(comma + 1, nullptr, 10) : steps_done + 1;
    if (epoch <= begun_ && step <= steps_done) lines_.push_back(line);
  }
}

void RecordFile::add(const Record& record) {
  if (record.epoch == begun_) {
    std::erase_if(records_, [&](const auto& old) { return old.value("epoch", begun_) == begun_; });
    std::erase_if(lines_, [&](const std::string& old) {
      return std::strtoll(old.c_str(), nullptr, 10) == begun_;
    });
  }
  records_.push_back(to_json(record));
  lines_.push_back(csv_values(record));
  write();
}

void RecordFile::write() const {
  if (!json_.empty())
    replace_file(json_, "--json",
                 [&](std::ostream& out) { out << nlohmann::json(records_).dump(2) << '\n'; });
  if (csv_.empty()) return;
  replace_file(csv_, "--csv", [&](std::ostream& out) {
    out << csv_names() << '\n';
    for (const auto& line : lines_) out << line << '\n';
  });
}

Reporter::Reporter(const Options& options, std::int64_t epochs_done, std::int64_t steps_done)
    : records_(options.json, options.csv, epochs_done, steps_done) {
  if (!options.tensorboard.empty()) events_.emplace(options.tensorboard, steps_done);
}

void Reporter::add(const Record& record) {
  records_.add(record);
  if (!events_) return;
  const std::pair<const char*, double> scalars[] = {
      {"train/loss", record.train_loss},
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

Display::Display(int rank) : shown_(rank == 0), terminal_(shown_ && is_terminal()) {}

bool Display::due() const {
  return shown_ && std::chrono::steady_clock::now() - last_ >=
                       (terminal_ ? std::chrono::duration_cast<std::chrono::milliseconds>(kRedraw)
                                  : kNextLine);
}

void Display::show(const Moment& moment, double loss) {
  if (!shown_) return;
  last_ = std::chrono::steady_clock::now();
  std::string bar;
  if (terminal_) {
    const auto filled = static_cast<std::size_t>(kBarWidth * moment.step / moment.steps);
    bar = "[" + std::string(filled, '=') + std::string(kBarWidth - filled, ' ') + "] ";
  }
  std::printf("%sepoch %lld/%lld  %sstep %lld/%lld  loss %.4f  %.0f images/s%s",
              terminal_ ? "\r\033[K" : "", static_cast<long long>(moment.epoch),
              static_cast<long long>(moment.epochs), bar.c_str(),
              static_cast<long long>(moment.step), static_cast<long long>(moment.steps), loss,
              moment.images_per_second, terminal_ ? "" : "\n");
  bar_drawn_ = terminal_;
  std::fflush(stdout);
}

void Display::show(const Record& record, std::int64_t epochs) {
  if (!shown_) return;
  clear_bar();
  last_ = std::chrono::steady_clock::now();
  std::printf(
      "epoch %lld/%lld  test loss %.4f, top-1 %.2f %%, top-5 %.2f %%  (training loss %.4f, %.1f s, "
      "%.0f images/s)\n",
      static_cast<long long>(record.epoch), static_cast<long long>(epochs), record.test.loss,
      100 * record.test.top1, 100 * record.test.top5, record.train_loss, record.seconds,
      record.images_per_second);
  std::fflush(stdout);
}

void Display::line(const std::string& text) {
  if (!shown_) return;
  clear_bar();
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
}

void Display::clear_bar() {
  if (bar_drawn_) std::printf("\r\033[K");
  bar_drawn_ = false;
}

void BadImageLog::add(const std::vector<BadImage>& images) {
  count_ += static_cast<std::int64_t>(images.size());
  for (const auto& image : images) {
    if (!names_ || named_.size() == kMostNamed || !named_.insert(image.file).second) continue;
    std::fprintf(stderr, "train: rank %d: bad image %s: %s%s\n", rank_, image.file.c_str(),
                 image.why.c_str(),
                 named_.size() == kMostNamed ? "; others will be counted only" : "");
  }
}

std::int64_t BadImageLog::take_count() {
  const auto count = count_;
  count_ = 0;
  return count;
}

std::string refusal_of(const std::vector<BadImage>& images) {
  return "bad image " + images.front().file + ": " + images.front().why +
         "; mend or remove the file, or take --bad-images skip";
}

}  // namespace examples
