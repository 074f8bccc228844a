#include "tests/support/gpu/host_streams.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <stdexcept>
#include <utility>

namespace hvd::gpu::test {

namespace {
constexpr std::array kNames{"delayed", "late", "random", "eager", "starved"};
/// A device goes on by itself: nobody need ask it for ever.
constexpr int kPatience = 10;
}  // namespace

std::string text_of(const Schedule& schedule) {
  return std::string(kNames.at(static_cast<std::size_t>(schedule.kind))) + ":" +
         std::to_string(schedule.seed);
}

Schedule schedule_of(const std::string& text) {
  const std::size_t colon = std::min(text.find(':'), text.size());
  const auto name = std::find(kNames.begin(), kNames.end(), text.substr(0, colon));
  if (name == kNames.end()) throw std::invalid_argument("no schedule of this name: " + text);
  const std::uint64_t seed = colon == text.size() ? 0 : std::stoull(text.substr(colon + 1));
  return {static_cast<Schedule::Kind>(name - kNames.begin()), seed};
}

Schedule schedule_of_environment() {
  const char* text = std::getenv("HVD_TEST_GPU_SCHEDULE");
  return text == nullptr ? Schedule{} : schedule_of(text);
}

StreamOperation recording_of(const std::shared_ptr<HostCluster::SharedEvent>& event) {
  const std::uint64_t turn = ++event->recorded;
  const auto happen = [event, turn](const Clock& clock) {
    event->happen(turn, clock);
    return true;
  };
  return {.run = happen, .records = event, .turn = turn};
}

StreamOperation waiting_for(const std::shared_ptr<HostCluster::SharedEvent>& event) {
  const std::uint64_t turn = event->recorded.load();
  const auto happened = [event, turn](Clock& clock) {
    if (event->happened.load() < turn) return false;
    clock.join(event->clock_of(turn));
    return true;
  };
  return {.run = happened, .awaits = event, .turn = turn};
}

struct HostStreams::Queued : StreamOperation {
  explicit Queued(StreamOperation operation) : StreamOperation(std::move(operation)) {}
  int delay = 0;
  Clock host;          ///< what whoever enqueued it knew
  bool begun = false;  ///< its use of memory is noted
};

struct HostStreams::Stream {
  int number = 0;
  std::size_t actor = 0;
  Clock clock;
  std::deque<Queued> operations;
};

HostStreams::HostStreams(HappensBefore& order, int index)
    : schedule(schedule_of_environment()),
      order_(order),
      index_(index),
      random_(static_cast<unsigned>(index) + 1) {}

HostStreams::~HostStreams() = default;

HostStreams::Stream* HostStreams::create() {
  Stream& made = *streams_.emplace_back(std::make_unique<Stream>());
  if (created_ == 0 && schedule.kind != Schedule::Kind::Delayed)
    random_.seed(static_cast<unsigned>(schedule.seed * 31 + 7) + static_cast<unsigned>(index_));
  made.number = created_++;
  made.actor = order_.add_stream();
  return &made;
}

HostStreams::Stream* HostStreams::known(CudaStream* stream) {
  for (auto& owned : streams_)
    if (owned.get() == reinterpret_cast<Stream*>(stream)) return owned.get();
  throw std::logic_error("unknown stream");
}

bool HostStreams::is_idle(const Stream* stream) const { return stream->operations.empty(); }

const Clock& HostStreams::clock_of(const Stream* stream) const { return stream->clock; }

void HostStreams::destroy(Stream* stream) {
  std::erase_if(streams_, [&](const auto& owned) { return owned.get() == stream; });
}

std::string HostStreams::name_of(const Stream* stream) const {
  return "stream " + std::to_string(stream->number) + " of rank " + std::to_string(index_);
}

void HostStreams::enqueue(Stream* stream, StreamOperation operation) {
  Queued queued(std::move(operation));
  queued.delay = delay == 0 ? 0 : static_cast<int>(random_() % static_cast<unsigned>(delay + 1));
  queued.host = order_.now();
  stream->operations.push_back(std::move(queued));
  if (schedule.kind == Schedule::Kind::Eager) run_all(nullptr);
  if (schedule.kind == Schedule::Kind::Starved) run_all(starved());
}

HostStreams::Stream* HostStreams::starved() const {
  const auto number =
      static_cast<int>(schedule.seed % static_cast<std::uint64_t>(std::max(created_, 1)));
  for (const auto& stream : streams_)
    if (stream->number == number) return stream.get();
  return nullptr;
}

/// Runs the first operation of the stream; whether it is over.
bool HostStreams::step(Stream& stream) {
  Queued& first = stream.operations.front();
  if (!std::exchange(first.begun, true)) {
    stream.clock.join(first.host);
    stream.clock.tick(stream.actor);
    order_.stream_uses(stream.actor, stream.clock, first.use);
  }
  if (!first.run(stream.clock)) return false;
  stream.operations.pop_front();
  in_vain_ = 0;
  return true;
}

void HostStreams::run_all(const Stream* but) {
  for (bool moved = true; moved;) {
    moved = false;
    for (auto& stream : streams_)
      while (stream.get() != but && !stream->operations.empty() && step(*stream)) moved = true;
  }
}

/// What a device without anybody's questions comes to in the end.
bool HostStreams::run_each_once() {
  bool moved = false;
  for (auto& stream : streams_) moved = (!stream->operations.empty() && step(*stream)) || moved;
  return moved;
}

void HostStreams::run_some() {
  std::vector<Stream*> busy;
  for (auto& stream : streams_)
    if (!stream->operations.empty()) busy.push_back(stream.get());
  for (auto steps = random_() % 4; steps > 0 && !busy.empty(); --steps) {
    const auto chosen = busy.begin() + static_cast<std::ptrdiff_t>(random_() % busy.size());
    step(**chosen);
    if ((*chosen)->operations.empty()) busy.erase(chosen);
  }
}

bool HostStreams::run_towards(const std::shared_ptr<HostCluster::SharedEvent>& event,
                              std::uint64_t turn, int depth) {
  const auto makes_it = [&](const Queued& queued) {
    return queued.records == event && queued.turn >= turn;
  };
  const auto has_it = [&](const auto& stream) {
    return std::any_of(stream->operations.begin(), stream->operations.end(), makes_it);
  };
  const auto stream = std::find_if(streams_.begin(), streams_.end(), has_it);
  if (stream == streams_.end() || depth > 64) return false;
  bool moved = false;
  while (event->happened.load() < turn) {
    const auto awaits = (*stream)->operations.front().awaits;
    const std::uint64_t awaited = (*stream)->operations.front().turn;
    if (awaits != nullptr) moved = run_towards(awaits, awaited, depth + 1) || moved;
    if (!step(**stream)) break;
    moved = true;
  }
  return moved;
}

void HostStreams::run_delayed() {
  for (auto& stream : streams_)
    while (!stream->operations.empty() && stream->operations.front().delay-- <= 0 && step(*stream))
      continue;
}

void HostStreams::pump(const std::shared_ptr<HostCluster::SharedEvent>& asked, std::uint64_t turn) {
  ++in_vain_;
  switch (schedule.kind) {
    case Schedule::Kind::Delayed: return run_delayed();
    case Schedule::Kind::Eager: return run_all(nullptr);
    case Schedule::Kind::Random: return run_some();
    case Schedule::Kind::Starved: run_all(starved()); break;
    case Schedule::Kind::Late: break;
  }
  const bool waits = asked != nullptr && asked->happened.load() < turn;
  if (waits && random_() % 3 == 0) return;  // not yet
  if (waits) run_towards(asked, turn, 0);
  if (in_vain_ > kPatience) run_each_once();
}

}  // namespace hvd::gpu::test
