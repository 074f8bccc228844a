#include "examples/train/trainer/display.h"

#include <unistd.h>

#include <cstdio>
#include <filesystem>

namespace examples {
namespace {

constexpr int kBarWidth = 30;
constexpr std::chrono::milliseconds kRedraw{100};
constexpr std::chrono::seconds kNextLine{5};

/// Open MPI gives its ranks a terminal of their own wherever its output really goes: then what counts is mpirun's output.
bool is_terminal() {
  if (::isatty(STDOUT_FILENO) == 0) return false;
  std::error_code error;
  const std::string parent = "/proc/" + std::to_string(::getppid());
  const auto program = std::filesystem::read_symlink(parent + "/exe", error).filename().string();
  if (error || (program != "orterun" && program != "mpirun" && program.rfind("prte", 0) != 0)) return true;
  const auto output = std::filesystem::read_symlink(parent + "/fd/1", error).string();
  return !error && (output.rfind("/dev/pts/", 0) == 0 || output.rfind("/dev/tty", 0) == 0);
}

}  // namespace

Display::Display(int rank) : shown_(rank == 0), terminal_(shown_ && is_terminal()) {}

bool Display::due() const {
  return shown_ && std::chrono::steady_clock::now() - last_ >=
                       (terminal_ ? std::chrono::duration_cast<std::chrono::milliseconds>(kRedraw) : kNextLine);
}

void Display::show(const Moment& moment, double loss) {
  if (!shown_) return;
  last_ = std::chrono::steady_clock::now();
  std::string bar;
  if (terminal_) {
    const auto filled = static_cast<std::size_t>(kBarWidth * moment.step / moment.steps);
    bar = "[" + std::string(filled, '=') + std::string(kBarWidth - filled, ' ') + "] ";
  }
  std::printf("%sepoch %lld/%lld  %sstep %lld/%lld  loss %.4f  %.0f images/s%s", terminal_ ? "\r\033[K" : "",
              static_cast<long long>(moment.epoch), static_cast<long long>(moment.epochs), bar.c_str(), static_cast<long long>(moment.step),
              static_cast<long long>(moment.steps), loss, moment.images_per_second, terminal_ ? "" : "\n");
  bar_drawn_ = terminal_;
  std::fflush(stdout);
}

void Display::show(const Record& record, std::int64_t epochs) {
  if (!shown_) return;
  clear_bar();
  last_ = std::chrono::steady_clock::now();
  std::printf("epoch %lld/%lld  test loss %.4f, top-1 %.2f %%, top-5 %.2f %%  (training loss %.4f, %.1f s, %.0f images/s)\n",
              static_cast<long long>(record.epoch), static_cast<long long>(epochs), record.test.loss, 100 * record.test.top1,
              100 * record.test.top5, record.train_loss, record.seconds, record.images_per_second);
  std::fflush(stdout);
}

void Display::line(const std::string& text) {
  if (!shown_) return;
  clear_bar();
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
}

void Display::clear_bar() {
  if (bar_drawn_) std::printf("\r\033[K");
  bar_drawn_ = false;
}

}  // namespace examples
