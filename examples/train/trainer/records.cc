#include "examples/train/trainer/records.h"

#include <filesystem>
#include <fstream>
#include <functional>
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

void write_file(const std::string& path, const char* option, const std::function<void(std::ostream&)>& content) {
  if (path.empty()) return;
  replace_file(path, [&](const std::string& name) {
    std::ofstream out(name);
    content(out);
    out.close();
    if (!out) {
      throw std::runtime_error("cannot write " + path + "; give " + option +
                               " a name in a folder that exists, can be written to and is not full");
    }
  });
}

}  // namespace

nlohmann::json to_json(const Record& record) { return fields(record); }

RecordFile::RecordFile(std::string json, std::string csv, std::int64_t epochs_done) : json_(std::move(json)), csv_(std::move(csv)) {
  if (epochs_done > 0 && std::filesystem::exists(json_)) read_json(epochs_done);
  if (epochs_done > 0 && std::filesystem::exists(csv_)) read_csv(epochs_done);
  write();
}

void RecordFile::read_json(std::int64_t epochs_done) {
  std::ifstream in(json_);
  const auto old = nlohmann::json::parse(in, nullptr, /*allow_exceptions=*/false);
  if (!old.is_array()) throw std::runtime_error(json_ + " is not a file of records; remove it or give --json another name");
  for (const auto& record : old) {
    if (record.is_object() && record.value("epoch", epochs_done + 1) <= epochs_done) records_.push_back(record);
  }
}

void RecordFile::read_csv(std::int64_t epochs_done) {
  std::ifstream in(csv_);
  std::string line;
  if (!std::getline(in, line) || line != csv_names()) {
    throw std::runtime_error(csv_ + " does not begin with the names of this program's records; remove it or give --csv another name");
  }
  while (std::getline(in, line)) {
    if (std::strtoll(line.c_str(), nullptr, 10) <= epochs_done) lines_.push_back(line);
  }
}

void RecordFile::add(const Record& record) {
  records_.push_back(to_json(record));
  lines_.push_back(csv_values(record));
  write();
}

void RecordFile::write() const {
  write_file(json_, "--json", [&](std::ostream& out) { out << records_.dump(2) << '\n'; });
  write_file(csv_, "--csv", [&](std::ostream& out) {
    out << csv_names() << '\n';
    for (const auto& line : lines_) out << line << '\n';
  });
}

}  // namespace examples
