#pragma once
/// This header has what hvdrun and its helpers on other hosts tell each other: messages of a length, a kind and a payload, over the
/// standard input and output of the helper. Values and pure functions; any thread. What is malformed throws std::runtime_error.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace hvdrun {

enum class Kind : std::uint8_t {
  // The helper's
  Hello,     ///< its version, its process, and SSH_CONNECTION, which tells both hosts' addresses
  Reserved,  ///< where the ranks are to meet, as HVD_INIT has it
  Started,   ///< the ranks run; their process ids
  Output,    ///< rank, stream, bytes
  Ended,     ///< rank, exit code, signal
  Said,      ///< rank: all of its output has been sent
  Taken,     ///< so many bytes of input have gone to rank 0
  Alive,     ///< nothing; so that a connection that leads nowhere is noticed
  Failed,    ///< why the helper gives up
  // hvdrun's
  Reserve,  ///< asks for that: the candidates
  Start,    ///< the job, as far as this host is concerned
  Signal,   ///< for a rank
  Input,    ///< bytes for rank 0; none: the end
};

struct Message {
  Kind kind = Kind::Hello;
  std::string payload;
};

/// What the first of a helper's bytes are: what comes before is a login shell's.
constexpr std::string_view kHelperBegins = "\nhvdrun helper 1\n";

/// Packer puts values behind one another.
class Packer {
 public:
  Packer& put(std::uint32_t number);
  Packer& put(std::string_view text);
  Packer& put(const std::vector<std::string>& texts);
  Packer& put(const std::vector<std::pair<std::string, std::string>>& pairs);
  [[nodiscard]] const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

/// Unpacker takes them out in the same order. It borrows the bytes.
class Unpacker {
 public:
  explicit Unpacker(std::string_view bytes) : bytes_(bytes) {}
  std::uint32_t number();
  int integer() { return static_cast<int>(number()); }
  std::string text();
  std::vector<std::string> texts();
  std::vector<std::pair<std::string, std::string>> pairs();

 private:
  std::string_view take(std::size_t length);
  std::string_view bytes_;
};

/// Returns the message as it is sent.
std::string framed(Kind kind, std::string_view payload);

/// MessageReader turns what arrives, in whatever pieces, into messages.
class MessageReader {
 public:
  void add(std::string_view bytes) { bytes_ += bytes; }
  /// Returns the next whole message; none if it has not arrived yet.
  std::optional<Message> next();
  /// Drops all up to and with `mark`. Returns whether it has arrived.
  bool skip_to(std::string_view mark);
  /// Returns what has arrived and is no message yet.
  [[nodiscard]] std::string_view rest() const { return std::string_view(bytes_).substr(begin_); }

 private:
  std::string bytes_;
  std::size_t begin_ = 0;
};

/// The job, as far as a host is concerned.
struct HostJob {
  std::vector<std::string> command;
  std::vector<std::pair<std::string, std::string>> variables;
  std::vector<std::string> unset;
  std::string folder;  ///< empty: where the helper is
  int first = 0, count = 0, ranks = 0;
  int time_to_end = 5;  ///< seconds
};
std::string pack(const HostJob& job);
HostJob unpack_job(std::string_view payload);

}  // namespace hvdrun
