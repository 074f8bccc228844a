#include "torch_bindings/checkpoint/checkpoint_part.h"

#include <c10/util/Type.h>
#include <torch/torch.h>

#include "torch_bindings/files/archives.h"
#include "torch_bindings/optimizer/grad_scaler.h"

namespace hvd {

std::string CheckpointPart::name_of(const std::type_info& type) {
  return c10::demangle(type.name());
}

CheckpointPart::CheckpointPart(GradScaler& scaler)
    : type_(name_of(typeid(GradScaler))),
      save_([&scaler](torch::serialize::OutputArchive& archive) {
        const GradScalerState state = scaler.state();
        archive.write("enabled", c10::IValue(scaler.is_enabled()));
        archive.write("scale", c10::IValue(state.scale));
        archive.write("growth_factor", c10::IValue(state.growth_factor));
        archive.write("backoff_factor", c10::IValue(state.backoff_factor));
        archive.write("growth_interval", c10::IValue(state.growth_interval));
        archive.write("growth_tracker", c10::IValue(state.growth_tracker));
      }),
      load_([&scaler](torch::serialize::InputArchive& archive) {
        const auto read = [&archive](const char* key) { return detail::value_at(archive, key); };
        if (!read("enabled").toBool()) {
          scaler.load_state({});
        } else {
          scaler.load_state({.scale = read("scale").toDouble(),
                             .growth_factor = read("growth_factor").toDouble(),
                             .backoff_factor = read("backoff_factor").toDouble(),
                             .growth_interval = read("growth_interval").toInt(),
                             .growth_tracker = read("growth_tracker").toInt()});
        }
      }) {}

CheckpointPart::CheckpointPart(const at::Generator& generator)
    : type_("at::Generator"), generator_(generator) {}

}  // namespace hvd
