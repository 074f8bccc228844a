#include "tests/gpu/double/sites.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <link.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>

#include "tests/gpu/double/world.h"

namespace hvd::gpu::test::cuda {

namespace {

using Range = std::pair<std::uintptr_t, std::uintptr_t>;

const Range& program() {
  static const Range range = [] {
    Range found{~std::uintptr_t{0}, 0};
    dl_iterate_phdr(
        [](dl_phdr_info* info, std::size_t, void* to) {
          auto& [begin, end] = *static_cast<Range*>(to);
          for (int i = 0; i < info->dlpi_phnum; ++i) {
            if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
            begin = std::min<std::uintptr_t>(begin, info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
            end = std::max<std::uintptr_t>(
                end, info->dlpi_addr + info->dlpi_phdr[i].p_vaddr + info->dlpi_phdr[i].p_memsz);
          }
          return 1;  // the program comes first
        },
        &found);
    return found;
  }();
  return range;
}

/// This library's frames, and those of LibTorch's that deal with devices.
bool is_between(const void* address, std::string_view* function = nullptr) {
  Dl_info place{};
  if (dladdr(address, &place) == 0 || place.dli_fname == nullptr) return false;
  const std::string_view name = place.dli_fname;
  const bool torchs = name.find("libc10_cuda") != std::string_view::npos;
  if (torchs && function != nullptr) *function = place.dli_sname == nullptr ? "?" : place.dli_sname;
  return torchs || name.find("libcudart") != std::string_view::npos;
}

/// Empty: the program has not made it directly. LibTorch's guards exchange devices; its events,
/// which set one and then the other, look after themselves.
std::string direct_callers(bool guards) {
  std::array<void*, 24> frames{};
  const int depth = backtrace(frames.data(), static_cast<int>(frames.size()));
  int between = 0;
  bool exchanges = false;
  for (int i = 0; i < depth; ++i) {
    const void* const frame = frames.at(static_cast<std::size_t>(i));
    if (is_programs(frame)) return !guards || exchanges || between == 0 ? callers() : "";
    std::string_view function;
    if (!is_between(frame, &function)) return {};
    if (function.empty()) continue;
    exchanges = exchanges || function.find("ExchangeDevice") != std::string_view::npos ||
                function.find("MaybeSetDevice") != std::string_view::npos ||
                (between == 0 && function.find("cuda9SetDevice") != std::string_view::npos &&
                 is_programs(frames.at(static_cast<std::size_t>(std::min(i + 1, depth - 1)))));
    ++between;
  }
  return {};
}

/// Never destroyed.
std::set<std::string>& seen() {
  static auto* const all = [] {
    std::atexit([] {
      const Lock lock;
      for (const std::string& site : seen()) std::fprintf(stderr, "site %s\n", site.c_str());
    });
    return new std::set<std::string>;
  }();
  return *all;
}

std::set<std::string> wanted_omissions() {
  std::set<std::string> lines;
  std::istringstream text(std::getenv("HVD_TEST_GPU_OMIT"));
  for (std::string line; std::getline(text, line);) lines.insert(line + " ");
  return lines;
}

}  // namespace

bool is_programs(const void* caller) {
  return number_of(caller) >= program().first && number_of(caller) < program().second;
}

std::string callers() {
  std::array<void*, 24> frames{};
  const int depth = backtrace(frames.data(), static_cast<int>(frames.size()));
  std::ostringstream text;
  bool gap = false;
  for (int i = 0; i < depth; ++i) {
    const void* const frame = frames.at(static_cast<std::size_t>(i));
    const bool ours = is_programs(frame);
    if (ours) text << (gap ? " - " : " ") << std::hex << number_of(frame) - program().first;
    gap = !ours && (gap || !is_between(frame));
  }
  return text.str();
}

bool is_left_out(const char* kind) {
  static const bool counts = std::getenv("HVD_TEST_GPU_COUNT") != nullptr,
                    omits = std::getenv("HVD_TEST_GPU_OMIT") != nullptr;
  if (!counts && !omits) return false;
  const std::string from = direct_callers(std::string_view(kind) == "device");
  if (from.empty()) return false;
  const std::string site = kind + from + " ";
  if (counts) seen().insert(site);
  if (!omits) return false;
  static const std::set<std::string> omitted = wanted_omissions();
  return std::any_of(omitted.begin(), omitted.end(),
                     [&](const std::string& begin) { return site.starts_with(begin); });
}

}  // namespace hvd::gpu::test::cuda

extern "C" __attribute__((visibility("default"))) bool hvd_double_leaves_out(const char* kind) {
  const hvd::gpu::test::cuda::Lock lock;
  return hvd::gpu::test::cuda::is_left_out(kind);
}
