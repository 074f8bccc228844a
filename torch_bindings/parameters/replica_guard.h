#pragma once
/// ReplicaComparer compares between the ranks of a set what should be equal on all of them: names,
/// shapes and values of parameters, and the options of an optimizer's groups. With each round of
/// gradients every rank says digests of them (hvd/base/digest.h), 32 bytes in a place of its own of
/// a small sum, which travels beside the gradients; so all ranks see what all have said, ranks that
/// have joined count as absent, and all throw or none does. Of the values each round compares the
/// next 256 KiB, in the order of the parameters: as many rounds as there are such pieces are one
/// turn. The first round compares all of them, and so does the one after a difference. Values on a
/// GPU are copied to the host while the next step runs, and compared a round later; where all are
/// compared, at once. Thread: the reducer's. Holds the parameters.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "hvd/hvd.h"
#include "hvd/submission.h"
#include "torch_bindings/platform/stream_set.h"

namespace hvd {

namespace detail {

/// In what a ReplicaComparer says of tensors whose values differ, and of parameters.
inline constexpr const char* kAreNotEqual = "s are not equal";
inline constexpr const char* kParametersDiffer = "parameters are not equal";

/// Ranks have other tensors, or in another order: nothing else that they compare fits then,
/// gradients included.
class OtherTensors : public Mismatch {
 public:
  using Mismatch::Mismatch;
};

}  // namespace detail

class ReplicaComparer {
 public:
  using Named = std::vector<std::pair<std::string, at::Tensor>>;
  /// The other values that ranks must have alike.
  struct Terms {
    std::function<std::uint64_t()> digest;
    /// By name: {"lr of group 0", "0.1"}.
    std::function<std::vector<std::pair<std::string, std::string>>()> words;
  };

  /// `name` tells the guards of a process apart, equally on all ranks; `kind` is what messages call
  /// a tensor.
  ReplicaComparer(std::string name, ProcessSet process_set, std::string kind = "parameter");

  /// Compares `tensors` from the next round on, all of them in the first, unless they are those
  /// that it compares already.
  void watch(const Named& tensors);
  /// Compares `terms` as well, in the same rounds.
  void watch(Terms terms) { terms_ = std::move(terms); }

  /// Begins a round: says this rank's digests. All ranks begin the same rounds, each where nothing
  /// changes its parameters. Does nothing in a world of one, and where there are no tensors. Where
  /// Config::replica_guard is Off, the first round compares names and shapes, as gradients go by
  /// name, and that is all.
  void begin_round();
  /// Ends the round that was begun, if one was. Throws Mismatch, on all ranks, where they differ:
  /// it names what differs, the step and the ranks. It is an OtherTensors where names, shapes or
  /// order differ.
  void end_round();
  /// Compares all now, whatever Config::replica_guard is. Collective; throws as end_round() does.
  void check();
  /// Counts a step, for what is said of it.
  void note_step() { ++steps_; }

 private:
  /// The statement of a rank in a round, which all must have alike. All is 0 where it has joined;
  /// `round` is 1 for one that compares all values, else the number of its slice and 2.
  struct Said {
    std::int64_t round = 0, layout = 0, terms = 0, values = 0;
  };
  /// A part of the memory of one tensor.
  struct Piece {
    std::size_t tensor = 0, first_byte = 0, bytes = 0;
  };
  /// A piece on its way from a device.
  struct Staged {
    Piece piece;
    at::Tensor bytes;
    detail::StreamEvent copied;
  };
  enum class Extent : std::uint8_t { Layout, Slice, All };

  void submit(const std::string& name, Extent extent);
  void compare();
  [[nodiscard]] std::uint64_t digest_of_layout() const;
  [[nodiscard]] std::uint64_t digest_of_values(Extent extent);
  [[nodiscard]] std::vector<Piece> pieces(Extent extent) const;
  void stage(const Piece& piece);
  std::string ask_all(const std::vector<std::pair<std::string, std::string>>& words) const;
  [[noreturn]] void tell(const std::vector<Said>& all, std::int64_t Said::*what) const;

  const std::string name_;
  const ProcessSet process_set_;
  const std::string kind_;
  Named tensors_;
  std::vector<std::uint64_t> names_;  ///< digests
  Terms terms_;
  std::uint64_t steps_ = 0;
  std::uint64_t slices_ = 0;  ///< compared so far
  bool all_next_ = true;
  std::vector<Staged> staged_;   ///< for the next round
  std::vector<Piece> compared_;  ///< in this round
  std::shared_ptr<std::vector<Said>>
      said_;  ///< of each rank of the set: the sum in which each has a place
  std::shared_ptr<HandleState> pending_;
};

}  // namespace hvd
