#include "examples/train/trainer/checkpoint.h"

#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>
#include <sstream>
#include <stdexcept>

namespace examples {
namespace {

std::string words_of(const Position& position) {
  return nlohmann::json{{"epoch", position.epoch},
                        {"images", position.images},
                        {"step", position.step},
                        {"loss_sums", position.loss_sums}}
      .dump();
}

Position position_of(const std::string& words) {
  const auto stored = nlohmann::json::parse(words);
  // or older
  const auto sums = stored.contains("loss_sums") ? stored.at("loss_sums")
                                                 : nlohmann::json::array({stored.at("loss_sum")});
  return {.epoch = stored.at("epoch"),
          .images = stored.at("images"),
          .step = stored.at("step"),
          .loss_sums = sums};
}

std::string words_of(const hvd::GradScalerState& state) {
  return nlohmann::json{{"scale", state.scale},
                        {"growth_factor", state.growth_factor},
                        {"backoff_factor", state.backoff_factor},
                        {"growth_interval", state.growth_interval},
                        {"growth_tracker", state.growth_tracker}}
      .dump();
}

hvd::GradScalerState scaler_of(const std::string& words) {
  const auto stored = nlohmann::json::parse(words);
  return {.scale = stored.at("scale"),
          .growth_factor = stored.at("growth_factor"),
          .backoff_factor = stored.at("backoff_factor"),
          .growth_interval = stored.at("growth_interval"),
          .growth_tracker = stored.at("growth_tracker")};
}

torch::Tensor bytes_of(const hvd::ExponentialMovingAverage& average) {
  torch::serialize::OutputArchive archive;
  average.save(archive);
  std::ostringstream out;
  archive.save_to(out);
  const std::string bytes = out.str();
  auto tensor = torch::empty({static_cast<std::int64_t>(bytes.size())}, torch::kUInt8);
  std::memcpy(tensor.data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

void load_bytes(hvd::ExponentialMovingAverage& average, const torch::Tensor& stored) {
  const auto bytes = stored.to(torch::kCPU).contiguous();
  torch::serialize::InputArchive archive;
  archive.load_from(static_cast<const char*>(bytes.data_ptr()),
                    static_cast<std::size_t>(bytes.numel()));
  average.load(archive);
}

}  // namespace

double Position::loss_sum() const {
  return std::accumulate(loss_sums.begin(), loss_sums.end(), 0.0);
}

CheckpointFile::CheckpointFile(const std::string& folder, Identity identity,
                               std::function<std::vector<torch::Tensor>()> of_rank,
                               std::vector<std::string> class_names)
    : file_(folder + "/checkpoint.pt",
            {.load_options = false, .average_buffers = true, .of_rank = std::move(of_rank)}),
      identity_(std::move(identity)),
      class_names_(std::move(class_names)) {}

void CheckpointFile::save(const torch::nn::Module& model, torch::optim::Optimizer& optimizer,
                          const hvd::ElasticSampler& sampler, const Position& position,
                          const std::optional<hvd::GradScaler>& scaler,
                          const hvd::ExponentialMovingAverage* average) const {
  nlohmann::json identity = nlohmann::json::object();
  std::ostringstream dealt;
  torch::save(sampler, dealt);
  for (const auto& [name, value] : identity_) identity[name] = value;
  hvd::Checkpoint::Extra extra{.strings = {{"identity", identity.dump()},
                                           {"position", words_of(position)},
                                           {"sampler", dealt.str()}},
                               .tensors = {}};
  if (scaler) extra.strings["scaler"] = words_of(scaler->state());
  if (!class_names_.empty()) {  // a name may be any bytes
    extra.strings["classes"] =
        nlohmann::json(class_names_).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  }
  if (average != nullptr) extra.tensors["average"] = bytes_of(*average);
  file_.save(model, optimizer, position.step, extra);
}

Position CheckpointFile::load(torch::nn::Module& model, torch::optim::Optimizer& optimizer,
                              hvd::ElasticSampler& sampler, std::optional<hvd::GradScaler>& scaler,
                              std::optional<hvd::ExponentialMovingAverage>* average,
                              double decay) const {
  if (!file_.exists())
    throw std::runtime_error("there is no " + file_.path() +
                             " to resume from; begin without --resume, or name the right folder");
  try {
    auto extra = file_.read_extra();
    check_identity(extra.strings["identity"]);
    check_class_names(extra.strings["classes"]);
    file_.load(model, optimizer, extra);
    if (average != nullptr) {
      average->emplace(model, hvd::ExponentialMovingAverageOptions{.decay = decay});
      if (extra.tensors.contains("average")) load_bytes(**average, extra.tensors["average"]);
    }
    if (scaler && extra.strings.contains("scaler"))
      scaler->load_state(scaler_of(extra.strings["scaler"]));
    const auto position = position_of(extra.strings["position"]);
    if (!extra.strings.contains("sampler")) {
      sampler.set_epoch(static_cast<std::size_t>(position.epoch));
      return {.epoch = position.epoch, .step = position.step};
    }
    std::istringstream dealt(extra.strings["sampler"]);
    torch::load(sampler, dealt);
    return position;
  } catch (const hvd::CheckpointError& error) {
    throw std::runtime_error(std::string(error.what()) + "; remove it or name another folder");
  } catch (const nlohmann::json::exception& error) {
    throw std::runtime_error(file_.path() + " is damaged or no checkpoint of this program (" +
                             error.what() + "); remove it or name another folder");
  }
}

/// Labels are numbers: a checkpoint whose class 17 is another one would be right by accident.
void CheckpointFile::check_class_names(const std::string& stored) const {
  if (class_names_.empty() || stored.empty()) return;
  const auto mine = nlohmann::json::parse(
      nlohmann::json(class_names_).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  const auto theirs = nlohmann::json::parse(stored);
  for (std::size_t i = 0; i < std::max(mine.size(), theirs.size()); ++i) {
    const auto name = [i](const nlohmann::json& names) {
      return i < names.size() ? names[i].get<std::string>() : std::string("nothing");
    };
    if (name(mine) == name(theirs)) continue;
    throw std::runtime_error(
        file_.path() + " is the checkpoint of another run: its class " + std::to_string(i) +
        " is " + name(theirs) + ", here it is " + name(mine) +
        "; give the folder with the same classes, or name another folder for checkpoints");
  }
}

void CheckpointFile::check_identity(const std::string& stored) const {
  const auto theirs = nlohmann::json::parse(stored, nullptr, /*allow_exceptions=*/false);
  for (const auto& [name, mine] : identity_) {
    const std::string value =
        theirs.is_object() && theirs.contains(name) ? theirs[name].get<std::string>() : "nothing";
    if (value == mine) continue;
    throw std::runtime_error(file_.path() + " is the checkpoint of another run: its " + name +
                             " is " + value + ", here it is " + mine +
                             "; make them the same, or name another folder");
  }
}

}  // namespace examples
