#pragma once
/// Files of results. For one process and one thread. Fail by throwing std::runtime_error that names
/// the file and what to do.

#include <functional>
#include <ostream>
#include <string>

namespace examples {

/// Writes a new file beside `file` and puts it in its place, so that a reader, or whatever ends
/// this process, finds the old or the new one whole. `option`: of the command line, which names the
/// file.
void replace_file(const std::string& file, const std::string& option,
                  const std::function<void(std::ostream&)>& write);

/// Makes the folder if it is missing and tries whether files can be made in it.
void check_writable(const std::string& folder);

}  // namespace examples
