#include "ops/gpu/api/placement.h"

#include <algorithm>
#include <charconv>
#include <set>

#include "hvd/base/text.h"

namespace hvd::gpu {

namespace {
constexpr char kNcclShares = '+';
}  // namespace

Placement::Placement(const std::vector<int>& host_of_rank, std::vector<int> domain_of_rank,
                     const std::vector<std::string>& gpu_of_rank, bool has_nccl,
                     std::optional<Route> wanted, bool has_ipc)
    : domain_of_rank_(std::move(domain_of_rank)),
      has_nccl_(has_nccl),
      has_ipc_(has_ipc),
      wanted_(wanted) {
  std::map<std::pair<int, std::string>, int> numbers;
  for (std::size_t rank = 0; rank < gpu_of_rank.size(); ++rank) {
    if (gpu_of_rank[rank].empty()) {
      gpu_.push_back(-1);
      continue;
    }
    const bool nccl_shares = gpu_of_rank[rank].front() == kNcclShares;
    nccl_shares_ = nccl_shares_ && nccl_shares;
    const std::pair key(host_of_rank[rank], gpu_of_rank[rank].substr(nccl_shares ? 1 : 0));
    gpu_.push_back(numbers.emplace(key, static_cast<int>(numbers.size())).first->second);
  }
}

Route Placement::route_of(const std::vector<int>& ranks) const {
  std::set<int> gpus, domains;
  bool all_have_one = true;
  for (const int rank : ranks) {
    const int gpu = gpu_[static_cast<std::size_t>(rank)];
    all_have_one = all_have_one && gpu >= 0;
    gpus.insert(gpu);
    domains.insert(domain_of_rank_[static_cast<std::size_t>(rank)]);
  }
  const bool may_share = wanted_ == Route::Nccl && nccl_shares_;
  const bool own = has_nccl_ && all_have_one && (may_share || gpus.size() == ranks.size());
  const bool shared = has_ipc_ && all_have_one && gpus.size() == 1 && domains.size() == 1 &&
                      ranks.size() <= static_cast<std::size_t>(kMostSharers);
  if (wanted_ == Route::Staged) return Route::Staged;
  if (wanted_ == Route::SharedGpu && shared) return Route::SharedGpu;
  if (own) return Route::Nccl;
  return shared ? Route::SharedGpu : Route::Staged;
}

Route Placement::route_of_set(int id, const std::vector<int>& ranks) const {
  const std::lock_guard lock(mutex_);
  auto& [known, way] = known_[id];
  if (known != ranks) {
    known = ranks;
    way = route_of(ranks);
  }
  return way;
}

std::vector<int> Placement::sharers_of(int rank) const {
  const auto own = static_cast<std::size_t>(rank);
  std::vector<int> sharers;
  for (std::size_t other = 0; other < gpu_.size(); ++other)
    if (gpu_[own] >= 0 && gpu_[other] == gpu_[own] &&
        domain_of_rank_[other] == domain_of_rank_[own])
      sharers.push_back(static_cast<int>(other));
  return sharers;
}

std::string Placement::describe() const {
  std::vector<int> everyone;
  std::map<int, int> sharers;
  for (std::size_t rank = 0; rank < gpu_.size(); ++rank) {
    everyone.push_back(static_cast<int>(rank));
    if (gpu_[rank] >= 0) ++sharers[gpu_[rank]];
  }
  if (sharers.empty()) return "no GPU found";
  const auto most =
      std::max_element(sharers.begin(), sharers.end(),
                       [](const auto& a, const auto& b) { return a.second < b.second; });
  const std::string crowd =
      most->second > 1 ? formatted("{} ranks share a GPU, ", most->second) : std::string();
  switch (route_of(everyone)) {
    case Route::Nccl: return crowd.empty() ? "one rank per GPU, NCCL" : crowd + "NCCL";
    case Route::SharedGpu: return crowd + "through CUDA IPC";
    default: return crowd + "staged through host memory";
  }
}

int device_of(const GpuApi& table, int local_rank) {
  int count = 0;
  if (table.device_count(&count) != CudaCode::Success || count < 1) return -1;
  return local_rank % count;
}

std::string make_current(const GpuApi& table, int device, int rank) {
  int before = 0;
  if (device < 0 || table.get_device(&before) != CudaCode::Success || before == device) return {};
  bool used = false;
  if (table.has_context(device, &used) == CudaCode::Success && used)
    static_cast<void>(table.set_device(device));
  used = false;
  if (table.has_context(before, &used) != CudaCode::Success || !used) return {};
  return formatted(
      "rank {} has worked on cuda:{} before hvd::init(), and its GPU is cuda:{}: its tensors must "
      "be there, and what it has left on cuda:{} takes memory of the rank whose GPU that is; call "
      "hvd::init() first, and use hvd::local_device()",
      rank, before, device, before);
}

bool can_share(const GpuApi& table, int device) {
  bool supported = false;
  return device < 0 || (table.ipc_supported(device, &supported) == CudaCode::Success && supported);
}

bool runs_on(std::string_view architectures, int capability) {
  while (!architectures.empty()) {
    const std::string_view entry = architectures.substr(0, architectures.find(','));
    architectures.remove_prefix(std::min(entry.size() + 1, architectures.size()));
    int number = 0;
    const auto [end, error] = std::from_chars(entry.data(), entry.data() + entry.size(), number);
    if (error != std::errc()) return true;
    const std::string_view kind(end, static_cast<std::size_t>(entry.data() + entry.size() - end));
    // neither binary code nor PTX of these runs on what comes after
    if (kind.starts_with('a') || kind.starts_with('f')) {
      const bool is_family = kind.front() == 'f';
      if (number == capability ||
          (is_family && number < capability && number / 10 == capability / 10))
        return true;
      continue;
    }
    const bool binary = kind != "-virtual", ptx = kind != "-real";
    if (number > capability) continue;
    if (ptx || (binary && number / 10 == capability / 10)) return true;
  }
  return false;
}

std::string lack_of_kernels(const GpuApi& table, int device, std::string_view architectures) {
  int capability = 0;
  if (device < 0 || table.capability(device, &capability) != CudaCode::Success ||
      runs_on(architectures, capability))
    return {};
  return formatted(
      "cuda:{} has compute capability {}.{}, and this build has kernels for {} alone: the tensors "
      "of all ranks' GPUs go through the host, "
      "which is "
      "slow; "
      "build with -DHVD_CUDA_ARCHITECTURES={}",
      device, capability / 10, capability % 10, architectures, capability);
}

bool has_multicast(const GpuApi& table, int device) {
  bool supported = false;
  return device >= 0 && table.multicast_supported(device, &supported) == CudaCode::Success &&
         supported;
}

bool nccl_shares_gpus(const GpuApi& table) {
  constexpr int kFirst = 23000;
  int version = 0;
  return table.get_version(&version) == NcclCode::Success && version >= kFirst;
}

std::string gpu_id(const GpuApi& table, int device, bool may_share) {
  std::string id;
  if (device < 0 || table.device_id(device, &id) != CudaCode::Success) return {};
  return may_share && nccl_shares_gpus(table) ? kNcclShares + id : id;
}

}  // namespace hvd::gpu
