#include "hvd/negotiation/values/output_rows.h"

#include <string>
#include <vector>

#include "hvd/base/text.h"

namespace hvd {

namespace {

/// Returns the rows of tensor `index` that come to the rank at `place`.
std::int64_t rows_for(std::size_t place, std::size_t index, std::size_t ranks, const std::function<const Signature&(std::size_t)>& said) {
  std::int64_t rows = 0;
  for (std::size_t from = 0; from < ranks; ++from) {
    const TensorSignature& tensor = said(from).tensors[index];
    rows += said(from).kind == OpKind::Alltoall ? tensor.splits.at(place) : tensor.shape.front();
  }
  return rows;
}

}  // namespace

Status verdict_on_outputs(std::string_view name, std::span<const int> ranks, const std::function<const Signature&(std::size_t)>& said) {
  const Signature& first = said(0);
  if (first.kind != OpKind::Allgather && first.kind != OpKind::Alltoall) return {};
  for (std::size_t index = 0; index < first.tensors.size(); ++index) {
    bool fits = true;
    std::int64_t coming = -1;
    std::vector<std::string> texts;
    for (std::size_t place = 0; place < ranks.size(); ++place) {
      const std::int64_t room = said(place).tensors[index].output_rows;
      if (room < 0) {
        texts.emplace_back("no output given");
        continue;
      }
      if (coming < 0 || first.kind == OpKind::Alltoall) coming = rows_for(place, index, ranks.size(), said);
      fits = fits && room == coming;
      texts.push_back(formatted("{} rows come, and the output has {}", coming, room));
    }
    if (!fits)
      return {Status::Code::Mismatch, formatted("{} '{}': the output does not have as many rows as come: {}", name_of(first.kind), name,
                                                grouped_by_rank(ranks, texts))};
  }
  return {};
}

}  // namespace hvd
