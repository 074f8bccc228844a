#pragma once
/// Files of checkpoints: one that is replaced so that a reader, or a crash at any moment, finds the
/// old or the new one whole, and one that is read at any place. One process, one thread at a time.
/// Fail by throwing CheckpointError that names the file and the system's reason.
// Tested in tests/torch_bindings/checkpoint/checkpoint_test.cc,
// tests/torch_bindings/files/checkpoint_reader_test.cc,
// tests/torch_bindings/what_if/what_if_checkpoint_test.cc

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace hvd::detail {

/// An open file, which is closed at the end.
class File {
 public:
  /// `flags`: as open() takes them.
  File(std::string path, int flags);
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  void write(const void* data, std::size_t bytes) const;
  /// Survives a crash of the machine.
  void make_durable() const;
  [[nodiscard]] std::uint64_t size() const;
  /// Reads that many bytes from a place on; throws if the file ends before.
  void read(std::uint64_t from, void* to, std::size_t bytes) const;
  /// Takes the file's lock (flock), until it is closed or the process dies, and empties it. Returns
  /// false, and nothing has changed, if another process has the lock, or the name leads elsewhere.
  [[nodiscard]] bool claim() const;

 private:
  std::string path_;
  int descriptor_;
};

/// A new file beside `path` that takes its place when it is complete, or is removed. What is left
/// of one whose process was killed the next one on that host takes over.
class FreshFile {
 public:
  /// Makes the file, and its folder if that is missing.
  explicit FreshFile(std::string path);
  ~FreshFile();

  void write(const void* data, std::size_t bytes) const { file_->write(data, bytes); }
  /// Makes it durable and puts it in the place of `path`. With `keep` > 1 the old one becomes
  /// `path`.1, that one `path`.2, up to keep - 1; there is a file `path` at every moment.
  void replace(int keep);

 private:
  const std::string path_;
  std::string fresh_;
  std::unique_ptr<const File> file_;
  bool replaced_ = false;
};

}  // namespace hvd::detail
