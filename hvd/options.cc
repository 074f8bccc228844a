#include "hvd/options.h"

#include "hvd/base/text.h"
#include "hvd/errors.h"

namespace hvd {

Compression Compression::topk(double ratio) {
  if (!(ratio > 0 && ratio <= 1))
    throw InvalidArgument(
        formatted("Compression::topk: the ratio is {}; it must be in (0, 1]", ratio));
  Compression compression(Kind::TopK);
  compression.ratio_ = ratio;
  return compression;
}

Compression Compression::powersgd(int rank) {
  if (rank < 1)
    throw InvalidArgument(
        formatted("Compression::powersgd: the rank is {}; it must be at least 1", rank));
  Compression compression(Kind::PowerSgd);
  compression.rank_ = rank;
  return compression;
}

void Compression::refuse_memory(std::string_view what) const {
  if (!needs_memory()) return;
  const std::string_view name = kind_ == Kind::Int8   ? "int8"
                                : kind_ == Kind::TopK ? "topk"
                                                      : "powersgd";
  throw InvalidArgument(
      formatted("{}: compression {} is for DistributedOptimizer, DistributedDataParallel and a "
                "tensor's allreduce; use none, fp16 or bf16 here",
                what, name));
}

}  // namespace hvd
