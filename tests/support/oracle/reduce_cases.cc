#include "tests/support/oracle/reduce_cases.h"

#include <cmath>
#include <cstring>

#include "tests/support/gpu/host_kernels.h"

namespace hvd::gpu::test {

namespace {

bool is_nan(DataType type, const std::byte* at) {
  bool nan = false;
  with_host_type(type, [&](auto tag) {
    using T = typename decltype(tag)::Native;
    T value;
    std::memcpy(&value, at, sizeof value);
    if constexpr (!kInteger<T>) nan = std::isnan(static_cast<double>(value));
  });
  return nan;
}

}  // namespace

std::string ReduceCase::text() const {
  return std::string(name_of(dtype)) + " " + std::string(name_of(op)) + ", " +
         std::to_string(ranks) + " ranks, scales " + std::to_string(prescale) + " and " +
         std::to_string(postscale) + (zeros ? ", zeros" : "") + (in_place ? ", in place" : "") +
         ", skew " + std::to_string(skew) + ", " + std::to_string(counts.size()) + " items";
}

ReduceMemory::ReduceMemory(const ReduceCase& tried) : element_(element_bytes(tried.dtype)) {
  std::size_t bytes = 0;
  for (const auto count : tried.counts) {
    places_.push_back(bytes + tried.skew * element_);
    bytes += (static_cast<std::size_t>(count) * element_ + tried.skew * element_ + 255) / 256 * 256;
  }
  stride_ = bytes + 256;
  std::minstd_rand random(static_cast<unsigned>(stride_) + static_cast<unsigned>(tried.ranks));
  const auto blocks = static_cast<std::size_t>(tried.ranks) + 1;
  for (std::size_t block = 0; block < blocks; ++block) {
    const auto some = random_values(tried.dtype, stride_, random);
    bytes_.insert(bytes_.end(), some.begin(), some.end());
  }
}

ReduceJob ReduceMemory::job(const ReduceCase& tried, std::byte* base) {
  if (base == nullptr) base = aligned();
  inputs_.clear();
  outputs_.clear();
  const auto ranks = static_cast<std::size_t>(tried.ranks);
  for (const std::size_t place : places_) {
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      inputs_.push_back(base + rank * stride_ + place);
      if (tried.in_place) outputs_.push_back(base + rank * stride_ + place);
    }
    if (!tried.in_place) outputs_.push_back(base + ranks * stride_ + place);
  }
  ReduceJob made;
  made.inputs = inputs_;
  made.outputs = outputs_;
  made.counts = tried.counts;
  made.ins = tried.ranks;
  made.outs = tried.in_place ? tried.ranks : 1;
  made.dtype = tried.dtype;
  made.op = tried.op;
  made.prescale = tried.prescale;
  made.postscale = tried.postscale;
  made.divisor = tried.ranks + (tried.zeros ? 1 : 0);
  made.zeros = tried.zeros;
  return made;
}

std::optional<std::string> ReduceMemory::difference(const ReduceCase& tried,
                                                    ReduceMemory& expected) {
  const DataType type = tried.dtype == DataType::Complex64    ? DataType::Float32
                        : tried.dtype == DataType::Complex128 ? DataType::Float64
                                                              : tried.dtype;
  const std::byte* mine = current();
  const std::byte* right = expected.current();
  const std::size_t size = element_bytes(type);
  for (std::size_t at = 0; at + size <= bytes_.size(); at += size) {
    if (std::memcmp(mine + at, right + at, size) == 0) continue;
    if (!is_integer(type) && type != DataType::Bool && is_nan(type, mine + at) &&
        is_nan(type, right + at))
      continue;
    return tried.text() + ": byte " + std::to_string(at) + " of " + std::to_string(stride_) +
           " per rank";
  }
  return std::nullopt;
}

std::byte* ReduceMemory::aligned() {
  if (aligned_.empty()) {
    aligned_.resize(bytes_.size() + 256);
    std::memcpy(boundary(), bytes_.data(), bytes_.size());
  }
  return boundary();
}

void for_each_reduce_case(const std::function<void(const ReduceCase&)>& use) {
  using enum DataType;
  const std::vector<std::int64_t> few{1, 0, 7, 8, 9, 63, 64, 65, 1025, 4099};
  const std::vector<std::int64_t> many(300, 3);  // more than one launch holds
  for (const DataType dtype : {UInt8, Int8, Int16, Int32, Int64, Float16, BFloat16, Float32,
                               Float64, Bool, Complex64, Complex128}) {
    for (const ReduceOp op :
         {ReduceOp::Average, ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product}) {
      if (!reduce_supported(dtype, op)) continue;
      for (const int ranks : {1, 2, 4, 7}) {
        ReduceCase tried{.dtype = dtype, .op = op, .ranks = ranks, .counts = few};
        use(tried);
        tried.in_place = false;
        tried.skew = 1;
        tried.prescale = 0.5;
        use(tried);
        tried.skew = 0;
        tried.prescale = 1;
        tried.postscale = 3;
        tried.zeros = true;
        use(tried);
      }
    }
    const ReduceOp plain = dtype == Bool ? ReduceOp::Max : ReduceOp::Sum;
    use({.dtype = dtype, .op = plain, .ranks = 5, .counts = many});
    use({.dtype = dtype, .op = plain, .ranks = 3, .counts = {3 * 16384 + 5}});
  }
}

}  // namespace hvd::gpu::test
