#pragma once
/// A PeerCall is one send or recv, as a caller gives it. A value.
// Tested in tests/hvd/engine/peer_messages_test.cc

#include <cstddef>
#include <cstdint>
#include <memory>

#include "hvd/options.h"
#include "hvd/types.h"

namespace hvd {

struct PeerCall {
  const void* input = nullptr;  ///< send: the elements
  void* output = nullptr;       ///< recv: where they go
  DataType dtype = DataType::Float32;
  std::int64_t count = 0;  ///< of elements
  int peer = kAnyPeer;     ///< a global rank
  int tag = 0;
  std::shared_ptr<void> keep_alive = {};  ///< owns the memory for as long as it is in use

  [[nodiscard]] std::size_t bytes() const { return static_cast<std::size_t>(count) * element_bytes(dtype); }
};

}  // namespace hvd
