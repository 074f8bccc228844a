#include "hvd/engine/core/parts.h"

#include <algorithm>

#include "hvd/base/text.h"

namespace hvd {

Backend* EngineParts::backend_for(const BatchTraits& traits) const {
  const auto found = std::find_if(backends.begin(), backends.end(), [&](const auto& backend) { return backend->supports(traits); });
  return found == backends.end() ? nullptr : found->get();
}

std::string EngineParts::end_call() const {
  return world.empty() ? "hvd::shutdown()" : formatted("leave() or shutdown() of the world '{}'", world);
}

}  // namespace hvd
