#include "hvd/spawn.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <system_error>
#include <vector>

#include "hvd/base/text.h"
#include "hvd/config.h"

namespace hvd {

namespace {

/// A folder of files that are named after ranks; gone with this. (Not std::filesystem::remove_all:
/// libtorch.so exports one that crashes.)
class Reports {
 public:
  explicit Reports(int ranks) : ranks_(ranks) {
    std::error_code error;
    const auto folder = std::filesystem::temp_directory_path(error);  // TMPDIR, or /tmp
    if (error)
      throw BackendError(
          formatted("spawn: no folder for temporary files (TMPDIR): {}", error.message()));
    path_ = (folder / "hvd-spawn-XXXXXX").string();
    if (::mkdtemp(path_.data()) == nullptr)
      throw BackendError(formatted("spawn: mkdtemp {}: {}", path_, std::strerror(errno)));
  }
  ~Reports() {
    for (int rank = 0; rank < ranks_; ++rank) ::unlink(file(path_, rank).c_str());
    ::rmdir(path_.c_str());
  }
  Reports(const Reports&) = delete;
  Reports& operator=(const Reports&) = delete;

  [[nodiscard]] const std::string& path() const { return path_; }
  static std::string file(const std::string& path, int rank) {
    return formatted("{}/{}", path, rank);
  }
  /// "; rank 1: text; rank 3: text"
  [[nodiscard]] std::string read() const {
    std::string all;
    for (int rank = 0; rank < ranks_; ++rank) {
      std::ifstream in(file(path_, rank));
      if (in)
        all +=
            formatted("; rank {}: {}", rank, std::string(std::istreambuf_iterator<char>(in), {}));
    }
    return all;
  }

 private:
  int ranks_;
  std::string path_;
};

std::vector<std::string> own_arguments() {
  std::ifstream in("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> arguments;
  for (std::string argument; std::getline(in, argument, '\0');) arguments.push_back(argument);
  return arguments;
}
std::string own_program() {
  std::string path(4096, '\0');
  const auto length = ::readlink("/proc/self/exe", path.data(), path.size());
  if (length < 0)
    throw BackendError(formatted("spawn: readlink /proc/self/exe: {}", std::strerror(errno)));
  path.resize(static_cast<std::size_t>(length));
  return path;
}

void work_as_rank(int rank, const std::function<void()>& work) {
  try {
    work();
  } catch (const std::exception& error) {
    if (const char* const folder = detail::spawn_reports())
      std::ofstream(Reports::file(folder, rank)) << error.what();
    throw;
  }
}

/// HeardChildren keeps SIGCHLD from being ignored while it lives: where it is, as some supervisors
/// start programs, no end of a process is told.
class HeardChildren {
 public:
  HeardChildren() {
    struct sigaction heard {};
    heard.sa_handler = SIG_DFL;
    if (::sigaction(SIGCHLD, nullptr, &before_) != 0 || before_.sa_handler != SIG_IGN) return;
    was_ignored_ = ::sigaction(SIGCHLD, &heard, nullptr) == 0;
  }
  ~HeardChildren() {
    if (was_ignored_) ::sigaction(SIGCHLD, &before_, nullptr);
  }
  HeardChildren(const HeardChildren&) = delete;
  HeardChildren& operator=(const HeardChildren&) = delete;

 private:
  struct sigaction before_ {};
  bool was_ignored_ = false;
};

/// Starts a program that gets SIGTERM when the calling thread ends, as where this process is
/// killed: it hands it on to its ranks. Returns its number.
pid_t start(char* const* arguments) {
  std::array<int, 2> told{};  // closed by what runs then; before, why nothing does
  if (::pipe2(told.data(), O_CLOEXEC) != 0)
    throw BackendError(formatted("spawn: pipe2: {}", std::strerror(errno)));
  const pid_t parent = ::getpid();
  const pid_t process = ::fork();
  if (process == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (::getppid() == parent) ::execvpe(arguments[0], arguments, detail::process_environment());
    const int error = errno;
    static_cast<void>(!::write(told[1], &error, sizeof error));
    ::_exit(127);
  }
  int error = process < 0 ? errno : 0;
  ::close(told[1]);
  ssize_t heard = 0;
  if (process > 0)
    while ((heard = ::read(told[0], &error, sizeof error)) < 0 && errno == EINTR) continue;
  if (heard > 0) ::waitpid(process, nullptr, 0);
  ::close(told[0]);
  if (error != 0)
    throw BackendError(formatted("spawn: {}: {}; it starts the ranks, and must be in PATH",
                                 arguments[0], std::strerror(error)));
  return process;
}

/// Runs to the end; how it ended, in words, empty if well.
std::string run(const std::vector<std::string>& command) {
  std::vector<char*> arguments;
  for (const auto& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  const HeardChildren heard;
  const pid_t process = start(arguments.data());
  int status = 0;
  while (::waitpid(process, &status, 0) < 0)
    if (errno != EINTR) throw BackendError(formatted("spawn: waitpid: {}", std::strerror(errno)));
  if (WIFSIGNALED(status))
    return formatted("{} was ended by signal {}", command.front(), WTERMSIG(status));
  if (WEXITSTATUS(status) != 0)
    return formatted("{} ended with exit code {}", command.front(), WEXITSTATUS(status));
  return "";
}

}  // namespace

void spawn(int ranks, const std::function<void()>& work) {
  if (ranks < 1) throw InvalidArgument(formatted("spawn: {} ranks", ranks));
  const LauncherHints hints = launcher_hints();
  const bool is_rank =
      hints.rank && (hints.size.value_or(2) > 1 || detail::spawn_reports() != nullptr);
  if (is_rank || ranks == 1) {
    work_as_rank(hints.rank.value_or(0), work);
    return;
  }
  if (hints.rank)
    throw InvalidArgument(
        formatted("spawn: {} ranks are wanted, but this process was started as a world of one (by "
                  "HVD_INIT=alone, or by a launcher such as mpirun -np 1): start it without that, "
                  "and spawn() starts the ranks, or have the launcher start {}",
                  ranks, ranks));
  const Reports reports(ranks);
  // More ranks than cores, as root and in containers, as cmake/mpi_env.sh has it.
  std::vector<std::string> command{"mpirun",
                                   "-np",
                                   std::to_string(ranks),
                                   "--oversubscribe",
                                   "--bind-to",
                                   "none",
                                   "-x",
                                   formatted("{}={}", detail::kSpawnReports, reports.path())};
  command.insert(command.end(), {"--mca", "btl_vader_single_copy_mechanism", "none"});
  if (::geteuid() == 0) command.emplace_back("--allow-run-as-root");
  command.push_back(own_program());
  const auto arguments = own_arguments();
  command.insert(command.end(), arguments.begin() + (arguments.empty() ? 0 : 1), arguments.end());
  const std::string ended = run(command);
  if (!ended.empty()) throw Error(formatted("spawn: {}{}", ended, reports.read()));
}

}  // namespace hvd
