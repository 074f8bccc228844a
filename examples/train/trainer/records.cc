#include "examples/train/trainer/records.h"

#include <filesystem>
#include <fstream>
#include <stdexcept>

#include "examples/train/trainer/atomic_file.h"

namespace examples {

nlohmann::json to_json(const Record& record) {
  return {{"epoch", record.epoch},
          {"step", record.step},
          {"train_loss", record.train_loss},
          {"loss", record.test.loss},
          {"top1", record.test.top1},
          {"top5", record.test.top5},
          {"test_images", record.test.samples},
          {"seconds", record.seconds},
          {"images_per_second", record.images_per_second},
          {"world_size", record.world_size}};
}

RecordFile::RecordFile(std::string path, std::int64_t epochs_done) : path_(std::move(path)) {
  if (path_.empty()) return;
  if (epochs_done > 0 && std::filesystem::exists(path_)) {
    std::ifstream in(path_);
    const auto old = nlohmann::json::parse(in, nullptr, /*allow_exceptions=*/false);
    if (!old.is_array()) throw std::runtime_error(path_ + " is not a file of records; remove it or give --json another name");
    for (const auto& record : old) {
      if (record.is_object() && record.value("epoch", epochs_done + 1) <= epochs_done) records_.push_back(record);
    }
  }
  write();
}

void RecordFile::add(const Record& record) {
  records_.push_back(to_json(record));
  if (!path_.empty()) write();
}

void RecordFile::write() const {
  replace_file(path_, [&](const std::string& name) {
    std::ofstream out(name);
    out << records_.dump(2) << '\n';
    out.close();
    if (!out)
      throw std::runtime_error("cannot write " + path_ + "; give --json a name in a folder that exists, can be written to and is not full");
  });
}

}  // namespace examples
