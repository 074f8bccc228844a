#include "examples/train/trainer/atomic_file.h"

#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <stdexcept>

namespace examples {

namespace fs = std::filesystem;

void replace_file(const std::string& file, const std::string& option,
                  const std::function<void(std::ostream&)>& write) {
  const std::string fresh = file + ".new." + std::to_string(::getpid());
  std::error_code error;
  std::ofstream out(fresh);
  try {
    write(out);
  } catch (...) {
    fs::remove(fresh, error);
    throw;
  }
  out.close();
  if (out) fs::rename(fresh, file, error);
  if (out && !error) return;
  fs::remove(fresh, error);
  throw std::runtime_error("cannot write " + file + "; give " + option +
                           " a name in a folder that exists, can be written to and is not full");
}

void check_writable(const std::string& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  const fs::path probe = fs::path(folder) / (".writable." + std::to_string(::getpid()));
  if (!error && !(std::ofstream(probe) << '\n').flush()) error = {errno, std::generic_category()};
  std::error_code ignored;
  fs::remove(probe, ignored);
  if (error)
    throw std::runtime_error("cannot write into the folder " + folder + ": " + error.message() +
                             "; name a place that can be written to");
}

}  // namespace examples
