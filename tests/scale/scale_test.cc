// The scale simulator (tests/scale) against real engines, and what it is for: no leader's part
// grows like the number of hosts. Real ranks are threads with engines of their own; messages and
// bytes are counted at the transports. No time is compared: a dozen polling engines on a few cores
// say nothing about wires.
#include <doctest/doctest.h>

#include <barrier>
#include <cmath>
#include <cstdio>
#include <memory>
#include <mutex>
#include <vector>

#include "hvd/base/text.h"
#include "tests/scale/simulation.h"
#include "tests/support/thread_world.h"

namespace hvd::test {
namespace {

using Operations = scale::Program;
using scale::Simulation;
using scale::StepResult;
using scale::Traffic;
using scale::World;

constexpr int kSteps = 4;

class CountingTransport final : public Transport {
 public:
  struct Counts {
    std::mutex mutex;
    Traffic traffic;
  };
  CountingTransport(std::unique_ptr<Transport> inner, Counts& counts)
      : inner_(std::move(inner)), counts_(counts) {}
  int domain() const override { return inner_->domain(); }
  int domains() const override { return inner_->domains(); }
  void send(int to, SharedBytes message) override {
    {
      const std::lock_guard lock(counts_.mutex);
      const bool up = to < domain();
      ++(up ? counts_.traffic.up_messages : counts_.traffic.down_messages);
      (up ? counts_.traffic.up_bytes : counts_.traffic.down_bytes) += message->size();
    }
    inner_->send(to, std::move(message));
  }
  std::optional<Message> receive() override {
    auto message = inner_->receive();
    if (message) {
      const std::lock_guard lock(counts_.mutex);
      ++counts_.traffic.received_messages;
      counts_.traffic.received_bytes += message->bytes.size();
    }
    return message;
  }

