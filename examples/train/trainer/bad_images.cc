#include "examples/train/trainer/bad_images.h"

#include <cstdio>

namespace examples {
namespace {

constexpr std::size_t kMostNamed = 20;

}  // namespace

void BadImageLog::add(const std::vector<BadImage>& images) {
  count_ += static_cast<std::int64_t>(images.size());
  for (const auto& image : images) {
    if (!names_ || named_.size() == kMostNamed || !named_.insert(image.file).second) continue;
    std::fprintf(stderr, "train: rank %d: bad image %s: %s%s\n", rank_, image.file.c_str(), image.why.c_str(),
                 named_.size() == kMostNamed ? "; others will be counted only" : "");
  }
}

std::int64_t BadImageLog::take_count() {
  const auto count = count_;
  count_ = 0;
  return count;
}

std::string refusal_of(const std::vector<BadImage>& images) {
  return "bad image " + images.front().file + ": " + images.front().why + "; mend or remove the file, or take --bad-images skip";
}

}  // namespace examples
