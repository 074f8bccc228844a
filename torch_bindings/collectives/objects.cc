#include "torch_bindings/collectives/objects.h"

#include <torch/torch.h>

#include <cstdlib>
#include <cstring>

#include "hvd/base/text.h"
#include "hvd/negotiation/values/unit_names.h"
#include "torch_bindings/collectives/collectives.h"

namespace hvd::detail {

std::string broadcast_text(std::string text, int root_rank, const ProcessSet& process_set,
                           const std::string& failure) {
  if (!failure.empty()) text = failure;
  const auto bytes = static_cast<std::int64_t>(text.size());
  at::Tensor size = torch::full({1}, failure.empty() ? bytes : -bytes, torch::kInt64);
  broadcast_(size, {.name = library_name("broadcast_object/size"),
                    .root_rank = root_rank,
                    .process_set = process_set});
  const auto told = size.item<std::int64_t>();
  text.resize(static_cast<std::size_t>(std::abs(told)));
  if (!text.empty())
    broadcast_(
        torch::from_blob(text.data(), {static_cast<std::int64_t>(text.size())}, torch::kUInt8),
        {.name = library_name("broadcast_object"),
         .root_rank = root_rank,
         .process_set = process_set});
  if (told < 0)
    throw InvalidArgument(
        formatted("broadcast_object: rank {} cannot write its object: {}", root_rank, text));
  return text;
}

std::vector<std::string> allgather_text(const std::string& text, const ProcessSet& process_set,
                                        const std::string& failure) {
  const std::string& sent = failure.empty() ? text : failure;
  const auto bytes = static_cast<std::int64_t>(sent.size());
  const at::Tensor sizes =
      allgather(torch::full({1}, failure.empty() ? bytes : -bytes, torch::kInt64),
                {.name = library_name("allgather_object/size"), .process_set = process_set});
  at::Tensor mine = torch::empty({bytes}, torch::kUInt8);
  if (bytes > 0) std::memcpy(mine.mutable_data_ptr(), sent.data(), sent.size());
  const at::Tensor all =
      allgather(mine, {.name = library_name("allgather_object"), .process_set = process_set});
  const auto* from = static_cast<const char*>(all.const_data_ptr());
  std::vector<std::string> texts;
  for (std::int64_t i = 0; i < sizes.size(0); ++i) {
    const auto told = sizes[i].item<std::int64_t>();
    texts.emplace_back(from, static_cast<std::size_t>(std::abs(told)));
    if (told < 0)
      throw InvalidArgument(formatted("allgather_object: rank {} cannot write its object: {}",
                                      process_set.ranks()[static_cast<std::size_t>(i)],
                                      texts.back()));
    from += told;
  }
  return texts;
}

std::string words_of_current_exception() {
  try {
    throw;
  } catch (const c10::Error& error) {
    const std::string words = error.what_without_backtrace();
    return words.substr(0, words.find('\n'));
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

}  // namespace hvd::detail
