#pragma once
/// A schedule says by how much the learning rate is multiplied, as a pure function of how far training has come: a run that is resumed, on
/// any number of ranks, goes on with the same rates. It needs no LibTorch.

#include <cstdint>
#include <string>
#include <vector>

namespace examples {

struct Schedule {
  std::string kind = "none";        ///< none, step or cosine
  std::vector<std::int64_t> steps;  ///< step: after so many epochs the rate is multiplied by `gamma`, each time
  double gamma = 0.1;
  double epochs = 1;         ///< cosine: the rate is 0 then
  double warmup_epochs = 0;  ///< the rate grows in a straight line from `first_factor` to what it would be
  double first_factor = 0;
};

/// The factor after `epochs_done` epochs, whole and begun.
double rate_factor(const Schedule& schedule, double epochs_done);

/// Reads "30,60,80": whole numbers above 0 that rise. Throws std::invalid_argument with what is wrong.
std::vector<std::int64_t> parse_steps(const std::string& text);

}  // namespace examples
