#pragma once
/// Checks of what has to be the same on all ranks before they exchange it: one small allgather
/// finds out, and where it differs all ranks say so in words. One thread at a time; all functions
/// but check_root are collective over the process set. Errors: Mismatch on all ranks;
/// InvalidArgument at the call for a bad root.
// Tested in tests/torch_bindings/optimizer/parameters_test.cc,
// tests/torch_bindings/what_if/what_if_state_test.cc

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hvd/hvd.h"

namespace hvd::detail {

/// Throws InvalidArgument unless `root_rank` is a rank of the set. Sends nothing.
void check_root(std::string_view what, int root_rank, const ProcessSet& process_set);

/// Returns the digest (hvd/base/digest.h) of the elements of a dense tensor, wherever it is; waits
/// for its device.
std::uint64_t digest_of_values(const at::Tensor& tensor, std::uint64_t before);
/// Returns 44 bits of a digest as sizes of a tensor: of one without elements that travels with
/// others, so that a difference is a Mismatch on all ranks.
Shape shape_of_digest(std::uint64_t digest);

/// Things by name, and what a rank says of them: {"tensor 'weight'", "float32 [3, 2]"}. No name
/// twice.
using Statements = std::vector<std::pair<std::string, std::string>>;

/// Returns if all ranks say the same of the same names, in whatever order: 16 bytes per rank
/// travel, however many names there are. Throws Mismatch otherwise, on all ranks, saying which
/// ranks say what of the first names that differ, or lack them.
void agree_on(std::string_view what, const Statements& statements, const ProcessSet& process_set);

/// Returns a tensor in words: "float32 [3, 2]", and its device unless that is the CPU.
std::string describe(const at::Tensor& tensor);

/// Returns the texts of all ranks, in rank order, as tensors of bytes on the set's first rank, and
/// nothing on the others.
std::vector<at::Tensor> gather_text(const std::string& text, const ProcessSet& process_set);

/// Collective over the set. Returns what its ranks have to say, one after the other, and only what
/// this one has where ranks have joined or left. `name` tells such talks apart.
std::string said_by_all(const std::string& mine, const std::string& name,
                        const ProcessSet& process_set);

/// An allreduce in which a rank may refuse to take part, by a `refusal` that is not empty: then all
/// ranks throw Mismatch, with its words, and not what the sum would have been. Ranks that all
/// refuse get something.
at::Tensor allreduce_unless_refused(const at::Tensor& tensor, const AllreduceOptions& options,
                                    const std::string& refusal);

/// The first of several failures. Calls go on after one, so that no other rank waits for this one's
/// part in them; it is thrown at the end.
class FirstFailure {
 public:
  /// Calls, and notes what that throws.
  template <class Call>
  void attempt(const Call& call) {
    try {
      call();
    } catch (...) {
      note();
    }
  }
  /// Notes the exception that is being handled, unless there is one from before.
  void note() {
    if (!first_) first_ = std::current_exception();
  }
  /// Notes it in the place of one from before, which it explains.
  void replace() { first_ = std::current_exception(); }
  explicit operator bool() const { return first_ != nullptr; }
  void rethrow() const {
    if (first_) std::rethrow_exception(first_);
  }

 private:
  std::exception_ptr first_;
};

}  // namespace hvd::detail
