#pragma once
/// Knows the threads of the program that call this library. They have no identity that the ranks
/// share, but for one: the thread that has called `init()` plays the same part on all of them.
/// Operations without names are matched by that (hvd/engine/core/submission_queue.h), and ranks
/// that wait for one another for ever are told from ranks that compute
/// (hvd/engine/health/health.h). Any thread; nothing here blocks.

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "hvd/base/callback_thread.h"
#include "hvd/base/process.h"
#include "hvd/errors.h"
#include "hvd/submission.h"

namespace hvd {

/// A LibraryCall is the first step of each function of the public interface: it throws
/// NotInitialized in a process that was forked from a rank; otherwise marks the thread as inside of
/// the library.
class LibraryCall {
 public:
  LibraryCall() {
    if (is_forked_from_rank()) throw NotInitialized(describe_fork());
  }

 private:
  InsideLibrary inside_;
};

/// A thread that has called the library. It lives as long as the thread does; others remember it by
/// a weak pointer.
class CallerThread {
 public:
  static constexpr std::uint64_t kNone = 0;

  explicit CallerThread(std::uint64_t number) : number_(number) {}
  /// Returns that of the calling thread, which is made at its first call.
  static std::shared_ptr<CallerThread> here();
  /// Returns the calling thread's number and makes nothing: kNone before its first call of `here`.
  static std::uint64_t number_here() { return number_here_; }

  /// Its own among all threads of the process, those that have ended included. Never kNone.
  [[nodiscard]] std::uint64_t number() const { return number_; }

 private:
  friend class CallerThreads;
  static thread_local constinit std::uint64_t number_here_;
  // the number of the CallerThreads that saw the thread last
  static thread_local constinit std::uint64_t known_here_;

  const std::uint64_t number_;
  const bool calls_back_ = CallbackThread::is_here();
  std::atomic<const HandleState*> waits_for_{nullptr};  // the thread writes it, others read it
  std::atomic<std::uint64_t> waits_{0};                 // likewise: how often it has begun to wait
};

/// The threads that wait, or waited, for operations of one engine, and the one that has made it.
class CallerThreads {
 public:
  CallerThreads();
  CallerThreads(const CallerThreads&) = delete;
  CallerThreads& operator=(const CallerThreads&) = delete;

  /// Counts the calling thread among them.
  void add_here() {
    if (CallerThread::known_here_ != number_) add(CallerThread::here());
  }

  /// The calling thread waits for `pending`, for as long as this lives.
  class Wait {
   public:
    Wait(CallerThreads& threads, const HandleState& pending);
    ~Wait() { thread_->waits_for_.store(nullptr, std::memory_order_release); }
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;

   private:
    const std::shared_ptr<CallerThread> thread_;
  };

  /// One wait of a thread, told from its others by how many there were before.
  struct Waiting {
    std::uint64_t thread = CallerThread::kNone;
    std::uint64_t waits = 0;
    const HandleState* pending = nullptr;
    bool operator==(const Waiting&) const = default;
  };
  /// Makes `all` what each of the threads waits for, in the order in which they came, if all that
  /// live do; else nothing. Of the CallbackThread that is asked only if it `has_calls` to make for
  /// this engine, or has made some. Allocates only where `all` has no room for them.
  void if_all_wait(std::vector<Waiting>& all, bool has_calls = false);

 private:
  void add(const std::shared_ptr<CallerThread>& thread);

  const std::uint64_t number_;
  std::mutex mutex_;
  std::vector<std::weak_ptr<CallerThread>> threads_;
};

}  // namespace hvd
