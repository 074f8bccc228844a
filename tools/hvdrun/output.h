#pragma once
/// The way of what ranks print: RankLines takes it in, an Outlet writes it. For one thread.

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdio>
#include <deque>
#include <memory>
#include <string>
#include <string_view>

namespace hvdrun {

struct Options;

/// A descriptor that hvdrun writes to, such as its standard output. hvdrun must not wait for who
/// reads there: bytes are kept until they can be written. It borrows the descriptor.
class Outlet {
 public:
  explicit Outlet(int descriptor);
  Outlet(const Outlet&) = delete;
  Outlet& operator=(const Outlet&) = delete;

  [[nodiscard]] int descriptor() const { return descriptor_; }
  /// Takes bytes over, to be written after all before.
  void add(std::string_view text) { waiting_ += text; }
  /// Writes what can be written without waiting.
  void write_some();
  [[nodiscard]] bool is_empty() const { return begin_ == waiting_.size(); }
  /// Returns whether so much waits that no more should be read.
  [[nodiscard]] bool is_full() const { return waiting_.size() - begin_ >= kMost; }
  /// Returns whether both write to the same file: what they write then must go by one of them, or
  /// lines would be mixed.
  [[nodiscard]] bool is_same_file(const Outlet& other) const;

 private:
  static constexpr std::size_t kMost = std::size_t{1} << 20;
  int descriptor_;
  bool is_socket_;  // then whoever has gone is no SIGPIPE
  std::string waiting_;
  std::size_t begin_ = 0;  // what stands before it is written
};

/// Passes on by whole lines what a rank says: to hvdrun's own output, with a prefix, and to the
/// rank's files. It remembers the last of what was said to standard error: of an exception that
/// nobody caught its text, without the stack. It borrows the outlets and owns the files. Throws
/// std::runtime_error with the system's words where the files cannot be made.
class RankLines {
 public:
  /// `outlets` take standard output and error.
  RankLines(int rank, const Options& options, const std::array<Outlet*, 2>& outlets);

  /// Takes what a rank says, in whatever pieces. `stream`: 0 is standard output, 1 standard error.
  void hear(std::size_t stream, std::string_view bytes);
  /// Returns whether no more should be read for now.
  [[nodiscard]] bool is_full(std::size_t stream) const { return streams_[stream].to->is_full(); }
  /// Passes on what has no end of line, when no more comes.
  void finish();
  [[nodiscard]] const std::deque<std::string>& last_words() const { return last_words_; }

 private:
  struct CloseFile {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  struct Stream {
    Outlet* to = nullptr;
    std::string prefix;
    std::string partial;  // a line without its end, of some KiB at most
    std::unique_ptr<std::FILE, CloseFile> copy;
  };
  void say(Stream& stream, std::string_view line, bool is_whole);
  void remember(std::string_view line);

  std::array<Stream, 2> streams_;
  std::deque<std::string> last_words_;
};

}  // namespace hvdrun
