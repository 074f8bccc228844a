#pragma once
/// RankLines passes on by whole lines what a rank says: to hvdrun's own output, with a prefix, and to the rank's files. It remembers the
/// last of what was said to standard error: of an exception that nobody caught its text, without the stack. It borrows the outlets, owns
/// the files, and is for one thread. Throws std::runtime_error with the system's words where the files cannot be made.

#include <array>
#include <cstdio>
#include <deque>
#include <memory>
#include <string>
#include <string_view>

#include "tools/hvdrun/outlet.h"
#include "tools/hvdrun/rank.h"

namespace hvdrun {

struct OutputOptions;

class RankLines final : public RankSink {
 public:
  /// `outlets` take standard output and error.
  RankLines(int rank, const OutputOptions& options, const std::array<Outlet*, 2>& outlets);

  void hear(std::size_t stream, std::string_view bytes) override;
  [[nodiscard]] bool is_full(std::size_t stream) const override { return streams_[stream].to->is_full(); }
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
