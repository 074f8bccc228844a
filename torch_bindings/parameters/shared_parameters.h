#pragma once
/// One copy of an optimizer's parameters per host, in memory that its ranks share: each rank
/// updates a share of it in place, and nothing has to be sent afterwards. An update lies between
/// two agreements of all ranks of the set: at the first, all have done with the old values; at the
/// second, all new ones are there. Each of them says on all ranks what is wrong on one. Who writes
/// otherwise is found out by the parameters' version counters, and, as `.data()` has none, by a
/// digest of their values, of which each rank looks at its part. Parameters come into that memory
/// at the first update, and again when they have got other memory since (torch::load), if all ranks
/// have the same values then; else that is a Mismatch. At the end each rank keeps a copy of its
/// own. On several hosts, each has a copy, and as many ranks of the set as the others: they all
/// make the same update, and go on with the first one's copy where an update is refused or fails.
/// Thread: the optimizer's. Errors: InvalidArgument for what cannot lie there; Mismatch on all
/// ranks.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "hvd/hvd.h"

namespace hvd {

class SharedParameters {
 public:
  using Named = std::pair<std::string, at::Tensor>;

  /// Local. `equalize`, which is collective, makes the copies of all hosts, and the states of their
  /// optimizers, those of the owners: what a rank has written, or not written, when an update is
  /// refused or fails may be in its host's alone. It returns why this rank could not follow, empty
  /// if it has; then the next update tries it again, and is refused where that fails. Throws
  /// InvalidArgument, on all ranks, where the ranks of a host share no memory, and where hosts have
  /// different numbers of ranks of the set.
  SharedParameters(const ProcessSet& process_set, std::string name,
                   std::function<std::string()> equalize);
  ~SharedParameters();
  SharedParameters(const SharedParameters&) = delete;
  SharedParameters& operator=(const SharedParameters&) = delete;

  /// Local. Throws InvalidArgument, naming the parameter, for one that is not in memory of the host
  /// of its own, and adds none then.
  void add(std::span<const Named> parameters);

  /// Returns the ranks that update a share each, on the first host; the ranks of the other hosts do
  /// what these do, in the same order.
  [[nodiscard]] const std::vector<int>& owners() const { return owners_; }
  /// Returns, for an owner, the ranks of the other hosts that have its share; none for others.
  [[nodiscard]] const std::vector<int>& twins() const { return twins_; }
  /// Returns which share this rank updates.
  [[nodiscard]] std::size_t self() const { return self_; }

  /// Collective. With a `refusal` on any rank, all throw Mismatch with its words, and no parameter
  /// may be written. So it is if a rank has written to parameters since the last update, if they
  /// differ, and if they cannot lie in shared memory. Returns whether some have moved.
  bool begin_update(const std::string& refusal = {});
  /// Collective. With a `failure` on any rank, all throw Mismatch with its words.
  void end_update(const std::string& failure = {});

  /// Returns whether the parameter lies in such memory of any optimizer of this rank.
  [[nodiscard]] static bool contains(const at::Tensor& parameter);
  /// Notes that what has just written to parameters has written the same on all ranks (a broadcast,
  /// a checkpoint): the next update accepts it.
  static void written_alike();
  /// Returns how often that was said.
  [[nodiscard]] static std::uint64_t writes_alike();
  /// Calls `listener` each time that is said, as long as somebody holds it.
  static void on_written_alike(std::weak_ptr<const std::function<void()>> listener);

 private:
  struct Slot {
    std::string name;
    at::Tensor parameter;
    at::Tensor home;           ///< where it lies; undefined until it has come there
    std::int64_t version = 0;  ///< of the parameter, after the last update
    std::size_t digest = 0;    ///< likewise, of this rank's part of its values
    [[nodiscard]] bool is_at_home() const {
      return home.defined() && parameter.const_data_ptr() == home.const_data_ptr();
    }
  };
  [[nodiscard]] std::string why_not();
  [[nodiscard]] std::vector<Slot*> away();
  [[nodiscard]] std::shared_ptr<void> open_where_all_have_room(const at::Tensor& places,
                                                               std::size_t bytes) const;
  void bring_home(const std::vector<Slot*>& slots);
  [[noreturn]] void refuse(const std::string& mine);
  void refuse_different() const;
  void note();
  void equalize();
  [[nodiscard]] std::size_t digest_of_part(const at::Tensor& home) const;

  const ProcessSet process_set_;
  const std::string name_;
  const std::function<std::string()> equalize_;
  std::vector<int> owners_, twins_;
  std::size_t self_ = 0;
  int maker_ = 0;  ///< the rank of this host whose memory it is
  std::vector<Slot> slots_;
  std::uint64_t forgiven_ = 0;  ///< of `written_alike()`
  std::string unlike_;          ///< why this rank has not what the owners have; empty if it has
};

}  // namespace hvd