 private:
  std::unique_ptr<Transport> inner_;
  Counts& counts_;
};

/// A few groups of tensors that are too large for the fast path.
Operations small_program(bool one_by_one) {
  Operations program;
  program.one_by_one = one_by_one;
  for (const std::size_t tensors : {2U, 1U, 5U}) {
    Signature signature;
    for (std::size_t i = 0; i < tensors; ++i)
      signature.tensors.push_back({DataType::Float32, {static_cast<std::int64_t>(20000 + i)}, {}});
    scale::Unit& unit = program.units.emplace_back();
    unit.key = {0, OpKind::Allreduce, hvd::formatted("gradients.{}", program.units.size())};
    unit.signature = std::make_shared<const Signature>(std::move(signature));
  }
  return program;
}

Submission submission_of(const scale::Unit& unit, std::vector<std::vector<float>>& memory) {
  Submission submission;
  submission.name = unit.key.name;
  for (const auto& tensor : unit.signature->tensors) {
    auto& values = memory.emplace_back(static_cast<std::size_t>(element_count(tensor.shape)), 1.0F);
    submission.tensors.push_back({values.data(), values.data(), tensor.dtype, tensor.shape});
  }
  return submission;
}

/// What each leader sent and received, step by step.
std::vector<std::vector<Traffic>> run_real(const Operations& program, int ranks, int hosts) {
  std::vector<std::unique_ptr<CountingTransport::Counts>> counts;
  for (int host = 0; host < hosts; ++host)
    counts.push_back(std::make_unique<CountingTransport::Counts>());
  WorldOptions options;
  options.size = ranks;
  options.domains = hosts;
  options.limit = std::chrono::seconds(240);
  options.customize = [&](int, EngineParts& parts) {
    if (!parts.transport) return;
    auto& own = *counts[static_cast<std::size_t>(parts.transport->domain())];
    parts.transport = std::make_unique<CountingTransport>(std::move(parts.transport), own);
  };
  std::vector<std::vector<Traffic>> steps;
  std::barrier together(ranks);
  ThreadWorld world(options);
  world.run([&](int rank, Engine& engine) {
    for (int step = 0; step < kSteps; ++step) {
      std::vector<std::vector<float>> memory;
      memory.reserve(16);
      std::vector<std::shared_ptr<HandleState>> pending;
      for (const auto& unit : program.units) {
        pending.push_back(engine.submit(submission_of(unit, memory)));
        if (program.one_by_one) engine.wait(*pending.back());
      }
      for (const auto& each : pending) engine.wait(*each);
      // Who is done knows that all ranks have begun, so that all leaders have heard everything.
      together.arrive_and_wait();
      if (rank == 0) {
        auto& hosts_of_step = steps.emplace_back();
        for (const auto& each : counts) {
          const std::lock_guard lock(each->mutex);
          hosts_of_step.push_back(std::exchange(each->traffic, {}));
        }
      }
      together.arrive_and_wait();
    }
  });
  return steps;
}

World world_of(int ranks, int hosts) {
  World world;
  world.ranks = ranks;
  world.ranks_per_host = ranks / hosts;
  return world;
}

std::vector<StepResult> simulate(const World& world, const Operations& program,
                                 int steps = kSteps) {
  Simulation simulation(world, program);
  std::vector<StepResult> results;
  for (int step = 0; step < steps; ++step) results.push_back(simulation.step());
  return results;
}

Traffic sum(const std::vector<Traffic>& hosts) {
  Traffic all;
  for (const auto& host : hosts) {
    all.up_messages += host.up_messages;
    all.up_bytes += host.up_bytes;
    all.down_messages += host.down_messages;
    all.down_bytes += host.down_bytes;
    all.received_messages += host.received_messages;
    all.received_bytes += host.received_bytes;
  }
  return all;
}

std::vector<Traffic> traffic_of(const StepResult& step) {
  std::vector<Traffic> hosts;
  for (const auto& host : step.hosts) hosts.push_back(host.traffic);
  return hosts;
}

int children_of(int host, int hosts) {
  int children = 0;
  for (int bit = 1; (host == 0 || bit < (host & -host)) && (host | bit) < hosts; bit <<= 1)
    ++children;
  return children;
}

void print(const char* what, int ranks, int hosts, const Traffic& all) {
  std::fputs(hvd::formatted("{:>3} ranks {:>3} hosts {:>22}: up {:>4} messages {:>6} bytes, down "
                            "{:>4} messages {:>6} bytes\n",
                            ranks, hosts, what, all.up_messages, all.up_bytes, all.down_messages,
                            all.down_bytes)
                 .c_str(),
             stdout);
}

struct WorldSize {
  int ranks, hosts;
};

}  // namespace

TEST_CASE("scale: the simulator counts what real engines count, group by group") {
  const Operations program = small_program(true);
  const auto units = program.units.size();
  for (const auto& [ranks, hosts] :
       {WorldSize{2, 2}, WorldSize{3, 3}, WorldSize{4, 4}, WorldSize{8, 8}, WorldSize{16, 16},
        WorldSize{8, 4}, WorldSize{16, 4}}) {
    CAPTURE(ranks);
    CAPTURE(hosts);
    const auto real = run_real(program, ranks, hosts);
    const auto simulated = simulate(world_of(ranks, hosts), program);
    REQUIRE(real.size() == simulated.size());
    for (std::size_t step = 1; step < real.size(); ++step) {
      const auto expected = traffic_of(simulated[step]);
      for (int host = 0; host < hosts; ++host) {
        CAPTURE(host);
        const Traffic& is = real[step][static_cast<std::size_t>(host)];
        const Traffic& was_to_be = expected[static_cast<std::size_t>(host)];
        CHECK(is.up_messages == was_to_be.up_messages);
        CHECK(is.up_bytes == was_to_be.up_bytes);
        CHECK(is.down_bytes == was_to_be.down_bytes);
        CHECK(is.received_bytes == was_to_be.received_bytes);
        // An agreement and its cut are one message.
        const auto messages = units * static_cast<std::size_t>(children_of(host, hosts));
        CHECK(is.down_messages == messages);
        CHECK(was_to_be.down_messages == messages);
      }
    }
    // How many introductions travel as one depends on when they come; ranks that come one by one
    // show the most that it can cost.
    World patient = world_of(ranks, hosts);
    patient.skew = std::chrono::seconds(1);
    const Traffic most = sum(traffic_of(simulate(patient, program, 1).front()));
    const Traffic first = sum(real.front());
    CHECK(first.up_bytes <= most.up_bytes);
    CHECK(first.down_bytes <= most.down_bytes);
    // A host's last introduction and that it is ready may go as two messages, and what they bring
    // about too.
    const auto more = 2 * units * static_cast<std::size_t>(hosts - 1);
    CHECK(first.up_messages <= most.up_messages + more);
    CHECK(first.down_messages <= most.down_messages + more);
    print("first step, real", ranks, hosts, first);
    print("simulated", ranks, hosts, sum(traffic_of(simulated.front())));
    print("the most it can be", ranks, hosts, most);
    print("steady step, real", ranks, hosts, sum(real.back()));
    print("simulated", ranks, hosts, sum(traffic_of(simulated.back())));
  }
}

TEST_CASE("scale: the simulator counts what real engines count, all groups at once") {
  const Operations program = small_program(false);
  const auto units = program.units.size();
  for (const auto& [ranks, hosts] :
       {WorldSize{2, 2}, WorldSize{4, 4}, WorldSize{8, 8}, WorldSize{16, 8}}) {
    CAPTURE(ranks);
    CAPTURE(hosts);
    const auto real = run_real(program, ranks, hosts);
    const auto simulated = simulate(world_of(ranks, hosts), program);
    for (std::size_t step = 1; step < real.size(); ++step) {
      const Traffic is = sum(real[step]);
      const Traffic was_to_be = sum(traffic_of(simulated[step]));
      const auto links = static_cast<std::uint64_t>(hosts - 1);
      CHECK(is.up_bytes == was_to_be.up_bytes);
      // What becomes ready meanwhile is cut together or not: between one cut and one per group, of
      // nine bytes each.
      constexpr std::uint64_t kCutBytes = 9;
      const auto slack = (units - 1) * kCutBytes * links;
      CHECK(is.down_bytes <= was_to_be.down_bytes + slack);
      CHECK(was_to_be.down_bytes <= is.down_bytes + slack);
      CHECK((is.up_messages >= links && is.up_messages <= units * links));
      CHECK((is.down_messages >= links && is.down_messages <= 2 * units * links));
    }
    print("steady step, real", ranks, hosts, sum(real.back()));
    print("simulated", ranks, hosts, sum(traffic_of(simulated.back())));
  }
}

TEST_CASE("scale: no leader's part in a steady step grows like the number of hosts") {
  Operations program = scale::gradients_of("resnet50");
  for (const bool one_by_one : {false, true}) {
    program.one_by_one = one_by_one;
    const auto units = program.units.size();
    std::uint64_t bytes_of_eight = 0;
    std::uint64_t bytes_of_eight_first = 0;
    for (const int hosts : {8, 32, 128}) {
      CAPTURE(hosts);
      World world = world_of(8 * hosts, hosts);
      world.tables = 2;
      const auto steps = simulate(world, program, 3);
      const auto log = static_cast<std::uint64_t>(std::lround(std::log2(hosts)));
      std::uint64_t messages = 0, bytes = 0, first_bytes = 0;
      for (const auto& host : steps.front().hosts)
        first_bytes = std::max(first_bytes, host.traffic.bytes());
      for (const auto& host : steps.back().hosts) {
        messages = std::max(messages, host.traffic.messages());
        bytes = std::max(bytes, host.traffic.bytes());
      }
      // The root, which has a child per power of two, hears from each that it is ready, and says
      // what is agreed and where to cut.
      CHECK(messages <= 3 * units * log);
      CHECK(steps.back().rounds <= static_cast<int>((one_by_one ? units : 1) * 3 * log + 2 * log));
      if (hosts == 8) {
        bytes_of_eight = bytes;
        bytes_of_eight_first = first_bytes;
      }
      CHECK(bytes * 3 <= bytes_of_eight * log);
      // Introductions: 16 times the ranks, and far from 16 times the bytes.
      CHECK(first_bytes <= 6 * bytes_of_eight_first);
    }
  }
}

TEST_CASE("scale: hosts that share a table do what hosts with tables of their own do") {
  const Operations program = scale::gradients_of("resnet18");
  World world = world_of(48, 12);
  const auto own = simulate(world, program);
  world.tables = 1;
  const auto shared = simulate(world, program);
  for (std::size_t step = 0; step < own.size(); ++step) {
    CHECK(own[step].time == shared[step].time);
    CHECK(own[step].rounds == shared[step].rounds);
    CHECK(traffic_of(own[step]) == traffic_of(shared[step]));
  }
}

}  // namespace hvd::test
