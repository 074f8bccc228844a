#pragma once
/// Replacing a file so that a reader, or a crash at any moment, finds the old or the new one whole. One process, any thread.
/// Fails by throwing CheckpointError that names the file and the system's reason.

#include <string>

namespace hvd::detail {

/// Writes `text` into a new file beside `path`, makes it durable and puts it in the place of `path`. With `keep` > 1 the old one becomes
/// `path`.1, that one `path`.2, up to keep - 1; there is a file `path` at every moment. The folder is made if it is missing.
void replace_file(const std::string& path, const std::string& text, int keep);

/// The whole file.
std::string read_whole_file(const std::string& path);

}  // namespace hvd::detail
