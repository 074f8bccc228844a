#include "torch_bindings/collectives/objects.h"

#include <torch/torch.h>

#include <algorithm>
#include <cstdlib>

#include "hvd/base/digest.h"
#include "hvd/base/text.h"
#include "hvd/negotiation/values/signature.h"
#include "hvd/negotiation/values/unit_names.h"
#include "torch_bindings/collectives/collectives.h"
#include "torch_bindings/collectives/tensors.h"

namespace hvd::detail {

namespace {

/// Returns the bytes of all ranks' texts: negative where it is a failure's. Throws Mismatch on all
/// ranks if they differ in `type` or in `root_rank`.
std::vector<std::int64_t> agree_on_sizes(const std::string& what, const std::string& text,
                                         const std::string& failure, int root_rank,
                                         const std::string& type, const ProcessSet& process_set) {
  const auto bytes = static_cast<std::int64_t>(text.size());
  const std::vector<std::int64_t> mine{failure.empty() ? bytes : -bytes, root_rank,
                                       static_cast<std::int64_t>(digest_of(type))};
  const at::Tensor all =
      allgather(torch::tensor(mine, torch::kInt64).view({1, 3}),
                {.name = library_name(what + "/size"), .process_set = process_set});
  const auto* const said = all.const_data_ptr<std::int64_t>();
  std::vector<std::int64_t> sizes;
  std::vector<std::string> roots;
  bool same_root = true, same_type = true;
  for (std::int64_t i = 0; i < all.size(0); ++i) {
    const std::int64_t* const its = said + 3 * i;
    sizes.push_back(its[0]);
    roots.push_back(formatted("root rank {}", its[1]));
    same_root = same_root && its[1] == mine[1];
    same_type = same_type && its[2] == mine[2];
  }
  // what one rank finds alike all do
  const auto refuse = [&](std::string_view of, const std::vector<std::string>& texts) {
    throw Mismatch(formatted("{}: {} on the ranks: {}", what, of,
                             grouped_by_rank(process_set.ranks(), texts)));
  };
  if (!same_root) refuse("different roots", roots);
  if (!same_type) refuse("objects of different types", allgather_text(type, process_set));
  return sizes;
}

}  // namespace

std::string broadcast_text(std::string text, int root_rank, const ProcessSet& process_set,
                           const std::string& failure, const std::string& type) {
  const std::string what = "broadcast_object";
  const std::vector<int> ranks = process_set.ranks();
  const auto root = std::find(ranks.begin(), ranks.end(), root_rank);
  if (root == ranks.end())
    throw InvalidArgument(formatted("{}: root rank {} is not in process set {} (ranks {})", what,
                                    root_rank, process_set.id(), rank_list(ranks)));
  if (!failure.empty()) text = failure;
  const auto told = agree_on_sizes(what, text, failure, root_rank, type,
                                   process_set)[static_cast<std::size_t>(root - ranks.begin())];
  text.resize(static_cast<std::size_t>(std::abs(told)));
  if (!text.empty())
    broadcast_(
        torch::from_blob(text.data(), {static_cast<std::int64_t>(text.size())}, torch::kUInt8),
        {.name = library_name(what), .root_rank = root_rank, .process_set = process_set});
  if (told < 0)
    throw InvalidArgument(
        formatted("{}: rank {} cannot write its object: {}", what, root_rank, text));
  return text;
}

std::vector<std::string> allgather_text(const std::string& text, const ProcessSet& process_set,
                                        const std::string& failure, const std::string& type) {
  const std::string& sent = failure.empty() ? text : failure;
  const auto sizes = agree_on_sizes("allgather_object", sent, failure, 0, type, process_set);
  const at::Tensor all = allgather(
      bytes_of_text(sent), {.name = library_name("allgather_object"), .process_set = process_set});
  const auto* from = static_cast<const char*>(all.const_data_ptr());
  std::vector<std::string> texts;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const auto told = sizes[i];
    texts.emplace_back(from, static_cast<std::size_t>(std::abs(told)));
    if (told < 0)
      throw InvalidArgument(formatted("allgather_object: rank {} cannot write its object: {}",
                                      process_set.ranks()[i], texts.back()));
    from += told;
  }
  return texts;
}

namespace {

void refuse_contents() {
  throw InvalidArgument(
      "an object of another rank cannot be read as one of the same type here: do the ranks run the "
      "same program?");
}

std::size_t left_in(std::istream& in) {
  const std::streamsize left = in.rdbuf()->in_avail();
  return left > 0 ? static_cast<std::size_t>(left) : 0;
}

}  // namespace

void require_left(std::istream& in, std::size_t bytes) {
  if (bytes > left_in(in)) refuse_contents();
}
void require_end(std::istream& in) {
  if (left_in(in) > 0) refuse_contents();
}

void fill_in_place(torch::nn::Module& module,
                   const std::function<void(std::optional<at::Device>)>& load) {
  std::vector<std::pair<at::Tensor, at::Device>> places;
  for (const auto& tensors : {module.parameters(), module.buffers()})
    for (const auto& tensor : tensors)
      if (tensor.defined() && !tensor.is_meta()) places.emplace_back(tensor, tensor.device());
  load(places.empty() ? std::nullopt : std::optional(places.front().second));
  const at::NoGradGuard no_gradient;
  for (auto& [tensor, device] : places)
    if (tensor.device() != device) tensor.set_data(tensor.to(device));
}

std::string words_of_current_exception() {
  constexpr const char* kNoWords = "an exception without words";
  try {
    throw;
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    const std::string words = text.substr(0, text.find('\n'));
    return words.empty() ? kNoWords : words;
  } catch (const std::exception& error) {
    const std::string words = error.what();
    return words.empty() ? kNoWords : words;
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

}  // namespace hvd::detail
