#include "tools/hvd_bench/rivals.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace bench {

namespace {

constexpr std::size_t kMostPerCall = std::size_t{1} << 30;  // MPI counts are ints

MPI_Op mpi_op(hvd::DataType dtype, hvd::ReduceOp op) {
  const bool is_bool = dtype == hvd::DataType::Bool;
  switch (op) {
    case hvd::ReduceOp::BitAnd: return is_bool ? MPI_LAND : MPI_BAND;
    case hvd::ReduceOp::BitOr: return is_bool ? MPI_LOR : MPI_BOR;
    case hvd::ReduceOp::BitXor: return is_bool ? MPI_LXOR : MPI_BXOR;
    case hvd::ReduceOp::Min: return is_bool ? MPI_LAND : MPI_MIN;
    case hvd::ReduceOp::Max: return is_bool ? MPI_LOR : MPI_MAX;
    case hvd::ReduceOp::Product: return MPI_PROD;
    default: return MPI_SUM;
  }
}

/// One operation of `count` elements of this rank's input (of all ranks' output for an allgather).
/// An average and an Adasum are timed as a sum.
void run_raw(Collective collective, const void* input, void* output, std::size_t count,
             hvd::DataType dtype, hvd::ReduceOp op) {
  const MPI_Datatype type = mpi_type(dtype).value();
  const auto share = static_cast<int>(count / static_cast<std::size_t>(hvd::size()));
  if (collective == Collective::Allgather) {
    MPI_Allgather(input, share, type, output, share, type, MPI_COMM_WORLD);
  } else if (collective == Collective::Alltoall) {
    MPI_Alltoall(input, share, type, output, share, type, MPI_COMM_WORLD);
  } else if (collective == Collective::Reducescatter) {
    MPI_Reduce_scatter_block(input, output, share, type, mpi_op(dtype, op), MPI_COMM_WORLD);
  } else if (collective == Collective::Barrier) {
    MPI_Barrier(MPI_COMM_WORLD);
  }
  if (is_shared_out(collective) || collective == Collective::Barrier) return;
  const std::size_t element = hvd::element_bytes(dtype);
  for (std::size_t begin = 0; begin < count; begin += kMostPerCall) {
    const int part = static_cast<int>(std::min(kMostPerCall, count - begin));
    auto* to = static_cast<std::byte*>(output) + begin * element;
    if (collective == Collective::Broadcast) {
      MPI_Bcast(to, part, type, 0, MPI_COMM_WORLD);
    } else {
      const void* const from =
          input == output ? MPI_IN_PLACE : static_cast<const std::byte*>(input) + begin * element;
      MPI_Allreduce(from, to, part, type, mpi_op(dtype, op), MPI_COMM_WORLD);
    }
  }
}

// All are posted at once. One long message instead took 1.4 times as long, both ways at once, over
// Open MPI's TCP.
constexpr std::size_t kPieceBytes = std::size_t{256} << 10;

/// Bytes that an operation has to bring from each of `hosts` hosts to each other one, where each
/// has `ranks` ranks.
std::size_t bytes_between_hosts(Collective collective, std::size_t bytes, std::size_t hosts,
                                std::size_t ranks) {
  switch (collective) {
    case Collective::Allreduce: return 2 * bytes / hosts;
    case Collective::Broadcast: return bytes;
    case Collective::Alltoall: return bytes * ranks / hosts;
    case Collective::Allgather:
    case Collective::Reducescatter: return bytes / hosts;
    case Collective::Barrier: break;
  }
  return 0;
}

}  // namespace

std::optional<MPI_Datatype> mpi_type(hvd::DataType dtype) {
  switch (dtype) {
    case hvd::DataType::UInt8: return MPI_UINT8_T;
    case hvd::DataType::Int8: return MPI_INT8_T;
    case hvd::DataType::Int16: return MPI_INT16_T;
    case hvd::DataType::Int32: return MPI_INT32_T;
    case hvd::DataType::Int64: return MPI_INT64_T;
    case hvd::DataType::Float32: return MPI_FLOAT;
    case hvd::DataType::Float64: return MPI_DOUBLE;
    case hvd::DataType::Bool: return MPI_C_BOOL;
    case hvd::DataType::Complex64: return MPI_C_FLOAT_COMPLEX;
    case hvd::DataType::Complex128: return MPI_C_DOUBLE_COMPLEX;
    default: return std::nullopt;
  }
}

