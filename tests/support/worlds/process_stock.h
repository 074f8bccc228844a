#pragma once
/// What this process has taken of the system, as /proc says.

#include <malloc.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>

namespace hvd::test {

struct ProcessStock {
  long threads = 0, descriptors = 0, mappings = 0, resident_kib = 0;
};

inline ProcessStock take_stock() {
  ::malloc_trim(0);  // what is freed and lies in the C library's arenas is not taken
  const auto entries = [](const char* folder) {
    return static_cast<long>(std::distance(std::filesystem::directory_iterator(folder),
                                           std::filesystem::directory_iterator()));
  };
  ProcessStock stock{.threads = entries("/proc/self/task"),
                     .descriptors = entries("/proc/self/fd")};
  std::ifstream maps("/proc/self/maps");
  stock.mappings = static_cast<long>(std::count(std::istreambuf_iterator<char>(maps), {}, '\n'));
  long pages = 0;
  std::ifstream("/proc/self/statm") >> pages >> pages;
  stock.resident_kib = pages * 4;
  return stock;
}

}  // namespace hvd::test
