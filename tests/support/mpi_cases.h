#pragma once
/// What the tests of P2pBackend share: the layouts they run on, patterns, submissions, and what a
/// reduction must give.

#include <doctest/doctest.h>

#include <bit>
#include <cstring>

#include "ops/kernels/reduce.h"
#include "tests/support/mpi_world.h"

namespace hvd::test {

struct Layout {
  const char* name;
  Dealing domain_of;
};

inline const std::vector<Layout>& layouts() {
  static const std::vector<Layout> all{
      {"every rank for itself", [](int rank) { return rank; }},
      {"pairs", [](int rank) { return rank / 2; }},
      {"every other", [](int rank) { return mpi_size() > 1 ? rank % 2 : 0; }},
      {"three and one", [](int rank) { return rank / 3; }},
  };
  return all;
}

inline std::uint64_t mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15U;
  x = (x ^ (x >> 30U)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27U)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31U);
}

/// Pseudo-random elements: floats in (-2, 2), whose sums depend on the order; integers of all
/// sizes.
inline Bytes pattern(int rank, std::size_t count, DataType dtype, unsigned salt) {
  if (is_complex(dtype))
    return pattern(rank, count * 2,
                   dtype == DataType::Complex64 ? DataType::Float32 : DataType::Float64, salt);
  Bytes bytes(count * element_bytes(dtype));
  std::vector<double> doubles;
  const bool real = dtype == DataType::Float16 || dtype == DataType::BFloat16 ||
                    dtype == DataType::Float32 || dtype == DataType::Float64;
  if (real) doubles.resize(count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t word = mix(i * 1000003U + static_cast<std::uint64_t>(rank) * 7919U + salt);
    if (real) {
      doubles[i] = static_cast<double>(static_cast<std::int64_t>(word)) * 0x1p-62;
    } else {
      std::memcpy(bytes.data() + i * element_bytes(dtype), &word, element_bytes(dtype));
    }
  }
  if (real) kernels::convert_scalar(bytes.data(), dtype, doubles.data(), DataType::Float64, count);
  return bytes;
}

struct Reducing {
  DataType dtype = DataType::Float32;
  ReduceOp op = ReduceOp::Sum;
  double prescale = 1, postscale = 1;
};

/// What the ranks' inputs become: in rank order where every rank is its domain's only one, or the
/// domains' partial results in their order. `absent`: so many more ranks of the set have joined,
/// and count as zeros.
inline Bytes reduced(const Topology& topology, const std::vector<int>& ranks,
                     const std::vector<Bytes>& inputs, const Reducing& how,
                     std::size_t absent = 0) {
  const std::size_t count = inputs.front().size() / element_bytes(how.dtype);
  const bool average = how.op == ReduceOp::Average;
  std::vector<std::pair<int, std::vector<const void*>>> domains;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const int domain = topology.domain_of_rank[static_cast<std::size_t>(ranks[i])];
    auto found = std::find_if(domains.begin(), domains.end(),
                              [&](const auto& known) { return known.first == domain; });
    if (found == domains.end()) found = domains.insert(domains.end(), {domain, {}});
    found->second.push_back(inputs[i].data());
  }
  Bytes result(inputs.front().size());
  std::vector<void*> out{result.data()};
  kernels::Reduction whole{how.dtype,
                           how.op,
                           how.prescale,
                           how.postscale,
                           average ? static_cast<int>(ranks.size() + absent) : 1,
                           how.dtype};
  const std::vector<Bytes> zeros(absent, Bytes(inputs.front().size(), std::byte{0}));
  const auto is_single = [](const auto& domain) { return domain.second.size() == 1; };
  if (domains.size() == 1 || std::all_of(domains.begin(), domains.end(), is_single) ||
      (average && is_integer(how.dtype))) {
    std::vector<const void*> all;
    for (const auto& input : inputs) all.push_back(input.data());
    for (const auto& zero : zeros) all.push_back(zero.data());
    kernels::reduce_scalar(whole, all, out, count);
    return result;
  }
  // float16 contributions to sums travel divided by a power of two, and are scaled then.
  const bool is_scaled_late =
      how.dtype == DataType::Float16 && (average || how.op == ReduceOp::Sum);
  double scale = 1;
  for (const auto& domain : domains)
    scale = std::max(scale, static_cast<double>(std::bit_ceil(domain.second.size())));
  if (!is_scaled_late) scale = 1;
  std::vector<Bytes> partial(domains.size(), Bytes(result.size()));
  std::vector<const void*> partials;
  for (std::size_t d = 0; d < domains.size(); ++d) {
    std::vector<void*> to{partial[d].data()};
    kernels::reduce_scalar({how.dtype, average ? ReduceOp::Sum : how.op,
                            is_scaled_late ? 1 : how.prescale, 1 / scale, 1, how.dtype},
                           domains[d].second, to, count);
    partials.push_back(partial[d].data());
  }
  for (const auto& zero : zeros) partials.push_back(zero.data());
  whole.prescale = is_scaled_late ? scale * how.prescale : 1;
  kernels::reduce_scalar(whole, partials, out, count);
  return result;
}

inline std::vector<Bytes> patterns(const std::vector<int>& ranks, std::size_t count, DataType dtype,
                                   unsigned salt) {
  std::vector<Bytes> all;
  for (const int rank : ranks) all.push_back(pattern(rank, count, dtype, salt));
  return all;
}

inline Submission submission_of(OpKind kind, std::string name, const void* input, void* output,
                                std::size_t count, DataType dtype) {
  Submission submission;
  submission.kind = kind;
  submission.name = std::move(name);
  submission.tensors.push_back(
      {input, output, dtype, {static_cast<std::int64_t>(count)}, nullptr, true});
  return submission;
}

inline Submission reduction_of(std::string name, const void* input, void* output, std::size_t count,
                               const Reducing& how) {
  Submission submission =
      submission_of(OpKind::Allreduce, std::move(name), input, output, count, how.dtype);
  submission.op = how.op;
  submission.prescale_factor = how.prescale;
  submission.postscale_factor = how.postscale;
  return submission;
}

inline void run(Engine& engine, Submission submission) {
  engine.wait(*engine.submit(std::move(submission), After::Wait));
}

inline std::vector<int> everyone() {
  std::vector<int> ranks(static_cast<std::size_t>(mpi_size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

/// Process sets that this many ranks have, besides the global one.
inline std::vector<std::vector<int>> some_sets() {
  switch (mpi_size()) {
    case 4: return {{0, 2}, {1, 2, 3}, {3}, {0, 1, 3}, {2, 3}};
    case 3: return {{0, 2}, {1, 2}, {1}};
    case 2: return {{0}, {1}, {0, 1}};
    default: return {{0}};
  }
}

/// On every layout, with the global set and with or without shared memory.
inline void on_all_layouts(const std::function<void(MpiWorld&)>& body, const Config& config = {}) {
  for (const Layout& layout : layouts())
    for (const bool shm : {true, false}) {
      // no set within a domain: nothing for it to do
      if (shm && mpi_size() > 1 && layout.domain_of(mpi_size() - 1) > 0) continue;
      CAPTURE(std::string(layout.name));
      CAPTURE(shm);
      MpiWorld world({layout.domain_of, config, shm});
      body(world);
    }
}

}  // namespace hvd::test
