#pragma once
/// The names of submissions that have none of their own: those that the library makes up, and those
/// of the operations by which process sets come and go. Values and pure functions; any thread.
// Tested in tests/hvd/engine/caller_threads_test.cc

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "hvd/base/visible.h"
#include "hvd/types.h"

namespace hvd {

/// The thread of the program that submits without names: the numbers of each lane are counted by
/// themselves. Ranks can tell the thread that has called `init()` from the others, and no two of
/// the others from one another.
enum class Lane : std::uint8_t { InitThread, OtherThread };

/// The place of a submission without a name among those of its kind, process set and lane.
struct UnnamedPlace {
  Lane lane = Lane::InitThread;
  std::uint64_t number = 0;
};

/// Returns a name for a submission without one; its newline keeps it apart from users' names.
/// Numbers start again when all ranks of the set have joined, as those that joined early have used
/// fewer: `joins` is how often that was.
std::string unnamed(OpKind kind, std::uint64_t joins, std::uint64_t number,
                    Lane lane = Lane::InitThread);
/// Writes the same into `text`, which has room for kUnnamedText characters, and returns it.
std::string_view unnamed(OpKind kind, std::uint64_t joins, std::uint64_t number, Lane lane,
                         std::span<char> text);
inline constexpr std::size_t kUnnamedText = 88;
/// Returns a name for a persistent operation without one, likewise; it stays the operation's own.
std::string unnamed_persistent(OpKind kind, std::uint64_t joins, std::uint64_t number, Lane lane);
/// Returns the name under which the library submits an operation of its own, which belongs to the
/// thread that has called it.
HVD_BETWEEN_LIBRARIES std::string library_name(std::string_view what);
/// Returns whether it is such a name.
bool is_library_name(std::string_view name);
/// Returns what it becomes on the way to the other ranks.
std::string library_name_of(std::string_view name, Lane lane);
/// Returns whether the library has made up the name.
HVD_BETWEEN_LIBRARIES bool is_unnamed(const std::string& name);
/// Returns whether an operation that is submitted may have the name: those that end in a newline
/// are the library's.
HVD_BETWEEN_LIBRARIES bool is_for_users(std::string_view name);
/// Returns the name as messages show it.
HVD_BETWEEN_LIBRARIES std::string_view display_name(const std::string& name);

/// Names of the Control operations, on the global set. The tensor's shape lists the ranks; `root`
/// is the set to remove.
inline constexpr std::string_view kAddProcessSet = "add_process_set";
inline constexpr std::string_view kRemoveProcessSet = "remove_process_set";
inline constexpr std::string_view kJoin = "join";

}  // namespace hvd
