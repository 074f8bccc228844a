#pragma once
/// A rank's side of an NCCL communicator on virtual GPUs: what it has issued, and its registered
/// memory. The ranks meet in the cluster, which notes misuse. For the device's owner, one thread at
/// a time.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/gpu/host_streams.h"
#include "tests/support/host_cluster.h"

namespace hvd::gpu::test {

class HostComm {
 public:
  /// What the device does for it.
  struct Device {
    /// Puts work on a stream, which is whatever a collective was given.
    std::function<void(const HostComm& comm, void* stream, StreamOperation operation)> put;
    /// Writes what nobody may take for a result.
    std::function<void(const MemoryRange& range)> spoil;
    /// Returns where the host finds the device's memory.
    std::function<void*(const void* memory)> on_host;
  };

  HostComm(HostCluster& cluster, const NcclUniqueId& id, int ranks, int rank, bool blocking,
           Device device);

  const int rank;
  const bool blocking;

  /// Notes a call that is not allowed now.
  void look_at(const std::string& call, bool may_be_busy) const;
  /// The ranks have met, and no window is under way.
  [[nodiscard]] bool is_settled() const { return initialised_ && !awaits_window(); }
  [[nodiscard]] bool awaits_window() const { return finish_window_ != nullptr; }
  /// What the communicator comes to when it is asked: Success or InProgress.
  NcclCode poll();
  void wait_until_settled();
  void abort();
  [[nodiscard]] bool is_aborted() const { return aborted_; }

  // ---- collectives and messages
  /// Returns it as the ranks meet with it.
  Contribution collective(void* stream, Contribution part, const std::string& name);
  /// One side of it. Those of one group on one stream travel together.
  void message(void* stream, Contribution part, bool sends, int peer, const std::string& name);
  /// Lets the streams have what was issued, after so many polls.
  NcclCode issue(int busy_polls);

  // ---- registered memory
  void add_place(const void* memory, std::size_t bytes, const std::string& name, void* handle);
  [[nodiscard]] bool drop_place(const void* handle);
  [[nodiscard]] bool has_place(const void* memory) const;
  [[nodiscard]] std::size_t places() const { return places_.size(); }
  /// Begins a window, of all ranks. `finish`, when all have come, gives its handle; null: none.
  void open_window(const void* memory, std::size_t bytes, std::function<void*()> finish);

 private:
  using Run = std::function<bool(Clock&)>;
  struct Issued {
    void* stream = nullptr;
    UseOfMemory use;
    Run run;
    bool is_message = false;
  };
  struct Place {
    std::size_t bytes = 0;
    std::string name;
    void* handle = nullptr;
  };
  /// What NCCL's kernels read and write of this rank's memory.
  [[nodiscard]] UseOfMemory use_of(const Contribution& part) const;
  [[nodiscard]] StateText place_of(const void* memory) const;
  void add(void* stream, UseOfMemory use, Contribution part, bool is_message,
           const std::function<bool()>& is_over,
           const std::function<bool(const Contribution& part, Clock& clock)>& meet);
  void put_on_streams();

  HostCluster& cluster_;
  HostCluster::CommGroup& group_;
  const Device device_;
  bool initialised_ = false, aborted_ = false;
  int busy_ = 0;  ///< so many polls say InProgress
  std::uint64_t next_ = 0, windows_ = 0;
  std::map<std::pair<int, int>, std::uint64_t> messages_;  ///< by sender and receiver
  std::vector<Issued> issued_;                             ///< since the last `issue`
  std::map<const std::byte*, Place> places_;
  std::function<void()> finish_window_;
};

}  // namespace hvd::gpu::test
