// hvd's own kernels, from the same source as on a GPU: their threads and blocks run in random
// orders. They are launched by nvcc's code, which registers names, those of the templates below,
// or, of a hvd that is compiled without nvcc, by the functions at the end.
#include <cxxabi.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <numeric>
#include <typeinfo>
#include <vector>

#include "tests/support/gpu/cuda_on_host.h"
//
#include "ops/gpu/kernels/batched_copy_kernel.h"
#include "ops/gpu/kernels/poison_kernel.h"
#include "ops/gpu/kernels/shared_reduce_kernel.h"
#include "tests/gpu/double/streams.h"
#include "tests/support/random.h"

namespace hvd::gpu::test::cuda {

namespace {

// Names as in the .cu files.
template <class S, class D, class Op, int kCapacity>
struct batched_copy_kernel {};  // NOLINT
template <class T, class Fold>
struct shared_reduce_kernel {};  // NOLINT

void replace_all(std::string& text, std::string_view what, std::string_view by) {
  for (std::size_t at = text.find(what); at != std::string::npos;
       at = text.find(what, at + by.size()))
    text.replace(at, what.size(), by);
}

std::string demangled(std::string name) {
  replace_all(name, "DF16_", "Df");  // _Float16, which GCC 12 cannot spell, as one that is not used
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(
      abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status), std::free);
  return status == 0 ? text.get() : name;
}

/// "batched_copy_kernel<float, __half, ...>" of a longer name.
std::string shortened(std::string name) {
  replace_all(name, "decimal32", "__half");
  replace_all(name, "hvd::gpu::test::Bfloat", "__nv_bfloat16");
  for (const char* kernel : {"batched_copy_kernel<", "shared_reduce_kernel<", "poison_kernel"}) {
    const std::size_t begin = name.find(kernel);
    if (begin == std::string::npos) continue;
    std::size_t end = name.find_first_of("<(", begin);
    int depth = 0;
    // but for poison_kernel, which is no template
    while (end < name.size() && name[begin + 2] != 'i') {
      depth += name[end] == '<' ? 1 : name[end] == '>' ? -1 : 0;
      ++end;
      if (depth == 0) break;
    }
    return name.substr(begin, std::min(end, name.size()) - begin);
  }
  return name;
}

/// Calls `body(block, thread)` for all of them.
template <class Body>
void in_random_order(unsigned blocks, int threads, const Body& body) {
  std::vector<unsigned> all(blocks);
  std::iota(all.begin(), all.end(), 0U);
  hvd::test::Random random(random_number());
  random.shuffle(all);
  for (const unsigned block : all) {
    const auto first = static_cast<unsigned>(random.next()),
               step = static_cast<unsigned>(random.next()) | 1U;
    for (int i = 0; i < threads; ++i)
      body(block, static_cast<int>((first + step * static_cast<unsigned>(i)) %
                                   static_cast<unsigned>(threads)));
  }
}

/// Reads the arguments.
using Prepare = Work(const void* const* arguments, unsigned blocks);

std::map<std::string, Prepare*>& kernels() {
  static auto* const all = new std::map<std::string, Prepare*>;
  return *all;
}

template <class S, class D, class Op, int kCapacity>
Work prepare_copy(const void* const* arguments, unsigned blocks) {
  auto table = std::make_shared<device::Table<kCapacity>>(
      *static_cast<const device::Table<kCapacity>*>(arguments[0]));
  const Op op = *static_cast<const Op*>(arguments[1]);
  Work work{{.name = "batched_copy_kernel", .reads_results = true}, {}};
  for (int item = 0; item < table->items; ++item) {
    const auto count = static_cast<std::size_t>(table->count[item]);
    work.use.reads.push_back({table->src[item], count * sizeof(S)});
    work.use.writes.push_back({table->dst[item], count * sizeof(D)});
    table->src[item] = to_executor(table->src[item]);
    table->dst[item] = to_executor(table->dst[item]);
  }
  work.run = [table, op, blocks] {
    in_random_order(blocks, device::kThreads, [&](unsigned block, int thread) {
      device::copy_block<S, D>(*table, op, block, thread);
    });
    return true;
  };
  return work;
}

template <class T, class Fold>
Work prepare_reduction(const void* const* arguments, unsigned blocks) {
  auto table =
      std::make_shared<reduction::Table>(*static_cast<const reduction::Table*>(arguments[0]));
  const Fold fold = *static_cast<const Fold*>(arguments[1]);
  Work work{{.name = "shared_reduce_kernel"}, {}};
  const int addresses = table->in_place ? table->ins : table->ins + table->outs;
  for (int item = 0; item < table->items; ++item) {
    for (int i = 0; i < addresses; ++i) {
      const void*& at = table->in[item * addresses + i];
      const std::size_t bytes = static_cast<std::size_t>(table->count[item]) * sizeof(T);
      if (i < table->ins) work.use.reads.push_back({at, bytes});
      if (table->in_place || i >= table->ins) work.use.writes.push_back({at, bytes});
      at = to_executor(at);
    }
  }
  work.run = [table, fold, blocks] {
    in_random_order(blocks, reduction::kThreads, [&](unsigned block, int thread) {
      reduction::reduce_block<T>(*table, fold, block, thread);
    });
    return true;
  };
  return work;
}

/// What hvd's code gives its launches to: calls `launch_as(name, prepare, arguments, blocks)`.
template <class LaunchAs>
struct Launcher {
  LaunchAs launch_as;

