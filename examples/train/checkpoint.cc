#include "examples/train/checkpoint.h"

#include <nlohmann/json.hpp>
#include <stdexcept>

#include "examples/train/atomic_file.h"
#include "examples/train/together.h"

namespace examples {
namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

c10::IValue read_value(InputArchive& archive, const std::string& key) {
  c10::IValue value;
  archive.read(key, value);
  return value;
}

/// Loads the state of an optimizer and keeps its options.
void load_state(torch::optim::Optimizer& optimizer, InputArchive& archive) {
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options;
  for (const auto& group : optimizer.param_groups()) options.push_back(group.options().clone());
  optimizer.load(archive);
  for (std::size_t i = 0; i < options.size(); ++i) optimizer.param_groups().at(i).set_options(std::move(options[i]));
}

}  // namespace

CheckpointFile::CheckpointFile(const std::string& folder, Identity identity)
    : file_(std::filesystem::path(folder) / "checkpoint.pt"), identity_(std::move(identity)) {}

void CheckpointFile::save(const torch::nn::Module& model, const torch::optim::Optimizer& optimizer, const Position& position) const {
  nlohmann::json identity = nlohmann::json::object();
  for (const auto& [name, value] : identity_) identity[name] = value;
  OutputArchive archive;
  archive.write("identity", c10::IValue(identity.dump()));
  archive.write("epoch", c10::IValue(position.epoch));
  archive.write("images", c10::IValue(position.images));
  archive.write("step", c10::IValue(position.step));
  archive.write("loss_sum", c10::IValue(position.loss_sum));
  OutputArchive model_archive(archive.compilation_unit()), optimizer_archive(archive.compilation_unit());
  model.save(model_archive);
  optimizer.save(optimizer_archive);
  archive.write("model", model_archive);
  archive.write("optimizer", optimizer_archive);
  replace_file(file_, [&](const std::string& name) { archive.save_to(name); });
}

Position CheckpointFile::load(torch::nn::Module& model, torch::optim::Optimizer& optimizer, torch::Device device) const {
  if (!std::filesystem::exists(file_)) {
    throw std::runtime_error("there is no " + file_.string() + " to resume from; begin without --resume, or name the right folder");
  }
  InputArchive archive;
  std::string stored;
  try {
    archive.load_from(file_.string(), device);
    stored = read_value(archive, "identity").toStringRef();
    check_identity(stored);
    return read(archive, model, optimizer);
  } catch (const c10::Error& error) {
    const auto words = words_of(error);
    throw std::runtime_error(file_.string() + " is damaged or no checkpoint of this program (" +
                             words.substr(0, words.find_first_of(".\n")) + "); remove it or name another folder");
  }
}

void CheckpointFile::check_identity(const std::string& stored) const {
  const auto theirs = nlohmann::json::parse(stored, nullptr, /*allow_exceptions=*/false);
  for (const auto& [name, mine] : identity_) {
    const std::string value = theirs.is_object() && theirs.contains(name) ? theirs[name].get<std::string>() : "nothing";
    if (value == mine) continue;
    throw std::runtime_error(file_.string() + " is the checkpoint of another run: its " + name + " is " + value + ", here it is " + mine +
                             "; make them the same, or name another folder");
  }
}

Position CheckpointFile::read(InputArchive& archive, torch::nn::Module& model, torch::optim::Optimizer& optimizer) const {
  const Position position{.epoch = read_value(archive, "epoch").toInt(),
                          .images = read_value(archive, "images").toInt(),
                          .step = read_value(archive, "step").toInt(),
                          .loss_sum = read_value(archive, "loss_sum").toDouble()};
  InputArchive model_archive, optimizer_archive;
  archive.read("model", model_archive);
  archive.read("optimizer", optimizer_archive);
  model.load(model_archive);
  load_state(optimizer, optimizer_archive);
  return position;
}

}  // namespace examples
