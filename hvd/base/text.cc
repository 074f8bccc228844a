#include "hvd/base/text.h"

#include "hvd/base/text_definition.h"

namespace hvd {

std::string rank_list(std::span<const int> ranks) {
  std::string text;
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    const char* separator = text.empty() ? "" : ", ";
    text += last == i ? formatted("{}{}", separator, ranks[i]) : formatted("{}{}-{}", separator, ranks[i], ranks[last]);
    i = last + 1;
  }
  return text;
}

}  // namespace hvd
