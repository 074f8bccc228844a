#pragma once
/// These functions replace a file so that a reader, or a crash at any moment, finds the old or the new one whole. They are for one process

/// and one thread, and fail by throwing std::runtime_error that names the file and the reason.

#include <filesystem>
#include <functional>
#include <string>

namespace examples {

/// Calls `write` with the name of a new file beside `file`; makes what it wrote durable (fsync) and puts it in the place of `file`
/// (rename).
void replace_file(const std::filesystem::path& file, const std::function<void(const std::string& name)>& write);

/// Makes the folder if it is missing and tries whether files can be made in it.
void check_writable(const std::filesystem::path& folder);

}  // namespace examples
