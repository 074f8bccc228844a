#pragma once
/// A store of keys in the files of a folder, for worlds whose members are processes of one machine.

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "tests/support/worlds/rendezvous.h"

namespace hvd::test {

class FileStore {
 public:
  explicit FileStore(std::string folder) : folder_(std::move(folder)) {}
  void set(const std::string& key, const Rendezvous::Value& value) const {
    const std::string file = file_of(key);
    std::ofstream(file + ".new", std::ios::binary)
        .write(reinterpret_cast<const char*>(value.data()),
               static_cast<std::streamsize>(value.size()));
    if (std::rename((file + ".new").c_str(), file.c_str()) != 0)
      throw std::runtime_error("cannot write " + file);
  }
  [[nodiscard]] std::optional<Rendezvous::Value> get(const std::string& key,
                                                     std::chrono::milliseconds time) const {
    for (const auto deadline = std::chrono::steady_clock::now() + time;;) {
      std::ifstream file(file_of(key), std::ios::binary);
      if (file) return Rendezvous::Value(std::istreambuf_iterator<char>(file), {});
      if (std::chrono::steady_clock::now() > deadline) return std::nullopt;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  [[nodiscard]] std::int64_t add(const std::string& key, std::int64_t amount) const {
    const int file = ::open(file_of(key).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ::flock(file, LOCK_EX) != 0)
      throw std::runtime_error("cannot open " + file_of(key));
    std::int64_t sum = 0;
    const bool is_there = ::pread(file, &sum, sizeof(sum), 0) == sizeof(sum);
    sum = (is_there ? sum : 0) + amount;
    const bool is_written = ::pwrite(file, &sum, sizeof(sum), 0) == sizeof(sum);
    ::close(file);
    if (!is_written) throw std::runtime_error("cannot write " + file_of(key));
    return sum;
  }

 private:
  [[nodiscard]] std::string file_of(std::string key) const {
    for (char& letter : key)
      if (letter == '/' || letter == ' ') letter = '_';
    return folder_ + "/" + key;
  }
  std::string folder_;
};

}  // namespace hvd::test
