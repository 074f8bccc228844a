#include "tests/scale/program.h"
#include "hvd/base/text.h"

#include <memory>
#include <utility>

#include "tools/hvd_bench/models.h"

namespace scale {

Program gradients_of(const std::string& model, std::uint64_t bucket_bytes) {
  Program program;
  hvd::Signature bucket;
  std::uint64_t bytes = 0;
  const auto close = [&] {
    if (bucket.tensors.empty()) return;
    const std::size_t number = program.units.size();
    const std::string more =
        bucket.tensors.size() > 1 ? hvd::formatted(" and {} more", bucket.tensors.size() - 1) : "";
    Unit& unit = program.units.emplace_back();
    unit.key = {
        0, hvd::OpKind::Allreduce,
        hvd::formatted("optimizer.0/gradients.{} (parameter.0.{}{})", number, number, more)};
    unit.signature = std::make_shared<const hvd::Signature>(std::exchange(bucket, {}));
    bytes = 0;
  };
  for (const std::size_t count : bench::gradients_of(model)) {
    const std::uint64_t more = count * hvd::element_bytes(hvd::DataType::Float32);
    if (bytes + more > bucket_bytes) close();
    bucket.tensors.push_back({hvd::DataType::Float32, {static_cast<std::int64_t>(count)}, {}});
    bytes += more;
  }
  close();
  return program;
}

}  // namespace scale
