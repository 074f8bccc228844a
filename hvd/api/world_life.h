#pragma once
/// A WorldLife is what the `World` values of one world share, and the thread's choice among worlds.
// Tested in tests/ops/worlds_test.cc

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "hvd/api/running_world.h"
#include "hvd/base/process.h"

namespace hvd {

/// The life of a world beside the global one, until this member leaves it. Any thread.
class WorldLife : public std::enable_shared_from_this<WorldLife> {
 public:
  /// The wait for others that end it too, here and in shutdown().
  static constexpr std::chrono::milliseconds kPatience{300};

  WorldLife(RunningWorld world, std::string name);
  /// Leaves the world.
  ~WorldLife();
  WorldLife(const WorldLife&) = delete;
  WorldLife& operator=(const WorldLife&) = delete;

  /// Returns what runs. Throws NotInitialized once it was left.
  [[nodiscard]] std::shared_ptr<RunningWorld> running() const;
  /// Returns the same, or null where it was left.
  [[nodiscard]] std::shared_ptr<RunningWorld> running_if_any() const;
  /// Returns what runs, also while a thread is ending it. Throws NotInitialized once that is over.
  [[nodiscard]] std::shared_ptr<RunningWorld> not_over() const;
  [[nodiscard]] const std::string& name() const { return name_; }
  /// Returns a number that no other world of this process has.
  [[nodiscard]] std::uint64_t number() const { return number_; }
  /// Leaves it: waits a moment for others that do so too. If they need it longer, it lasts in a
  /// thread of its own.
  void leave() noexcept { static_cast<void>(end(kPatience)); }
  /// Ends it in order with the others, or leaves it to them if they have not come after `patience`:
  /// see Engine::leave. Returns whether all came. Does nothing where it was left before.
  bool end(std::chrono::milliseconds patience) noexcept;
  /// Returns the world of this number, if any of its values is still there.
  [[nodiscard]] static std::shared_ptr<WorldLife> find(std::uint64_t number);
  /// Leaves all worlds of this process that are still there, and ends those that last, waiting for
  /// nobody: for its end.
  static void leave_all() noexcept;

 private:
  const std::string name_;
  const std::uint64_t number_;
  const MadeHere made_;
  mutable std::mutex mutex_;
  std::shared_ptr<RunningWorld> running_;
  std::weak_ptr<RunningWorld> ending_;
};

/// Ends a world that was left, or that has failed, once all of its ranks have left. Returns whether
/// they have.
bool end_in_order(const RunningWorld& world) noexcept;

/// Returns the life of the world of this thread's innermost WorldScope; null outside of them.
[[nodiscard]] WorldLife*& chosen_world();

}  // namespace hvd
