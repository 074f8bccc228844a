#include "tests/scale/simulation.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace scale {

Simulation::Simulation(World world, Program program)
    : world_(world),
      program_(std::move(program)),
      network_(world_.network, world_.hosts(), world_.seed) {
  for (std::size_t i = 0; i < program_.units.size(); ++i) index_of_[program_.units[i].key.name] = i;
  const int tables = world_.tables == 0 ? world_.hosts() : std::min(world_.tables, world_.hosts());
  for (int table = 0; table < tables; ++table)
    tables_.push_back(std::make_unique<Table>(world_, program_, table));
  for (int host = 0; host < world_.hosts(); ++host) {
    Host::Wires wires;
    wires.send = [this, host](int to, Letter letter) {
      letter.number = ++letters_;
      letter.arrival = network_.arrival(host, to, letter.message.bytes.size(), letter.arrival);
      Host& receiver = *hosts_[static_cast<std::size_t>(to)];
      receiver.deliver(std::move(letter));
      wake(receiver);
    };
    wires.launch = [this](const hvd::CutBatch& batch, Time now) { launch(batch, now); };
    hosts_.push_back(std::make_unique<Host>(world_, program_, index_of_, host,
                                            *tables_[static_cast<std::size_t>(host % tables)],
                                            std::move(wires)));
  }
}

void Simulation::wake(Host& host) {
  const auto at = host.next_work();
  if (!at || (host.wake && *host.wake <= *at)) return;
  host.wake = std::max(*at, now_);
  foresee(*host.wake, Event::Kind::Wake, static_cast<std::uint64_t>(host.domain()));
}

void Simulation::begin_round() {
  const std::size_t end = program_.one_by_one ? next_unit_ + 1 : program_.units.size();
  for (std::size_t i = next_unit_; i < end; ++i)
    tensors_left_ += program_.units[i].signature->tensors.size();
  for (int rank = 0; rank < world_.ranks; ++rank)
    foresee(now_ + network_.random(world_.skew), Event::Kind::Submit,
            static_cast<std::uint64_t>(rank));
}

void Simulation::submit(int rank) {
  Host& host = *hosts_[static_cast<std::size_t>(world_.host_of(rank))];
  const std::size_t end = program_.one_by_one ? next_unit_ + 1 : program_.units.size();
  for (std::size_t i = next_unit_; i < end; ++i) host.submit(rank, i);
  last_submission_ = now_;
  wake(host);
}

void Simulation::launch(const hvd::CutBatch& batch, Time now) {
  UnderWay& under_way = batches_[batch.order];
  under_way.tensors = batch.plan.tensors.size();
  // Hosts cut at their own moments, and the last to be simulated need not be the last of them.
  foresee(now, Event::Kind::Done, batch.order);
}

void Simulation::finish(std::uint64_t batch) {
  UnderWay& under_way = batches_.at(batch);
  if (++under_way.hosts < world_.hosts()) return;
  tensors_left_ -= under_way.tensors;
  batches_.erase(batch);
  ++result_.cuts;
  Host& root = *hosts_.front();
  for (const auto& host : hosts_) root.set_depth(std::max(root.depth(), host->depth()));
  if (batches_.empty()) root.batches_are_done();
  if (tensors_left_ == 0) {
    result_.time += now_ - last_submission_;
    next_unit_ = program_.one_by_one ? next_unit_ + 1 : program_.units.size();
    if (next_unit_ < program_.units.size()) begin_round();
    return;
  }
  // The root looks again whether there is something to cut.
  root.drive(std::max(now_, root.busy_until()));
  wake(root);
}

StepResult Simulation::step() {
  result_ = {};
  next_unit_ = 0;
  for (const auto& host : hosts_) host->set_depth(0);
  begin_round();
  while (!events_.empty()) {
    const Event event = events_.top();
    events_.pop();
    now_ = event.at;
    if (event.kind == Event::Kind::Submit) {
      submit(static_cast<int>(event.what));
    } else if (event.kind == Event::Kind::Done) {
      finish(event.what);
    } else {
      Host& host = *hosts_[event.what];
      if (host.wake != event.at) continue;  // it was woken earlier
      host.wake.reset();
      host.drive(std::max(event.at, host.busy_until()));
      wake(host);
    }
  }
  if (next_unit_ != program_.units.size()) throw std::logic_error("the simulated world hangs");
  for (const auto& host : hosts_) {
    result_.rounds = std::max(result_.rounds, host->depth());
    result_.hosts.push_back(host->take_step());
  }
  return std::move(result_);
}

}  // namespace scale
