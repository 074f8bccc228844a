#include "hvd/config.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <string_view>
#include <type_traits>

#include "hvd/base/text.h"
#include "hvd/errors.h"

namespace hvd {

namespace {

struct Variable {
  std::string name;
  std::string value;
};

std::optional<std::string> environment(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

/// HVD_`suffix`, else HOROVOD_`suffix`.
std::optional<Variable> variable(std::string_view suffix) {
  for (const char* prefix : {"HVD_", "HOROVOD_"}) {
    const std::string name = formatted("{}{}", prefix, suffix);
    if (auto value = environment(name)) return Variable{name, std::move(*value)};
  }
  return std::nullopt;
}

constexpr int kMostCores = 1024;  // of a cpu_set_t

[[noreturn]] void refuse(const Variable& variable, std::string_view allowed) {
  throw InvalidArgument(
      formatted("{}: '{}' is not allowed; it must be {}", variable.name, variable.value, allowed));
}

/// The bounds of a number: of HVD_`suffix`, in `unit`, and of the field of a Config.
struct Bounds {
  std::string_view suffix, field, unit;
  std::uint64_t least, most;
};

std::string allowed(const Bounds& bounds) {
  return formatted("a whole number of {}, {} to {}", bounds.unit, bounds.least, bounds.most);
}

std::uint64_t number(const Variable& variable, const Bounds& bounds) {
  std::uint64_t value = 0;
  const char* end = variable.value.data() + variable.value.size();
  const auto [stop, error] = std::from_chars(variable.value.data(), end, value);
  if (error != std::errc() || stop != end || value < bounds.least || value > bounds.most)
    refuse(variable, allowed(bounds));
  return value;
}

/// Milliseconds, which may have decimals.
std::chrono::microseconds milliseconds(const Variable& variable, const Bounds& bounds) {
  double value = 0;
  const char* end = variable.value.data() + variable.value.size();
  const auto [stop, error] = std::from_chars(variable.value.data(), end, value);
  if (error != std::errc() || stop != end ||
      !(value >= 0 && value <= static_cast<double>(bounds.most)))
    refuse(variable, formatted("a number of {}, 0 to {}", bounds.unit, bounds.most));
  return std::chrono::microseconds(static_cast<std::int64_t>(value * 1000));
}

std::vector<int> cores(const Variable& variable) {
  std::vector<int> list;
  const char* place = variable.value.data();
  const char* const end = place + variable.value.size();
  for (bool more = true; more; ++place) {
    int core = 0;
    const auto [stop, error] = std::from_chars(place, end, core);
    if (error != std::errc() || core < 0 || core >= kMostCores || (stop != end && *stop != ','))
      refuse(
          variable,
          formatted(
              "a list of cores, 0 to {}, one for each rank of the host, with commas between them",
              kMostCores - 1));
    list.push_back(core);
    place = stop;
    more = stop != end;
  }
  return list;
}

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return result;
}

/// Names are in lower case, and may be written in any.
template <class Enum, std::size_t kChoices>
Enum choice(const Variable& variable,
            const std::array<std::pair<std::string_view, Enum>, kChoices>& choices) {
  std::vector<std::string_view> names;
  const std::string said = lower(variable.value);
  for (const auto& [name, value] : choices) {
    if (said == name) return value;
    names.push_back(name);
  }
  refuse(variable, formatted("one of {}", joined(names, ", ")));
}

constexpr std::array<std::pair<std::string_view, bool>, 4> kSwitch{
    {{"0", false}, {"1", true}, {"false", false}, {"true", true}}};
constexpr std::array<std::pair<std::string_view, SharedMemory>, 2> kSharedMemory{
    {{"auto", SharedMemory::Auto}, {"off", SharedMemory::Off}}};
constexpr std::array<std::pair<std::string_view, DirectCopies>, 4> kDirectCopies{
    {{"auto", DirectCopies::Auto},
     {"on", DirectCopies::On},
     {"relayed", DirectCopies::Relayed},
     {"off", DirectCopies::Off}}};
constexpr std::array<std::pair<std::string_view, ReplicaGuard>, 3> kReplicaGuards{
    {{"slice", ReplicaGuard::Slice}, {"full", ReplicaGuard::Full}, {"off", ReplicaGuard::Off}}};
constexpr std::array<std::pair<std::string_view, Wire>, 3> kWires{
    {{"auto", Wire::Auto}, {"mpi", Wire::Mpi}, {"ucx", Wire::Ucx}}};
constexpr std::array<std::pair<std::string_view, GpuBackend>, 4> kGpuBackends{
    {{"auto", GpuBackend::Auto},
     {"nccl", GpuBackend::Nccl},
     {"shared", GpuBackend::Shared},
     {"staged", GpuBackend::Staged}}};
constexpr std::array<std::pair<std::string_view, NcclRegistration>, 3> kNcclRegistrations{
    {{"none", NcclRegistration::None},
     {"buffer", NcclRegistration::Buffer},
     {"window", NcclRegistration::Window}}};
constexpr std::array<std::pair<std::string_view, LogLevel>, 7> kLogLevels{
    {{"trace", LogLevel::Trace},
     {"debug", LogLevel::Debug},
     {"info", LogLevel::Info},
     {"warning", LogLevel::Warning},
     {"error", LogLevel::Error},
     {"fatal", LogLevel::Fatal},
     {"off", LogLevel::Off}}};

/// Calls visit(bounds, field) for each number that a Config has.
template <class Visit>
void for_each_number(Config& c, const Visit& visit) {
  constexpr std::uint64_t kMostSeconds = 10'000'000, kKiB = 1024, kTiB = kKiB << 30;
  const auto number = [&](std::string_view suffix, std::string_view name, auto& field,
                          std::string_view unit, std::uint64_t least, std::uint64_t most) {
    visit(Bounds{suffix, name, unit, least, most}, field);
  };
  number("FUSION_THRESHOLD", "fusion_threshold_bytes", c.fusion_threshold_bytes, "bytes", 0,
         std::numeric_limits<std::uint64_t>::max() / 2);
  number("CACHE_CAPACITY", "cache_capacity", c.cache_capacity, "tensors", 0, 1U << 24);
  number("CYCLE_TIME", "cycle_time", c.cycle_time, "milliseconds", 0, 10'000);
  number("STALL_CHECK_TIME_SECONDS", "stall_check_time", c.stall_check_time, "seconds", 1,
         kMostSeconds);
  number("STALL_SHUTDOWN_TIME_SECONDS", "stall_shutdown_time", c.stall_shutdown_time, "seconds", 0,
         kMostSeconds);
  number("HOST_TIMEOUT_SECONDS", "host_timeout", c.host_timeout, "seconds", 0, kMostSeconds);
  number("START_TIMEOUT", "start_timeout", c.start_timeout, "seconds", 1, kMostSeconds);
  number("TIMELINE_MAX_BYTES", "timeline_max_bytes", c.timeline_max_bytes, "bytes", 64 * kKiB,
         kTiB);
  number("NUM_NCCL_STREAMS", "num_nccl_streams", c.num_nccl_streams, "streams", 1, 4);
  number("ARENA_BYTES", "arena_bytes", c.arena_bytes, "bytes", kKiB * kKiB, 16 * kTiB);
  number("RESULT_POOL_BYTES", "result_pool_bytes", c.result_pool_bytes, "bytes", 0, 16 * kTiB);
}

}  // namespace

Config Config::from_environment() {
  Config config;
  for_each_number(config, [](const Bounds& bounds, auto& field) {
    using Field = std::remove_reference_t<decltype(field)>;
    const auto v = variable(bounds.suffix);
    if (!v) return;
    if constexpr (std::is_same_v<Field, std::chrono::microseconds>) {
      field = milliseconds(*v, bounds);
    } else {
      field = static_cast<Field>(number(*v, bounds));
    }
  });
  if (auto v = variable("DISABLE_GROUP_FUSION")) config.disable_group_fusion = choice(*v, kSwitch);
  if (auto v = variable("STALL_CHECK_DISABLE")) config.stall_check_disable = choice(*v, kSwitch);
  if (auto v = variable("REPLICA_GUARD")) config.replica_guard = choice(*v, kReplicaGuards);
  if (auto v = variable("LOG_LEVEL")) config.log_level = choice(*v, kLogLevels);
  if (auto v = variable("TIMELINE"); v && v->value != "DYNAMIC") config.timeline = v->value;
  if (auto v = variable("TIMELINE_MARK_CYCLES")) config.timeline_mark_cycles = choice(*v, kSwitch);
  if (auto v = variable("THREAD_AFFINITY")) config.thread_affinity = cores(*v);
  if (auto v = variable("NCCL_REGISTRATION"))
    config.nccl_registration = choice(*v, kNcclRegistrations);
  if (auto v = variable("AUTOTUNE")) config.autotune = choice(*v, kSwitch);
  if (auto v = variable("AUTOTUNE_LOG")) config.autotune_log = v->value;
  if (auto v = variable("HIERARCHICAL_ALLREDUCE"))
    config.hierarchical_allreduce = choice(*v, kSwitch);
  if (auto v = variable("ELASTIC")) config.elastic = choice(*v, kSwitch);
  if (auto v = variable("SHARED_MEMORY")) config.shared_memory = choice(*v, kSharedMemory);
  if (auto v = variable("WIRE")) config.wire = choice(*v, kWires);
  if (auto v = variable("DIRECT_COPIES")) config.direct_copies = choice(*v, kDirectCopies);
  if (auto v = variable("GPU_BACKEND")) config.gpu_backend = choice(*v, kGpuBackends);
  return config;
}

std::string put_right(Config& config) {
  std::string problem;
  for_each_number(config, [&](const Bounds& bounds, auto& field) {
    using Field = std::remove_reference_t<decltype(field)>;
    std::string value;
    if constexpr (std::is_integral_v<Field>) {
      if (std::cmp_greater_equal(field, bounds.least) && std::cmp_less_equal(field, bounds.most))
        return;
      value = formatted("{}", field);
    } else {
      using Shown = std::conditional_t<std::is_same_v<Field, std::chrono::microseconds>,
                                       std::chrono::milliseconds, Field>;
      field = std::min(field, Field(Shown(bounds.most)));
      if (field >= Shown(bounds.least)) return;
      value = formatted("{}", std::chrono::floor<Shown>(field).count());
    }
    if (problem.empty())
      problem = formatted("Config::{}: '{}' is not allowed; it must be {}", bounds.field, value,
                          allowed(bounds));
  });
  if (!problem.empty()) config = Config();
  return problem;
}

std::vector<std::pair<std::string, std::string>> shared_part(const Config& config) {
  const auto number = [](auto value) { return formatted("{}", value); };
  const auto on = [](bool value) { return std::string(value ? "1" : "0"); };
  std::vector<std::string> process_sets;
  for (const auto& ranks : config.process_sets)
    process_sets.push_back(formatted("[{}]", joined(ranks, ", ")));
  return {
      {"HVD_FUSION_THRESHOLD", number(config.fusion_threshold_bytes)},
      {"HVD_DISABLE_GROUP_FUSION", on(config.disable_group_fusion)},
      {"HVD_CACHE_CAPACITY", number(config.cache_capacity)},
      {"HVD_SHARED_MEMORY",
       std::string(kSharedMemory[static_cast<std::size_t>(config.shared_memory)].first)},
      {"HVD_WIRE", std::string(kWires[static_cast<std::size_t>(config.wire)].first)},
      {"Config::process_sets", formatted("[{}]", joined(process_sets, ", "))},
      {"HVD_REPLICA_GUARD",
       std::string(kReplicaGuards[static_cast<std::size_t>(config.replica_guard)].first)},
      {"HVD_TIMELINE", formatted("'{}'", config.timeline)},
      {"HVD_NUM_NCCL_STREAMS", number(config.num_nccl_streams)},
      {"HVD_NCCL_REGISTRATION",
       std::string(kNcclRegistrations[static_cast<std::size_t>(config.nccl_registration)].first)},
      {"HVD_ELASTIC", on(config.elastic)},
      {"HVD_GPU_BACKEND",
       std::string(kGpuBackends[static_cast<std::size_t>(config.gpu_backend)].first)},
      {"HVD_HIERARCHICAL_ALLREDUCE", on(config.hierarchical_allreduce)}};
}

std::vector<std::string> remarks(const Config& config) {
  std::vector<std::string> lines;
  if (config.autotune || !config.autotune_log.empty())
    lines.emplace_back(
        "HVD_AUTOTUNE does nothing: there is no cycle time to tune, and the fusion threshold "
        "hardly matters where tensors are reduced in place");
  if (config.elastic)
    lines.emplace_back("HVD_ELASTIC does nothing yet: when a rank dies, the job ends");
  return lines;
}

std::optional<std::string> detail::variable_of_environment(const std::string& name) {
  return environment(name);
}
char** detail::process_environment() { return environ; }
const char* detail::spawn_reports() { return std::getenv(kSpawnReports); }

bool thread_count_is_fixed() {
  return environment("OMP_NUM_THREADS") || environment("MKL_NUM_THREADS");
}

}  // namespace hvd
