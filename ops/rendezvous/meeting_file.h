#pragma once
/// MeetingFile is the file by which ranks of one host meet (HVD_INIT=file:///PATH): rank 0 writes
/// where it listens, and a secret that only the file's owner can read. It appears whole or not at
/// all, and is removed when this object of rank 0 ends. For one thread. It throws BackendError with
/// the system's words, or where the file is another user's.
// Tested in tests/ops/rendezvous/meeting_test.cc

#include <optional>
#include <string>

namespace hvd {

/// The content of the file.
struct MeetingNote {
  int port = 0;
  std::string secret;
  std::string host;
};
/// Makes a note with a new secret.
MeetingNote make_note(int port, std::string host);

class MeetingFile {
 public:
  explicit MeetingFile(std::string path) : path_(std::move(path)) {}
  ~MeetingFile();
  MeetingFile(const MeetingFile&) = delete;
  MeetingFile& operator=(const MeetingFile&) = delete;

  /// Makes the file. Returns whether there was none.
  bool publish(const MeetingNote& note);
  /// Returns what it says; empty where there is none, or it is none of this kind.
  [[nodiscard]] std::optional<MeetingNote> read() const;
  /// Returns whether there is nothing in it, as mktemp makes them.
  [[nodiscard]] bool is_empty() const;
  void remove();

 private:
  std::string path_;
  bool is_mine_ = false;
};

}  // namespace hvd
