#include "ops/p2p/direct_memory.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "hvd/errors.h"
#include "ops/host_ops.h"

namespace hvd {

std::optional<std::uint64_t> DirectMemory::keep(const BatchTraits& traits, std::size_t bytes) {
  if (traits.kind == OpKind::Allreduce && traits.op == ReduceOp::Adasum) return std::nullopt;
  if (!context_.arrange(traits.set->ranks).alone()) return context_.staging().keep(bytes);
  const std::lock_guard lock(mutex_);
  const std::uint64_t location = Staging::own_location(next_own_++);
  own_.emplace(location, new std::byte[bytes]);
  return location;
}

void DirectMemory::drop(std::uint64_t location) noexcept {
  if (!Staging::is_own(location)) return context_.staging().drop(location);
  const std::lock_guard lock(mutex_);
  own_.erase(location);
}

std::byte* DirectMemory::find_own(std::uint64_t location) {
  if (!Staging::is_own(location)) return nullptr;
  const std::lock_guard lock(mutex_);
  const auto own = own_.find(location);
  return own != own_.end() ? own->second.get() : nullptr;
}

bool DirectMemory::is_free(std::uint64_t location) {
  if (Staging::is_own(location)) return true;
  return context_.staging().is_free(location, [this](std::uint64_t sequence) {
    return context_.board().batches().is_over(sequence);
  });
}

std::byte* DirectMemory::kept(int index, std::uint64_t location) {
  if (Staging::is_own(location)) return find_own(location);
  return Staging::is_kept(location) ? context_.staging().address(index, location) : nullptr;
}

bool DirectMemory::Plan::is_of(const BatchTraits& others) const {
  const OperationTerms& terms = traits;
  return traits.set == others.set && traits.dtype == others.dtype && terms == others;
}

const DirectMemory::Plan& DirectMemory::plan_of(const BatchTraits& traits) {
  if (plan_ && plan_->is_of(traits)) return *plan_;
  auto plan = std::make_unique<Plan>();
  plan->traits = traits;
  plan->who = context_.arrange(traits.set->ranks);
  Batch batch;
  batch.traits = traits;
  batch.ranks = traits.set->ranks;
  plan->reduction = plan_reduction(batch, plan->who);
  for (const auto& ranks : plan->who.domains)
    plan->domains.push_back(static_cast<std::size_t>(context_.domain_of(ranks.front())));
  plan_ = std::move(plan);
  return *plan_;
}

std::size_t DirectMemory::arrays(const Plan& plan, std::size_t arranged) {
  const auto& ranks = plan.who.domains[arranged];
  if (plan.traits.kind == OpKind::Broadcast)
    return std::binary_search(ranks.begin(), ranks.end(), plan.traits.root) ? 1 : 0;
  return plan.is_raw() ? ranks.size() : 1;
}

std::size_t DirectMemory::contribution_bytes(const BatchTraits& traits, std::int64_t count) {
  const Plan& plan = plan_of(traits);
  std::size_t most = 0;
  for (std::size_t i = 0; i < plan.who.domains.size(); ++i) most = std::max(most, arrays(plan, i));
  return most * static_cast<std::size_t>(count) * element_bytes(traits.dtype);
}

void DirectMemory::contribute(const BatchTraits& traits, std::int64_t count,
                              std::span<const std::byte* const> blocks, Bytes& message) {
  const Plan& plan = plan_of(traits);
  const std::size_t bytes = static_cast<std::size_t>(count) * element_bytes(traits.dtype);
  const std::size_t at = message.size();
  message.resize(at + arrays(plan, plan.who.self_domain) * bytes);
  if (bytes == 0 || message.size() == at) return;
  if (traits.kind == OpKind::Broadcast) {
    const auto& here = plan.who.here();
    std::memcpy(message.data() + at,
                blocks[static_cast<std::size_t>(
                    std::lower_bound(here.begin(), here.end(), traits.root) - here.begin())],
                bytes);
  } else if (plan.is_raw()) {
    for (std::size_t place = 0; place < blocks.size(); ++place)
      std::memcpy(message.data() + at + place * bytes, blocks[place], bytes);
  } else {
    in_.assign(blocks.begin(), blocks.end());
    out_.assign(1, message.data() + at);
    kernels::reduce(plan.reduction.here, in_, out_, static_cast<std::size_t>(count));
  }
}

void DirectMemory::combine(const BatchTraits& traits, std::int64_t count,
                           std::span<const std::span<const std::byte>> contributions,
                           std::span<std::byte* const> blocks,
                           std::span<const std::int64_t> parts) {
  const Plan& plan = plan_of(traits);
  const std::size_t bytes = static_cast<std::size_t>(count) * element_bytes(traits.dtype);
  const auto of = [&](std::size_t arranged) { return contributions[plan.domains[arranged]]; };
  for (std::size_t i = 0; i < plan.domains.size(); ++i)
    if (of(i).size() != arrays(plan, i) * bytes)
      throw WireError("a contribution of another length than it must have");
  if (bytes == 0) return;
  if (traits.kind == OpKind::Broadcast) {
    for (std::size_t i = 0; i < plan.domains.size(); ++i)
      for (std::byte* const block : blocks)
        if (!of(i).empty()) std::memcpy(block, of(i).data(), bytes);
  } else if (traits.kind == OpKind::Allgather || traits.kind == OpKind::Alltoall) {
    const auto row_of = [&](int rank) {
      return static_cast<std::size_t>(std::ranges::lower_bound(traits.set->ranks, rank) -
                                      traits.set->ranks.begin());
    };
    for (std::size_t here = 0; here < blocks.size(); ++here) {
      std::size_t part = bytes, before = 0;  // of each input
      if (traits.kind == OpKind::Alltoall) {
        const std::size_t own = row_of(plan.who.here()[here]);
        part = static_cast<std::size_t>(parts[own]) * element_bytes(traits.dtype);
        for (std::size_t to = 0; to < own; ++to)
          before += static_cast<std::size_t>(parts[to]) * element_bytes(traits.dtype);
      }
      for (std::size_t i = 0; part > 0 && i < plan.domains.size(); ++i)
        for (std::size_t place = 0; place < plan.who.domains[i].size(); ++place)
          std::memcpy(blocks[here] + row_of(plan.who.domains[i][place]) * part,
                      of(i).data() + place * bytes + before, part);
    }
  } else {
    in_.clear();
    if (plan.reduction.raw) {
      for (const auto& [domain, place] : plan.reduction.fold)
        in_.push_back(of(domain).data() + place * bytes);
    } else {
      for (std::size_t i = 0; i < plan.domains.size(); ++i) in_.push_back(of(i).data());
    }
    out_.assign(blocks.begin(), blocks.end());
    kernels::reduce(plan.reduction.across, in_, out_, static_cast<std::size_t>(count));
  }
}

}  // namespace hvd
