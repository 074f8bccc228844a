#include "examples/train/trainer/checkpoint.h"

#include <nlohmann/json.hpp>
#include <numeric>
#include <stdexcept>

namespace examples {
namespace {

std::string words_of(const Position& position) {
  return nlohmann::json{{"epoch", position.epoch}, {"images", position.images}, {"step", position.step}, {"loss_sums", position.loss_sums}}
      .dump();
}

Position position_of(const std::string& words) {
  const auto stored = nlohmann::json::parse(words);
  const auto sums = stored.contains("loss_sums") ? stored.at("loss_sums") : nlohmann::json::array({stored.at("loss_sum")});  // or older
  return {.epoch = stored.at("epoch"), .images = stored.at("images"), .step = stored.at("step"), .loss_sums = sums};
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

}  // namespace

double Position::loss_sum() const { return std::accumulate(loss_sums.begin(), loss_sums.end(), 0.0); }

CheckpointFile::CheckpointFile(const std::string& folder, Identity identity, std::function<std::vector<torch::Tensor>()> of_rank)
    : file_(folder + "/checkpoint.pt", {.load_options = false, .average_buffers = true, .of_rank = std::move(of_rank)}),
      identity_(std::move(identity)) {}

void CheckpointFile::save(const torch::nn::Module& model, torch::optim::Optimizer& optimizer, const Position& position,
                          const std::optional<hvd::GradScaler>& scaler) const {
  nlohmann::json identity = nlohmann::json::object();
  for (const auto& [name, value] : identity_) identity[name] = value;
  hvd::Checkpoint::Extra extra{.strings = {{"identity", identity.dump()}, {"position", words_of(position)}}, .tensors = {}};
  if (scaler) extra.strings["scaler"] = words_of(scaler->state());
  file_.save(model, optimizer, position.step, extra);
}

Position CheckpointFile::load(torch::nn::Module& model, torch::optim::Optimizer& optimizer, std::optional<hvd::GradScaler>& scaler) const {
  if (!file_.exists())
    throw std::runtime_error("there is no " + file_.path() + " to resume from; begin without --resume, or name the right folder");
  try {
    auto extra = file_.read_extra();
    check_identity(extra.strings["identity"]);
    file_.load(model, optimizer, extra);
    if (scaler && extra.strings.contains("scaler")) scaler->load_state(scaler_of(extra.strings["scaler"]));
    return position_of(extra.strings["position"]);
  } catch (const hvd::CheckpointError& error) {
    throw std::runtime_error(std::string(error.what()) + "; remove it or name another folder");
  } catch (const nlohmann::json::exception& error) {
    throw std::runtime_error(file_.path() + " is damaged or no checkpoint of this program (" + error.what() +
                             "); remove it or name another folder");
  }
}

void CheckpointFile::check_identity(const std::string& stored) const {
  const auto theirs = nlohmann::json::parse(stored, nullptr, /*allow_exceptions=*/false);
  for (const auto& [name, mine] : identity_) {
    const std::string value = theirs.is_object() && theirs.contains(name) ? theirs[name].get<std::string>() : "nothing";
    if (value == mine) continue;
    throw std::runtime_error(file_.path() + " is the checkpoint of another run: its " + name + " is " + value + ", here it is " + mine +
                             "; make them the same, or name another folder");
  }
}

}  // namespace examples
