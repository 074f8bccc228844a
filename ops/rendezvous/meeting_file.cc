#include "ops/rendezvous/meeting_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <sstream>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/errors.h"
#include "ops/rendezvous/frames.h"
#include "ops/shm/memory/shared_memory.h"

namespace hvd {

namespace {

constexpr auto kFirstWord = "hvd-rendezvous-1";

[[noreturn]] void fail(const std::string& path) {
  throw BackendError(formatted("hvd::init(): HVD_INIT=file://{}: {}", path, std::strerror(errno)));
}

std::string random_word() {
  std::string word;
  for (const std::byte byte : make_nonce())
    word += formatted("{:02x}", std::to_integer<unsigned>(byte));
  return word;
}

}  // namespace

MeetingNote make_note(int port, std::string host) { return {port, random_word(), std::move(host)}; }

MeetingFile::~MeetingFile() {
  if (is_mine_) ::unlink(path_.c_str());
}

bool MeetingFile::publish(const MeetingNote& note) {
  const std::string whole =
      formatted("{} {} {} {}\n", kFirstWord, note.port, note.secret, note.host);
  // processes of other hosts and containers may have the same number
  const std::string draft = formatted("{}.{}", path_, random_word());
  {
    ::unlink(draft.c_str());
    const FileDescriptor file(
        ::open(draft.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, S_IRUSR | S_IWUSR));
    if (file.get() < 0) fail(draft);
    if (::write(file.get(), whole.data(), whole.size()) != static_cast<ssize_t>(whole.size())) {
      ::unlink(draft.c_str());
      fail(draft);
    }
  }
  bool is_new = ::link(draft.c_str(), path_.c_str()) == 0;
  int error = errno;
  // a file system without hard links
  if (!is_new && (error == EPERM || error == EOPNOTSUPP || error == ENOSYS)) {
    const bool is_there = ::access(path_.c_str(), F_OK) == 0;
    is_new = !is_there && ::rename(draft.c_str(), path_.c_str()) == 0;
    error = is_there ? EEXIST : errno;
  }
  ::unlink(draft.c_str());
  errno = error;
  if (!is_new && error != EEXIST) fail(path_);
  is_mine_ = is_new;
  return is_new;
}

bool MeetingFile::is_empty() const {
  struct stat status {};
  return ::stat(path_.c_str(), &status) != 0 || status.st_size == 0;
}

void MeetingFile::remove() {
  if (::unlink(path_.c_str()) != 0 && errno != ENOENT) fail(path_);
}

std::optional<MeetingNote> MeetingFile::read() const {
  // a FIFO would block for ever
  const FileDescriptor file(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW));
  if (file.get() < 0) {
    const std::string folder = path_.substr(0, path_.rfind('/') + 1);
    if (errno == ENOENT && ::access(folder.c_str(), X_OK) == 0) return std::nullopt;
    fail(path_);
  }
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) fail(path_);
  if (status.st_uid != ::geteuid() && status.st_uid != 0)
    throw BackendError(
        formatted("hvd::init(): HVD_INIT=file://{}: the file belongs to another user", path_));
  if (!S_ISREG(status.st_mode))
    throw BackendError(formatted(
        "hvd::init(): HVD_INIT=file://{}: it is no plain file; name one that is not there", path_));
  std::array<char, 1024> text{};
  const auto length = ::read(file.get(), text.data(), text.size());
  if (length < 0) fail(path_);
  std::istringstream in(std::string(text.data(), static_cast<std::size_t>(length)));
  std::string word;
  MeetingNote note;
  if (!(in >> word >> note.port >> note.secret) || word != kFirstWord || note.port < 1 ||
      note.port > 65535)
    return std::nullopt;
  std::getline(in >> std::ws, note.host);
  return note;
}

}  // namespace hvd
