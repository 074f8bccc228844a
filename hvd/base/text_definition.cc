/// The definition of what `hvd/base/text.h` declares. Each library that formats text compiles this
/// file, for the fmt that it sees.
// Tested in tests/hvd/base/text_test.cc, tests/torch_bindings/collectives/operation_test.cc,
// tests/package/run.sh
#include <fmt/format.h>

#include "hvd/base/text.h"

namespace hvd {

template <int Version>
std::string formatted_by(fmt::string_view format, fmt::format_args arguments) {
  return fmt::vformat(format, arguments);
}
template std::string formatted_by<FMT_VERSION>(fmt::string_view, fmt::format_args);

}  // namespace hvd
