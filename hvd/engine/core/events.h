#pragma once
/// EngineEvents are the calls of an engine's parts to the engine: the one interface that leads back
/// up.
// Tested in tests/hvd/engine/engine_test.cc

#include <cstdint>

#include "hvd/engine/core/ledger.h"
#include "hvd/engine/core/parts.h"
#include "hvd/engine/core/turn.h"
#include "hvd/negotiation/board/negotiation_log.h"

namespace hvd {

/// Says how what is under way is heard of.
enum class Polling : std::uint8_t {
  None,    ///< by doorbells
  Needed,  ///< by asking again and again
  Urgent,  ///< likewise, and work is held up until a device ends some that it has
};

class EngineEvents : public OutcomeListener {
 public:
  /// Ends the entry with `status`: its waiters may go on.
  virtual void finish(Entry& entry, Status status) HVD_REQUIRES(engine_mutex) = 0;
  /// This rank is the `arrived`th to be ready for the entry: agrees on it if that completes it.
  virtual void arrived(Entry& entry, std::uint32_t arrived) HVD_REQUIRES(engine_mutex) = 0;

  /// Does what can be done without blocking. Returns whether there was anything.
  virtual bool progress(const Turn& turn) noexcept = 0;
  /// Looks for deaths, stalls and conflicts, if it is time.
  virtual void look_for_trouble(const Turn& turn) noexcept = 0;
  /// Returns when it is time at the latest, where the usual times are too late. Any thread.
  [[nodiscard]] virtual Clock::time_point time_of_trouble() const = 0;
  /// Returns how this rank hears of what is under way.
  [[nodiscard]] virtual Polling polling(const Turn& turn) const = 0;
  /// Returns whether other ranks have left results for this one, or rounds to be ended, which no
  /// doorbell tells of.
  [[nodiscard]] virtual bool has_results(const Turn& turn) = 0;
  /// Returns whether there is something to be driven now or soon.
  [[nodiscard]] virtual bool has_more(const Turn& turn) = 0;
  /// Returns whether messages of other hosts may come at any time, which ring no doorbell.
  [[nodiscard]] virtual bool expects_messages(const Turn& turn) = 0;
};

}  // namespace hvd