  template <class S, class D, class Op, int kCapacity>
  CudaCode launch(const device::Table<kCapacity>& table, const Op& op, std::uint32_t blocks) const {
    return launch_as(typeid(batched_copy_kernel<S, D, Op, kCapacity>).name(),
                     prepare_copy<S, D, Op, kCapacity>, &table, &op, blocks);
  }
  template <class T, class Fold>
  CudaCode launch(const reduction::Table& table, const Fold& fold, std::uint32_t blocks) const {
    return launch_as(typeid(shared_reduce_kernel<T, Fold>).name(), prepare_reduction<T, Fold>,
                     &table, &fold, blocks);
  }
};

template <class LaunchAs>
Launcher(LaunchAs) -> Launcher<LaunchAs>;

Work prepare_poison(const void* const* arguments, unsigned blocks) {
  auto table = std::make_shared<poison::Table>(*static_cast<const poison::Table*>(arguments[0]));
  const auto* const mark = *static_cast<const std::uint32_t* const*>(arguments[1]);
  Work work{{.name = "poison_kernel"}, {}};
  for (int item = 0; item < table->items; ++item) {
    work.use.writes.push_back({table->begin[item], table->bytes[item]});
    table->begin[item] = to_executor(table->begin[item]);
  }
  work.run = [table, mark, blocks] {
    if (std::atomic_ref(*const_cast<std::uint32_t*>(mark)).load() == 0) return true;
    in_random_order(blocks, poison::kThreads, [&](unsigned block, int thread) {
      poison::fill(*table, std::size_t{block} * poison::kThreads + static_cast<std::size_t>(thread),
                   std::size_t{blocks} * poison::kThreads);
    });
    return true;
  };
  return work;
}

/// Lets hvd's code say which kernels there are.
void register_all() {
  static bool once = false;
  if (std::exchange(once, true)) return;
  const Launcher launcher{[](const char* name, Prepare* prepare, const auto&...) {
    kernels()[shortened(demangled(name))] = prepare;
    return CudaCode::Success;
  }};
  const std::vector<CopyItem> few(1, CopyItem{nullptr, nullptr, 1}),
      many(device::kSmall + 1, CopyItem{nullptr, nullptr, 1});
  const void* input = nullptr;
  void* output = nullptr;
  const std::int64_t one = 1;
  for (int from = 0; from < 12; ++from) {
    const auto dtype = static_cast<DataType>(from);
    for (const auto& items : {std::span(few), std::span(many)}) {
      static_cast<void>(device::copy_job({.items = items, .from = dtype, .to = dtype}, launcher));
      for (int to = 0; to < 12; ++to)
        static_cast<void>(device::copy_job(
            {.items = items, .from = dtype, .to = static_cast<DataType>(to), .factor = 2},
            launcher));
    }
    for (int op = 0; op < 5; ++op)
      static_cast<void>(reduction::reduce_job({.inputs = {&input, 1},
                                               .outputs = {&output, 1},
                                               .counts = {&one, 1},
                                               .dtype = dtype,
                                               .op = static_cast<ReduceOp>(op)},
                                              launcher));
  }
  kernels()["poison_kernel"] = prepare_poison;
}

std::map<const void*, std::string>& names() {
  static auto* const all = new std::map<const void*, std::string>;
  return *all;
}

Prepare& registered(const void* stub) {
  register_all();
  const std::string& name = names()[stub];
  if (const auto kernel = kernels().find(name); kernel != kernels().end()) return *kernel->second;
  std::fprintf(stderr, "virtual GPU: no kernel '%s'\n", name.c_str());
  std::abort();
}

/// Reads the arguments before it returns.
cudaError_t launch(cudaStream_t handle, const std::function<Work()>& prepare) {
  const Lock lock;
  if (const cudaError_t error = enter(); error != cudaSuccess) return error;
  CUstream_st* const stream = known(handle);
  if (stream == nullptr || stream->device != current_device())
    return done(cudaErrorInvalidResourceHandle);
  Work work = prepare();
  check_access(*stream, work.use);
  return enqueue(*stream, std::move(work));
}

/// Likewise, for hvd, which returns the error and does not leave it behind.
CudaCode launch_on(CudaStream* stream, Prepare* prepare, const void* first, const void* second,
                   unsigned blocks) {
  const std::array arguments{first, second};
  const cudaError_t error = launch(reinterpret_cast<cudaStream_t>(stream),
                                   [&] { return prepare(arguments.data(), blocks); });
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
  return static_cast<CudaCode>(error);
}
auto launcher_on(CudaStream* stream) {
  return Launcher{[stream](const char* /*name*/, const auto&... launch) {
    return launch_on(stream, launch...);
  }};
}

}  // namespace

}  // namespace hvd::gpu::test::cuda

