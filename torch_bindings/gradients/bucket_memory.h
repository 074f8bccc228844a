#pragma once
/// The memory in which the gradients of a bucket travel: what lies where in it, and how a gradient
/// gets there and back. On the host it is memory that the ranks share; on a GPU what the backend
/// lends, where it gains from it (Backend::allocate). On the host a gradient that autograd has made
/// in shared memory (torch_bindings/gradients/gradient_memory.h) stays there, another is copied
/// when backward gives it, from the cache; on a GPU all of a bucket by one launch, when it is
/// complete, which the backend makes on its own stream: until the bucket is reduced, autograd's
/// memory is kept.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hvd/hvd.h"
#include "hvd/submission.h"
#include "torch_bindings/gradients/gradient_memory.h"

namespace hvd {

/// A parameter, and what messages call it.
struct NamedParameter {
  std::string name;
  at::Tensor parameter;
};

/// The memory of one bucket. A member is a parameter; its gradient is what `.grad` holds, and what
/// travels of it is that itself, its 16-bit form, or a copy in this memory, where the gradient
/// lives from then on. Without room (a device that has none to lend) gradients travel from where
/// autograd has made them. Thread: the reducer's, under its lock, without recording of gradients.
/// Errors: what making memory throws; InvalidArgument for a type that is not carried.
class BucketMemory {
 public:
  /// The terms that hold for all buckets of a reducer.
  struct Terms {
    Compression compression;
    bool are_views = true;  ///< gradients live in the memory, where they travel in their own type
    bool may_be_made_there = false;  ///< autograd may make them in the memory that ranks share
    bool is_alone = false;     ///< a user may change what is under way, as nothing is added to it
    bool go_in_parts = false;  ///< each rank keeps another part, by the order of the memory
  };
  /// Returns GPU memory for gradients that travel in this type; null where there is none to have.
  using Lend = std::function<std::shared_ptr<void>(DataType, std::size_t bytes)>;

  /// Refers to the members, by which the host's memory knows who reduces in it, and to the terms.
  BucketMemory(const std::vector<const NamedParameter*>& members, const Terms& terms);

  /// Returns the type in which a gradient of the parameter travels.
  static DataType wire_type(const NamedParameter& member, const Compression& compression);
  /// Makes room for buckets of one device, in one block, in which they are still reduced in place
  /// when they travel together; none where members have moved to another device since.
  /// `are_taken_together`: each bucket's gradients are copied when it is complete.
  static void make_room(const std::vector<BucketMemory*>& buckets, bool are_taken_together,
                        const Lend& lend);
  /// Frees it. What lives in it keeps its part.
  void give_up();
  [[nodiscard]] bool has_room() const { return memory_ != nullptr; }
  [[nodiscard]] bool is_taken_together() const { return is_taken_together_; }

  /// Lets the member's gradient live here, unless all are taken together. `just_given`: in the hook
  /// that autograd calls with it.
  void take_in(std::size_t member, bool just_given);
  /// Makes what travels of a gradient that does not live here, once it is complete.
  void pack(std::size_t member);
  /// Does what `take_in` does for these members, which have been packed, all at once.
  /// `are_thrown_away`: they count as zeros, and `.grad` may be what has come after them.
  /// `other_streams`: some were written on streams that this one waits for, and their memory is
  /// those streams'.
  void take_in_together(const std::vector<std::size_t>& members, bool are_thrown_away,
                        bool other_streams);
  /// Makes what travels zeros.
  void fill_with_zeros(std::size_t member);
  /// Notes that what travels has been written to since.
  void note_result(std::size_t member) { cells_[member].zeros_at = -1; }

  /// Returns the tensor that is sent: until it is reduced it may be another than the result's.
  [[nodiscard]] const at::Tensor& sent(std::size_t member) const;
  /// Returns the tensor in which the result lies.
  [[nodiscard]] const at::Tensor& result(std::size_t member) const { return cells_[member].wire; }
  /// Returns whether what is sent is the gradient itself.
  [[nodiscard]] bool sends_gradient(std::size_t member) const;
  /// Returns whether gradients of the member live here.
  [[nodiscard]] bool is_home(std::size_t member) const { return cells_[member].home.defined(); }
  /// Returns whether its gradient does so now.
  [[nodiscard]] bool has_gradient(std::size_t member) const;
  /// Returns the member as an argument of a submission, which is to keep what is added to `kept`.
  TensorArgument argument(std::size_t member, std::vector<std::shared_ptr<void>>& kept);

  /// Makes the results of these members their gradients.
  void give_back(const std::vector<std::size_t>& members);
  /// Frees what autograd has made of gradients that the backend has copied.
  void let_go_of_given();
  /// Makes what autograd has made the gradient again: of a submission that has failed nothing has
  /// been copied. Returns whether it was.
  bool put_given_back(std::size_t member);
  /// Has the next gradients live in this memory, and not where autograd has made the last ones.
  void go_home();

 private:
  struct Cell {
    explicit Cell(const NamedParameter* whose)
        : named(whose), type(whose->parameter.scalar_type()) {}
    [[nodiscard]] at::Tensor& gradient() const { return named->parameter.mutable_grad(); }
    const NamedParameter* named;
    at::ScalarType type;  ///< of the parameter, when memory was made for it
    at::Tensor place;     ///< memory of the bucket, in the parameter's layout; undefined if another
                          ///< type travels
    at::Tensor home;  ///< where the gradient lives: `place`, or where autograd made it if that is
                      ///< shared memory; undefined as `place`
    std::unique_ptr<detail::AnnouncedGradient>
        announced;     ///< null where autograd makes it in ordinary memory
    at::Tensor given;  ///< what autograd has made, on its way into `wire`; undefined otherwise
    at::Tensor wire;   ///< what travels: `home`, or its 16-bit form; where there is no room the
                       ///< gradient itself, or that
    std::int64_t zeros_at = -1;  ///< version of `wire` when made zeros, and not written to since
  };

  [[nodiscard]] at::ScalarType wire_type(const Cell& cell) const;
  static void go_home(Cell& cell);

  std::vector<Cell> cells_;
  const Terms& terms_;
  std::shared_ptr<void> memory_;  ///< of what travels; null without room
  bool is_taken_together_ = false;
};

}  // namespace hvd
