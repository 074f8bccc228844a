#include "tests/support/gpu/checks/omissions.h"

#include <execinfo.h>

#include <array>
#include <cstdlib>

namespace hvd::gpu::test {

namespace {

/// The callers as places in the program, for addr2line, where HVD_TEST_GPU_CALLERS asks for them.
std::string callers() {
  if (std::getenv("HVD_TEST_GPU_CALLERS") == nullptr) return {};
  std::array<void*, 16> frames{};
  const int depth = backtrace(frames.data(), static_cast<int>(frames.size()));
  char** const names = backtrace_symbols(frames.data(), depth);
  std::string text;
  for (int i = 2; names != nullptr && i < depth; ++i) text += std::string("\n    ") + names[i];
  std::free(static_cast<void*>(names));
  return text;
}

}  // namespace

const std::vector<Omissions::Kind>& Omissions::kinds() {
  static const std::vector<Kind> all{Kind::Wait, Kind::Record, Kind::Device, Kind::Capture};
  return all;
}

bool Omissions::happens(Kind kind, int rank, const std::string& where) {
  const std::lock_guard lock(mutex_);
  const int number = ++counts_[{kind, rank}];
  if (left_out_.kind != kind || left_out_.rank != rank || left_out_.number != number) return false;
  place_ = where + callers();
  return true;
}

int Omissions::count(Kind kind, int rank) const {
  const std::lock_guard lock(mutex_);
  const auto found = counts_.find({kind, rank});
  return found == counts_.end() ? 0 : found->second;
}

std::string Omissions::place() const {
  const std::lock_guard lock(mutex_);
  return place_;
}

const char* name_of(Omissions::Kind kind) {
  constexpr std::array kNames{"cudaStreamWaitEvent", "cudaEventRecord", "device guard",
                              "capture guard"};
  return kNames.at(static_cast<std::size_t>(kind));
}

}  // namespace hvd::gpu::test
