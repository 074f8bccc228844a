#include "hvd/negotiation/leaders/leader_inbox.h"

#include <span>

namespace hvd {

namespace {

LeaderItem item_of(const Bytes& bytes) {
  Reader reader(bytes);
  return decode_item(reader);
}

}  // namespace

void LeaderInbox::receive(const Message& message) {
  if (message.from == links_.parent() && !waiting_.empty()) {
    // A failure does not wait its turn: what it must come after may never happen.
    for (Reader items(message.bytes); !items.at_end();)
      if (const Bytes item = items.get_bytes(); item_of(item) == LeaderItem::Fail)
        act_(item, message.from, false);
    waiting_.push_back({message});
    return;
  }
  const bool passed_on = pass_on_decisions(message);
  std::size_t done = 0;
  act_on(done, message, passed_on);
  if (done < message.bytes.size()) waiting_.push_back({message, done, passed_on, true});
}

bool LeaderInbox::take_waiting() {
  if (waiting_.empty()) return false;
  Waiting& next = waiting_.front();
  if (!std::exchange(next.begun, true)) next.passed_on = pass_on_decisions(next.message);
  const std::size_t before = next.done;
  act_on(next.done, next.message, next.passed_on);
  if (next.done < next.message.bytes.size()) return next.done > before;
  waiting_.pop_front();
  return true;
}

void LeaderInbox::wait_with(const Bytes& item, int from) {
  waiting_.push_back({{from, LeaderItems::message_of(item)}, 0, true, true});
}

/// Acting on a decision takes time that grows with the world (every rank's word is looked at), so
/// it is passed on first: else each hop of the way down would add that time. Returns whether there
/// is nothing but decisions in the message, and the children have it.
bool LeaderInbox::pass_on_decisions(const Message& message) {
  if (message.from != links_.parent()) return false;
  for (Reader items(message.bytes); !items.at_end();) {
    const LeaderItem item = item_of(items.get_bytes());
    if (item != LeaderItem::Agree && item != LeaderItem::Cut) return false;
  }
  links_.pass_on(message.bytes);
  return true;
}

/// Acts on the items of a message from byte `at` on, and moves it past what is done: to the end, or
/// to a cut that must wait.
void LeaderInbox::act_on(std::size_t& at, const Message& message, bool passed_on) {
  Reader items(std::span<const std::byte>(message.bytes).subspan(at));
  while (!items.at_end()) {
    const Bytes item = items.get_bytes();
    if (!act_(item, message.from, passed_on)) return;
    at = message.bytes.size() - items.left();
  }
}

}  // namespace hvd