using namespace hvd::gpu::test::cuda;

// ---- nvcc's code
HVD_EXPORTED void** __cudaRegisterFatBinary(void* /*binary*/) {  // NOLINT: CUDA's names
  static void* handle = nullptr;
  return &handle;
}
HVD_EXPORTED void __cudaRegisterFatBinaryEnd(void** /*handle*/) {}  // NOLINT
HVD_EXPORTED void __cudaUnregisterFatBinary(void** /*handle*/) {}   // NOLINT
HVD_EXPORTED void __cudaRegisterFunction(void** /*handle*/, const char* stub, char* /*function*/,
                                         const char* name, int /*limit*/,  // NOLINT
                                         uint3* /*thread*/, uint3* /*block*/, dim3* /*block_size*/,
                                         dim3* /*grid*/, int* /*warp*/) {
  const Lock lock;
  names()[stub] = shortened(demangled(name));
}
HVD_EXPORTED cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* stub,
                                             void** arguments) {
  const Speaker speaker(__builtin_return_address(0));
  return launch(config->stream, [&] { return registered(stub)(arguments, config->gridDim.x); });
}

// ---- in place of ops/gpu/kernels/*.cu
namespace hvd::gpu {

#define HVD_SHOWN __attribute__((visibility("default")))

HVD_SHOWN CudaCode launch_batched_copy(const CopyJob& job, CudaStream* stream) {
  const Speaker speaker(__builtin_return_address(0));
  return device::copy_job(job, launcher_on(stream));
}
HVD_SHOWN CudaCode launch_shared_reduce(const ReduceJob& job, CudaStream* stream) {
  const Speaker speaker(__builtin_return_address(0));
  return reduction::reduce_job(job, launcher_on(stream));
}
HVD_SHOWN CudaCode launch_poison(const PoisonJob& job, CudaStream* stream) {
  const Speaker speaker(__builtin_return_address(0));
  return poison::in_launches(job, [&](const poison::Table& table, int blocks) {
    return launch_on(stream, prepare_poison, &table, &job.mark, static_cast<unsigned>(blocks));
  });
}

}  // namespace hvd::gpu
