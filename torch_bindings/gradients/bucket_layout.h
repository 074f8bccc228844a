#pragma once
/// Deals parameters to buckets: which gradients travel together, and in which order. Pure: no
/// tensors, no ranks, no memory; what it is asked twice it answers alike on every rank that has the
/// same parameters. Any thread.

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace hvd {

/// A BucketLayout deals the parameters of an optimizer to buckets.
class BucketLayout {
 public:
  /// A parameter, as far as the layout depends on it.
  struct Member {
    std::string name;
    std::size_t bytes = 0;  ///< of what travels of its gradient
    int kind = 0;           ///< a bucket is of one kind: type and device
    bool alone = false;     ///< it is in no bucket
  };
  /// A bucket: places of its members, in the order in which they lie in it.
  using Bucket = std::vector<std::size_t>;

  /// The rules by which it deals.
  struct Terms {
    std::size_t most_bytes = 0;      ///< of a bucket that has several members
    std::size_t first_bytes = 0;     ///< likewise of the first one
    std::vector<std::size_t> order;  ///< of all members; empty: the last one first
    std::optional<int> groups;  ///< as many buckets, in the members' order, whatever their bytes
    std::vector<std::vector<std::size_t>>
        lists;  ///< buckets that the user has made; the rest is dealt by bytes
  };

  /// Returns the buckets: those of the lists first. A bucket of several kinds becomes one for each,
  /// and one without members none. Throws InvalidArgument, naming the member, for one that is in
  /// two lists, and for less than one group.
  static std::vector<Bucket> deal(const std::vector<Member>& members, const Terms& terms);
};

}  // namespace hvd
