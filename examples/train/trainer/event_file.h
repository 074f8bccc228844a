#pragma once
/// An EventFile is what TensorBoard reads: scalars over steps. It writes the wire format itself,
/// which is small: records of TensorFlow (length, checksum, data, checksum), each an Event message
/// of protocol buffers. For one process and one thread. What was added is in the

/// file when flush() returns. Fails by throwing std::runtime_error that names the file. It needs no
/// LibTorch.

#include <cstdint>
#include <fstream>
#include <string>
#include <string_view>

namespace examples {

class EventFile {
 public:
  /// Makes a file of its own in the folder, which is made if it is missing: TensorBoard reads all
  /// of a folder as one run. With a `first_step` above 0 it takes this for the continuation of a
  /// run: what an earlier file has of this step or later counts no more.
  EventFile(const std::string& folder, std::int64_t first_step);

  void scalar(std::string_view tag, std::int64_t step, double value);
  void flush();

 private:
  void event(std::int64_t step, std::string_view field);

  std::string path_;
  std::ofstream out_;
};

/// CRC-32C (Castagnoli).
std::uint32_t crc32c(std::string_view bytes);

}  // namespace examples
