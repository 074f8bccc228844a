#pragma once
/// These functions are what the readers share: they find a dataset's folder and read a file whole. They fail by throwing DataError that
/// names the file and what to do.

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace examples {

/// `directory` itself, or its folder `subfolder` (as archives unpack to), whichever holds at least one of `files`.
/// `where_from` says in the error where the files can be had.
std::filesystem::path find_folder(const std::string& directory, const std::string& subfolder, const std::vector<std::string>& files,
                                  const std::string& where_from);

/// The bytes of a file, unpacked if it is gzipped.
std::vector<std::uint8_t> read_whole(const std::filesystem::path& file);

}  // namespace examples
