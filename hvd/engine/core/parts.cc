#include "hvd/engine/core/parts.h"

#include <algorithm>

namespace hvd {

Backend* EngineParts::backend_for(const BatchTraits& traits) const {
  const auto found = std::find_if(backends.begin(), backends.end(), [&](const auto& backend) { return backend->supports(traits); });
  return found == backends.end() ? nullptr : found->get();
}

}  // namespace hvd
