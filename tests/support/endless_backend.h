#pragma once
/// A backend of tensors of 64-bit integers whose batches never end.

#include <memory>
#include <string_view>

#include "hvd/backend.h"

namespace hvd::test {

class EndlessBackend final : public Backend {
 public:
  [[nodiscard]] std::string_view name() const override { return "endless"; }
  [[nodiscard]] bool supports(const BatchTraits& traits) const override {
    return traits.dtype == DataType::Int64;
  }
  std::unique_ptr<Execution> launch(Batch /*batch*/) override {
    struct Endless final : Execution {
      Progress advance() override { return Progress::Idle; }
    };
    return std::make_unique<Endless>();
  }
};

}  // namespace hvd::test
