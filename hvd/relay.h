#pragma once
/// Room card: how the domains of a world agree. The leaders form a binomial tree with domain 0 at its root. Upwards flow
/// introductions (once per tensor and rank) and readiness (one number per tensor, when a whole subtree is ready); downwards flow the
/// introductions of all ranks and the root's decisions: what is agreed, and where a batch is cut. A step costs each leader a message
/// per neighbour and per group of tensors that became ready together, in O(log domains) hops; nothing is gathered at the root but
/// one number per tensor and child.
/// Run by the leader's driver. Fails by throwing BackendError (wire) or WireError (a malformed message).

#include <cstdint>
#include <functional>
#include <map>
#include <unordered_map>
#include <vector>

#include "hvd/errors.h"
#include "hvd/negotiator.h"
#include "hvd/transport.h"

namespace hvd {

/// What the relay asks of its engine.
struct RelayActions {
  /// A rank of another domain introduces a tensor to this one's log.
  std::function<void(const UnitKey&, int rank, const Signature&)> introduce;
  std::function<void(const UnitKey&, const std::vector<bool>& present)> agree;
  std::function<void()> cut;
  std::function<void(int rank)> leave;
  std::function<void(const Status&)> fail;
  /// The domains with ranks in a process set, ascending.
  std::function<std::vector<int>(int process_set)> domains_of;
};

class Relay {
 public:
  Relay(Transport& transport, RelayActions actions);

  // ---- what this domain has to say; the next `advance` sends it
  void introduced(const UnitKey& key, int rank, const Signature& signature);
  void domain_ready(const UnitKey& key, const std::vector<bool>& present);
  void left(int rank);
  void failed(const Status& status);
  /// Root: tells all other domains that a batch is cut here.
  void announce_cut();

  /// Sends what has gathered and acts on what has arrived. True if there was anything.
  bool advance();
  [[nodiscard]] bool is_root() const { return transport_.domain() == 0; }
  /// Some domain of this leader's subtree is ready for something that is not decided yet.
  [[nodiscard]] bool is_waiting() const { return !counts_.empty(); }

 private:
  struct Known {
    UnitKey key;
    std::map<int, SharedSignature> remote;  ///< what ranks of other domains said, for the day this domain forgets it
  };
  struct Count {
    std::uint32_t subtrees = 0;  ///< of this domain and the children, how many are ready
    std::vector<bool> present;
  };

  void receive(const Message& message);
  void receive_introduction(Reader& reader, bool from_parent);
  void spread_introduction(std::uint32_t id, const UnitKey& key, int rank, const Signature& signature);
  void learn(std::uint32_t id, const UnitKey& key, int rank, const Signature& signature);
  void count_ready(std::uint32_t id, const std::vector<bool>& present);
  void decide(std::uint32_t id, const std::vector<bool>& present);
  void forget_if_unnamed(std::uint32_t id);
  [[nodiscard]] std::uint32_t subtrees_with(int process_set) const;
  void send(int domain, const Bytes& item);
  void send_down(const Bytes& item);
  bool flush();

  Transport& transport_;
  RelayActions actions_;
  int parent_ = -1;
  struct Child {
    int domain, end;  ///< its subtree is [domain, end)
  };
  std::vector<Child> children_;
  std::map<UnitKey, std::uint32_t> ids_;
  std::unordered_map<std::uint32_t, Known> known_;
  std::unordered_map<std::uint32_t, Count> counts_;
  std::map<UnitKey, std::vector<bool>> ready_without_id_;  ///< ready here before the root's number for it came down
  std::uint32_t next_id_ = 0;                              ///< root
  std::map<int, Writer> outgoing_;
  bool failed_ = false;
};

}  // namespace hvd
