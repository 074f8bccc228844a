#include "torch_bindings/collectives/agreement.h"

#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "hvd/base/digest.h"
#include "hvd/base/text.h"
#include "hvd/negotiation/values/signature.h"
#include "hvd/negotiation/values/unit_names.h"
#include "torch_bindings/collectives/collectives.h"
#include "torch_bindings/collectives/objects.h"
#include "torch_bindings/collectives/tensors.h"

namespace hvd::detail {

namespace {

/// Throws. `all`: of each rank, in rank order.
[[noreturn]] void tell_differences(std::string_view what, const std::vector<Statements>& all,
                                   const std::vector<int>& ranks) {
  constexpr std::size_t kShown = 3;
  std::vector<std::map<std::string, std::string>> by_name;
  for (const auto& statements : all) by_name.emplace_back(statements.begin(), statements.end());
  std::vector<std::string> said(all.size());
  std::set<std::string> seen;
  std::size_t differences = 0;
  for (const auto& statements : all) {  // in the order of the first rank that has the name
    for (const auto& [name, unused] : statements) {
      if (!seen.insert(name).second) continue;
      std::vector<std::string> of_this;
      for (const auto& known : by_name) {
        const auto found = known.find(name);
        of_this.push_back(found == known.end() ? formatted("no {}", name)
                                               : formatted("{} is {}", name, found->second));
      }
      if (std::all_of(of_this.begin(), of_this.end(),
                      [&](const auto& words) { return words == of_this.front(); }))
        continue;
      if (++differences > kShown) continue;
      for (std::size_t i = 0; i < said.size(); ++i)
        said[i] += (said[i].empty() ? "" : ", ") + of_this[i];
    }
  }
  const std::string more =
      differences > kShown ? formatted(" (and {} more differ)", differences - kShown) : "";
  throw Mismatch(formatted("{}: the ranks differ: {}{}", what, grouped_by_rank(ranks, said), more));
}

}  // namespace

std::uint64_t digest_of_values(const at::Tensor& tensor, std::uint64_t before) {
  const at::NoGradGuard no_gradient;
  const at::Tensor here = tensor.detach().to(at::kCPU).contiguous();
  return digest_of_memory(here.const_data_ptr(), here.nbytes(), before);
}

Shape shape_of_digest(std::uint64_t digest) {
  constexpr int kBits = 11;  // four of them: their product still passes for a number of elements
  Shape sizes;
  for (std::uint64_t rest = digest; sizes.size() < 4; rest >>= kBits)
    sizes.push_back(static_cast<std::int64_t>(rest & ((1U << kBits) - 1)));
  return sizes;
}

void check_root(std::string_view what, int root_rank, const ProcessSet& process_set) {
  const auto ranks = process_set.ranks();
  if (std::find(ranks.begin(), ranks.end(), root_rank) == ranks.end())
    throw InvalidArgument(formatted("{}: root rank {} is not in process set {} (ranks {})", what,
                                    root_rank, process_set.id(), rank_list(ranks)));
}

void agree_on(std::string_view what, const Statements& statements, const ProcessSet& process_set) {
  if (process_set.size() == 1 && process_set.included()) return;
  Statements sorted = statements;
  std::sort(sorted.begin(), sorted.end());
  // chains that begin elsewhere, so that 128 bits count
  std::array<std::uint64_t, 2> digests{1, 2};
  for (auto& digest : digests)
    for (const auto& [name, value] : sorted) digest = digest_of(value, digest_of(name, digest));
  const at::Tensor mine =
      torch::tensor({static_cast<std::int64_t>(digests[0]), static_cast<std::int64_t>(digests[1])},
                    torch::kInt64);
  const at::Tensor all = allgather(
      mine.reshape({1, 2}),
      {.name = library_name(formatted("{}.agreement", what)), .process_set = process_set});
  if (all.eq(all[0]).all().item<bool>()) return;
  tell_differences(what, allgather_object(statements, process_set), process_set.ranks());
}

std::string describe(const at::Tensor& tensor) {
  if (!tensor.defined()) return "undefined";
  std::string text;
  try {
    text = name_of(data_type_of(tensor, ""));
  } catch (const InvalidArgument&) {
    text = at::toString(tensor.scalar_type());
  }
  text += " " + to_string(tensor.sizes().vec());
  if (tensor.layout() != at::kStrided)
    text += formatted(" ({})", tensor.is_sparse() ? "sparse" : "not strided");
  if (!tensor.is_cpu())
    text += " on " + c10::DeviceTypeName(tensor.device().type(), /*lower_case=*/true);
  return text;
}

std::vector<at::Tensor> gather_text(const std::string& text, const ProcessSet& process_set) {
  const at::Tensor mine = bytes_of_text(text);
  const at::Tensor splits = torch::zeros({process_set.size()}, torch::kInt64);
  splits[0] = mine.numel();
  const auto [all, received] = alltoall(
      mine, {.name = library_name("gather_text"), .splits = splits, .process_set = process_set});
  std::vector<at::Tensor> texts;
  if (process_set.rank() != 0) return texts;
  std::int64_t first = 0;
  for (std::int64_t i = 0; i < received.size(0); ++i) {
    const auto count = received[i].item<std::int64_t>();
    texts.push_back(all.narrow(0, first, count));
    first += count;
  }
  return texts;
}

std::string said_by_all(const std::string& mine, const std::string& name,
                        const ProcessSet& process_set) {
  const at::Tensor bytes = bytes_of_text(mine);
  try {
    return text_of(allgather(bytes, {.name = name, .process_set = process_set}));
  } catch (const Error&) {
    return mine;
  }
}

namespace {
std::string refused_name(const std::string& name) {
  const std::string text = formatted("{}/refused", display_name(name));
  return is_unnamed(name) ? library_name(text) : text;
}
}  // namespace

at::Tensor allreduce_unless_refused(const at::Tensor& tensor, const AllreduceOptions& options,
                                    const std::string& refusal) {
  try {
    // another shape, which is a Mismatch
    return allreduce(refusal.empty() ? tensor : tensor.unsqueeze(0), options);
  } catch (const Deadlock&) {  // the others are somewhere else
    throw;
  } catch (const Mismatch& error) {
    const std::string mine = refusal.empty() ? "" : formatted("; rank {}: {}", rank(), refusal);
    throw Mismatch(error.what() +
                   said_by_all(mine, refused_name(options.name), options.process_set));
  }
}

}  // namespace hvd::detail
