/// One file of each library that formats text includes this: it defines what `hvd/base/text.h` declares, for the fmt that this library
/// sees.
// Tested in tests/hvd/base/text_test.cc, tests/package/run.sh
#include <fmt/format.h>

#include "hvd/base/text.h"

namespace hvd {

template <int Version>
std::string formatted_by(fmt::string_view format, fmt::format_args arguments) {
  return fmt::vformat(format, arguments);
}
template std::string formatted_by<FMT_VERSION>(fmt::string_view, fmt::format_args);

}  // namespace hvd
