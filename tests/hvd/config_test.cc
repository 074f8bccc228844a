/// The configuration: knobs under both names, and what must be equal on all ranks.
#include <doctest/doctest.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "hvd/config.h"
#include "hvd/errors.h"

namespace hvd::test {
namespace {

class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~Variable() { ::unsetenv(name_); }

 private:
  const char* name_;
};

std::string refusal() {
  try {
    Config::from_environment();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("the configuration: values, Horovod's names, and what is not allowed") {
  CHECK(Config::from_environment().fusion_threshold_bytes == std::uint64_t{128} << 20);
  {
    const Variable horovod("HOROVOD_FUSION_THRESHOLD", "1000");
    CHECK(Config::from_environment().fusion_threshold_bytes == 1000);
    const Variable ours("HVD_FUSION_THRESHOLD", "0");
    CHECK(Config::from_environment().fusion_threshold_bytes == 0);
  }
  {
    const Variable wrong("HVD_FUSION_THRESHOLD", "abc");
    CHECK(refusal().find("HVD_FUSION_THRESHOLD: 'abc'") != std::string::npos);
    CHECK(refusal().find("bytes") != std::string::npos);
  }
  for (const char* value : {"-1", "1.5", "12x", "99999999999999999999999"}) {
    const Variable wrong("HVD_FUSION_THRESHOLD", value);
    CHECK(refusal().find(value) != std::string::npos);
  }
  {
    const Variable wrong("HVD_LOG_LEVEL", "loud");
    CHECK(refusal().find("trace, debug, info, warning, error, fatal, off") != std::string::npos);
  }
  for (const auto& [said, level] : {std::pair{"INFO", LogLevel::Info},
                                    {"Debug", LogLevel::Debug},
                                    {"wArning", LogLevel::Warning}}) {
    const Variable horovod("HOROVOD_LOG_LEVEL", said);
    CHECK(Config::from_environment().log_level == level);
  }
  {
    const Variable off("HOROVOD_STALL_CHECK_DISABLE", "1");
    CHECK(Config::from_environment().stall_check_disable);
  }
}

TEST_CASE("every knob is read under both names, and refuses what it does not understand") {
  struct Knob {
    std::string name, good, wrong, allowed;
    std::function<bool(const Config&)> holds;
  };
  using namespace std::chrono_literals;
  const std::vector<Knob> knobs{
      {"FUSION_THRESHOLD", "7", "x", "bytes, 0 to",
       [](const Config& c) { return c.fusion_threshold_bytes == 7; }},
      {"CACHE_CAPACITY", "99999", "-1", "tensors, 0 to",
       [](const Config& c) { return c.cache_capacity == 99999; }},
      {"CYCLE_TIME", "3.5", "1e9", "milliseconds, 0 to 10000",
       [](const Config& c) { return c.cycle_time == 3500us; }},
      {"DISABLE_GROUP_FUSION", "1", "2", "one of 0, 1",
       [](const Config& c) { return c.disable_group_fusion; }},
      {"STALL_CHECK_TIME_SECONDS", "5", "0", "seconds, 1 to",
       [](const Config& c) { return c.stall_check_time == 5s; }},
      {"STALL_CHECK_DISABLE", "true", "no", "one of 0, 1",
       [](const Config& c) { return c.stall_check_disable; }},
      {"STALL_SHUTDOWN_TIME_SECONDS", "6", "-6", "seconds, 0 to",
       [](const Config& c) { return c.stall_shutdown_time == 6s; }},
      {"HOST_TIMEOUT_SECONDS", "7", "-1", "seconds, 0 to",
       [](const Config& c) { return c.host_timeout == 7s; }},
      {"REPLICA_GUARD", "full", "on", "one of slice, full, off",
       [](const Config& c) { return c.replica_guard == ReplicaGuard::Full; }},
      {"LOG_LEVEL", "debug", "DEBUGGING", "one of trace",
       [](const Config& c) { return c.log_level == LogLevel::Debug; }},
      {"TIMELINE_MARK_CYCLES", "1", "y", "one of 0, 1",
       [](const Config& c) { return c.timeline_mark_cycles; }},
      {"TIMELINE_MAX_BYTES", "70000", "1", "bytes, 65536 to",
       [](const Config& c) { return c.timeline_max_bytes == 70000; }},
      {"THREAD_AFFINITY", "0,12,3", "0,,3", "list of cores",
       [](const Config& c) {
         return c.thread_affinity == std::vector{0, 12, 3};
       }},
      {"NUM_NCCL_STREAMS", "4", "5", "streams, 1 to 4",
       [](const Config& c) { return c.num_nccl_streams == 4; }},
      {"NCCL_REGISTRATION", "window", "symmetric", "one of none, buffer, window",
       [](const Config& c) { return c.nccl_registration == NcclRegistration::Window; }},
      {"AUTOTUNE", "1", "on", "one of 0, 1", [](const Config& c) { return c.autotune; }},
      {"HIERARCHICAL_ALLREDUCE", "1", "?", "one of 0, 1",
       [](const Config& c) { return c.hierarchical_allreduce; }},
      {"ELASTIC", "1", "maybe", "one of 0, 1", [](const Config& c) { return c.elastic; }},
      {"SHARED_MEMORY", "off", "on", "one of auto, off",
       [](const Config& c) { return c.shared_memory == SharedMemory::Off; }},
      {"RESULT_POOL_BYTES", "0", "1 GiB", "bytes, 0 to",
       [](const Config& c) { return c.result_pool_bytes == 0; }},
      {"WIRE", "ucx", "tcp", "one of auto, mpi, ucx",
       [](const Config& c) { return c.wire == Wire::Ucx; }},
      {"DIRECT_COPIES", "off", "no", "one of auto, on, relayed, off",
       [](const Config& c) { return c.direct_copies == DirectCopies::Off; }},
      {"GPU_BACKEND", "staged", "nvlink", "one of auto, nccl, shared, staged",
       [](const Config& c) { return c.gpu_backend == GpuBackend::Staged; }},
      {"ARENA_BYTES", "1048576", "1", "bytes, 1048576 to",
       [](const Config& c) { return c.arena_bytes == 1 << 20; }},
      {"TIMELINE", "a/b", "", "", [](const Config& c) { return c.timeline == "a/b"; }},
      {"AUTOTUNE_LOG", "c", "", "", [](const Config& c) { return c.autotune_log == "c"; }},
  };
  for (const auto& knob : knobs) {
    CAPTURE(knob.name);
    CHECK_FALSE(knob.holds(Config::from_environment()));
    for (const std::string prefix : {"HOROVOD_", "HVD_"}) {
      const std::string name = prefix + knob.name;
      {
        const Variable good(name.c_str(), knob.good.c_str());
        CHECK(knob.holds(Config::from_environment()));
      }
      if (knob.wrong.empty()) continue;
      const Variable wrong(name.c_str(), knob.wrong.c_str());
      CHECK(refusal().find(name + ": '" + knob.wrong + "' is not allowed") == 0);
      CHECK(refusal().find(knob.allowed) != std::string::npos);
    }
  }
  for (const char* value : {"0,", ",", "0 1", "1024", "-1", "0;1", "a"}) {
    const Variable wrong("HVD_THREAD_AFFINITY", value);
    CHECK(refusal().find(value) != std::string::npos);
  }
  for (const char* value : {"nan", "inf", "-1", "1ms", "10000.1"}) {
    const Variable wrong("HVD_CYCLE_TIME", value);
    CHECK(refusal().find(value) != std::string::npos);
  }
  CHECK(Config().cache_capacity == 1024);
  for (const char* value : {"0", "1", "2048", "65535"}) {
    CAPTURE(value);
    const Variable small("HOROVOD_CACHE_CAPACITY", value);
    CHECK(std::to_string(Config::from_environment().cache_capacity) == value);
  }
  const Variable later("HOROVOD_TIMELINE", "DYNAMIC");
  CHECK(Config::from_environment().timeline.empty());
}

TEST_CASE("fields are held to the bounds of their variables; a very long time means never") {
  using std::chrono::seconds;
  Config config;
  CHECK(put_right(config).empty());
  config.stall_check_time = config.host_timeout = config.start_timeout = seconds::max();
  CHECK(put_right(config).empty());
  CHECK(config.stall_check_time == seconds(10'000'000));
  for (const auto& [field, change] : std::vector<std::pair<std::string, void (*)(Config&)>>{
           {"stall_check_time", [](Config& c) { c.stall_check_time = seconds(0); }},
           {"stall_shutdown_time", [](Config& c) { c.stall_shutdown_time = seconds(-1); }},
           {"host_timeout", [](Config& c) { c.host_timeout = seconds(-1); }},
           {"start_timeout", [](Config& c) { c.start_timeout = seconds(0); }},
           {"cycle_time", [](Config& c) { c.cycle_time = std::chrono::microseconds(-1); }},
           {"num_nccl_streams", [](Config& c) { c.num_nccl_streams = -1; }},
           {"num_nccl_streams", [](Config& c) { c.num_nccl_streams = 5; }},
           {"timeline_max_bytes", [](Config& c) { c.timeline_max_bytes = 10; }},
           {"cache_capacity", [](Config& c) { c.cache_capacity = (1U << 24) + 1; }},
           {"arena_bytes", [](Config& c) { c.arena_bytes = ~std::uint64_t{0}; }}}) {
    CAPTURE(field);
    config = {};
    change(config);
    CHECK(put_right(config).find("Config::" + field + ": ") == 0);
    CHECK(config.start_timeout == Config().start_timeout);
  }
}

TEST_CASE("what ranks must agree on is told apart; what does nothing is remarked on") {
  const auto usual = shared_part({});
  for (const auto& change : std::vector<std::function<void(Config&)>>{
           [](Config& c) { c.fusion_threshold_bytes = 1; },
           [](Config& c) { c.cache_capacity = 17; },
           [](Config& c) { c.disable_group_fusion = true; },
           [](Config& c) { c.shared_memory = SharedMemory::Off; },
           [](Config& c) { c.process_sets = {{0}}; }, [](Config& c) { c.timeline = "t"; },
           [](Config& c) { c.num_nccl_streams = 2; }, [](Config& c) { c.elastic = true; },
           [](Config& c) { c.gpu_backend = GpuBackend::Shared; },
           [](Config& c) { c.hierarchical_allreduce = true; },
           [](Config& c) { c.replica_guard = ReplicaGuard::Off; },
           [](Config& c) { c.nccl_registration = NcclRegistration::Buffer; }}) {
    Config config;
    change(config);
    CHECK(shared_part(config) != usual);
  }
  Config config;
  CHECK(remarks(config).empty());
  config.autotune = config.elastic = true;
  REQUIRE(remarks(config).size() == 2);
  CHECK(remarks(config)[0].find("HVD_AUTOTUNE") == 0);
}

}  // namespace hvd::test
