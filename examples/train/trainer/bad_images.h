#pragma once
/// A BadImageLog counts the image files that could not be used and, if asked, names them on standard error, each once, at most twenty. Each
/// rank has one. It needs no LibTorch and never fails.

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "examples/train/images/reader.h"

namespace examples {

class BadImageLog {
 public:
  BadImageLog(int rank, bool names) : rank_(rank), names_(names) {}

  void add(const std::vector<BadImage>& images);
  /// How many were added since this was last called.
  std::int64_t take_count();

 private:
  int rank_;
  bool names_;
  std::int64_t count_ = 0;
  std::set<std::string> named_;
};

/// The first one, for an error.
std::string refusal_of(const std::vector<BadImage>& images);

}  // namespace examples
