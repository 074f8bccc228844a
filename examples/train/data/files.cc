#include "examples/train/data/files.h"

#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "examples/train/data/dataset.h"

namespace examples {
namespace {

namespace fs = std::filesystem;

std::string list(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

bool holds_any(const fs::path& folder, const std::vector<std::string>& files) {
  return std::any_of(files.begin(), files.end(), [&](const auto& file) {
    std::error_code error;
    return fs::is_regular_file(folder / file, error);
  });
}

}  // namespace

fs::path find_folder(const std::string& directory, const std::string& subfolder, const std::vector<std::string>& files,
                     const std::string& where_from) {
  std::error_code error;
  if (!fs::is_directory(directory, error)) {
    throw DataError("--data " + directory + " is not a folder; give the folder that holds " + list(files) + "; get them from " +
                    where_from);
  }
  for (const auto& folder : {fs::path(directory), fs::path(directory) / subfolder}) {
    if (holds_any(folder, files)) return folder;
  }
  throw DataError("--data " + directory + " holds none of " + list(files) + "; get them from " + where_from);
}

std::vector<std::uint8_t> read_whole(const fs::path& file) {
  errno = 0;
  const std::unique_ptr<gzFile_s, int (*)(gzFile)> in(gzopen(file.c_str(), "rb"), gzclose);  // reads files that are not gzipped as they are
  if (!in) throw DataError("cannot open " + file.string() + ": " + std::strerror(errno == 0 ? ENOMEM : errno));
  std::vector<std::uint8_t> bytes;
  constexpr unsigned kChunk = 1U << 20;
  for (;;) {
    const std::size_t before = bytes.size();
    bytes.resize(before + kChunk);
    const int got = gzread(in.get(), bytes.data() + before, kChunk);
    bytes.resize(before + static_cast<std::size_t>(std::max(got, 0)));
    int code = Z_OK;
    const char* words = gzerror(in.get(), &code);
    if (got < 0 || code == Z_BUF_ERROR) {
      const std::string reason = code == Z_ERRNO ? std::strerror(errno) : words;
      throw DataError("cannot read " + file.string() + ": " + reason + "; if the file was not copied whole, get it again");
    }
    if (got == 0) return bytes;
  }
}

}  // namespace examples