RawMpi::RawMpi() {
  int level = MPI_THREAD_SINGLE;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
}
RawMpi::~RawMpi() {
  if (done_) MPI_Finalize();
}

void run_raw_burst(const std::vector<hvd::Buffer>& inputs, const std::vector<hvd::Buffer>& outputs,
                   hvd::ReduceOp op) {
  std::vector<MPI_Request> requests(inputs.size(), MPI_REQUEST_NULL);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const hvd::Buffer& input = inputs[i];
    const MPI_Datatype type = mpi_type(input.dtype).value();
    MPI_Iallreduce(input.data, outputs[i].data, static_cast<int>(input.shape.front()), type,
                   mpi_op(input.dtype, op), MPI_COMM_WORLD, &requests[i]);
  }
  MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE);
}

Rival::Rival(const Options& options, const std::vector<std::size_t>& counts)
    : options_(options),
      input_(counts, options.dtype, {.on_gpu = options.on_gpu}),
      output_(counts, options.dtype, {.on_gpu = options.on_gpu}) {
  if (options.versus_packed)
    packed_.emplace(std::vector{std::accumulate(counts.begin(), counts.end(), std::size_t{0})},
                    options.dtype, Place{});
}

void Rival::run_mpi() const {
  for (std::size_t i = 0; i < input_.size(); ++i)
    run_raw(options_.collective, input_[i].data(), output_[i].data(), input_.count(i),
            options_.dtype, options_.op);
}

void Rival::run_packed() const {
  const auto block = (*packed_)[0];
  std::size_t place = 0;
  for (std::size_t i = 0; i < input_.size(); place += input_[i++].size())
    std::memcpy(block.data() + place, input_[i].data(), input_[i].size());
  run_raw(Collective::Allreduce, block.data(), block.data(), packed_->count(0), options_.dtype,
          options_.op);
  place = 0;
  for (std::size_t i = 0; i < output_.size(); place += output_[i++].size())
    std::memcpy(output_[i].data(), block.data() + place, output_[i].size());
}

void Rival::run_memcpy() const {
  if (options_.on_gpu) return gpu::copy(output_.data(), input_.data(), input_.bytes());
  for (std::size_t i = 0; i < input_.size(); ++i) {
    std::memcpy(output_[i].data(), input_[i].data(), input_[i].size());
    asm volatile("" : : "r"(output_[i].data()) : "memory");  // it is not left out
  }
}

Line::Line(const Options& options, std::size_t bytes) {
  const int hosts = hvd::cross_size(), ranks = hvd::local_size();
  const bool are_alike = hosts > 1 && hosts * ranks == hvd::size() &&
                         hvd::rank() == hvd::cross_rank() * ranks + hvd::local_rank();
  if (largest(are_alike ? 0 : 1) > 0)
    throw WrongOptions("--versus line: needs several hosts, with the same number of ranks on each");
  bytes_ = bytes_between_hosts(options.collective, bytes, static_cast<std::size_t>(hosts),
                               static_cast<std::size_t>(ranks)) /
           static_cast<std::size_t>(ranks);
  const auto rank_on = [&](int host) { return host % hosts * ranks + hvd::local_rank(); };
  const int here = hvd::cross_rank();
  if (options.collective == Collective::Broadcast) {
    if (here == 0) to_.push_back(rank_on(1));
    if (here == 1) from_.push_back(rank_on(0));
  } else {
    for (int i = 1; i < hosts; ++i) {
      to_.push_back(rank_on(here + i));
      from_.push_back(rank_on(here + hosts - i));
    }
  }
  sent_.resize(to_.size() * bytes_);
  received_.resize(from_.size() * bytes_);
}

void Line::run() {
  requests_.clear();
  for (std::size_t begin = 0; begin < bytes_; begin += kPieceBytes) {
    const int length = static_cast<int>(std::min(kPieceBytes, bytes_ - begin));
    for (std::size_t i = 0; i < from_.size(); ++i)
      MPI_Irecv(received_.data() + i * bytes_ + begin, length, MPI_BYTE, from_[i], 0,
                MPI_COMM_WORLD, &requests_.emplace_back());
    for (std::size_t i = 0; i < to_.size(); ++i)
      MPI_Isend(sent_.data() + i * bytes_ + begin, length, MPI_BYTE, to_[i], 0, MPI_COMM_WORLD,
                &requests_.emplace_back());
  }
  MPI_Waitall(static_cast<int>(requests_.size()), requests_.data(), MPI_STATUSES_IGNORE);
}

}  // namespace bench
