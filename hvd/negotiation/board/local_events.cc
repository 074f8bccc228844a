#include "hvd/negotiation/board/local_events.h"

#include <cstddef>

namespace hvd {

void UnsaidEvents::say_all(const std::function<bool(const UnitKey&)>& has_number,
                           const std::function<void(const LocalEvent&)>& say) {
  bool barred = false;
  for (std::size_t i = 0; i < events_.size();) {
    const LocalEvent& next = events_[i];
    const bool ready = next.kind == LocalEvent::Kind::Ready;
    const bool passes_ready = ready || next.kind == LocalEvent::Kind::Doubted;
    barred = barred || (!passes_ready && i > 0);
    if (barred || (ready && !has_number(next.key))) {
      ++i;
      continue;
    }
    const LocalEvent event = std::move(events_[i]);
    events_.erase(events_.begin() + static_cast<std::ptrdiff_t>(i));
    const std::size_t left = events_.size();
    say(event);
    if (events_.size() != left) i = 0;  // some were dropped
  }
}

void UnsaidEvents::drop_ready(const UnitKey& key) {
  std::erase_if(events_, [&](const LocalEvent& event) {
    return event.kind == LocalEvent::Kind::Ready && event.key == key;
  });
}

void UnsaidEvents::forget_set(int process_set) {
  std::erase_if(events_, [&](const LocalEvent& event) {
    return event.kind != LocalEvent::Kind::Left && event.key.process_set == process_set;
  });
}

}  // namespace hvd
