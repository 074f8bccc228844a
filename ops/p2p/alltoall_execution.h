#pragma once
/// An AlltoallExecution is one alltoall across domains. What goes to a rank of the same domain is copied by that rank out of the sender's
/// arena, or from where it is; what goes elsewhere travels in messages between the two ranks, each byte once. In the batch's state,
/// `finished` counts the ranks that have read what they want of the others' blocks; until all have, blocks stay as they are.

#include <deque>

#include "ops/p2p/chunks.h"
#include "ops/p2p/execution.h"

namespace hvd {

class AlltoallExecution final : public P2pExecution {
 public:
  AlltoallExecution(P2pContext& context, Batch batch);
  Progress advance() override;
  [[nodiscard]] std::optional<Route> route() const override { return Route::Pairs; }

 private:
  /// A rank of another domain.
  struct Peer {
    Peer(Requests& requests, const ChunkedRun& to, const ChunkedRun& from, Elements of_inputs, Elements of_outputs);
    ChunkedSend send;
    ChunkedReceive receive;
    Elements sent, received;
  };

  bool copy_here();
  bool exchange(Peer& peer);

  std::deque<Peer> peers_;  // stay where they are
  bool copied_here_ = false;
  bool is_lost_ = false;  ///< a rank of this domain has died: this is never over
};

}  // namespace hvd
