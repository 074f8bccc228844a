#include "tools/hvd_bench/raw_mpi.h"

#include <algorithm>

namespace bench {

namespace {

constexpr std::size_t kMostPerCall = std::size_t{1} << 30;  // MPI counts are ints

MPI_Op mpi_op(hvd::DataType dtype, hvd::ReduceOp op) {
  if (dtype == hvd::DataType::Bool) return op == hvd::ReduceOp::Min ? MPI_LAND : MPI_LOR;
  switch (op) {
    case hvd::ReduceOp::Min:
      return MPI_MIN;
    case hvd::ReduceOp::Max:
      return MPI_MAX;
    case hvd::ReduceOp::Product:
      return MPI_PROD;
    default:
      return MPI_SUM;
  }
}

}  // namespace

std::optional<MPI_Datatype> mpi_type(hvd::DataType dtype) {
  switch (dtype) {
    case hvd::DataType::UInt8:
      return MPI_UINT8_T;
    case hvd::DataType::Int8:
      return MPI_INT8_T;
    case hvd::DataType::Int16:
      return MPI_INT16_T;
    case hvd::DataType::Int32:
      return MPI_INT32_T;
    case hvd::DataType::Int64:
      return MPI_INT64_T;
    case hvd::DataType::Float32:
      return MPI_FLOAT;
    case hvd::DataType::Float64:
      return MPI_DOUBLE;
    case hvd::DataType::Bool:
      return MPI_C_BOOL;
    case hvd::DataType::Complex64:
      return MPI_C_FLOAT_COMPLEX;
    case hvd::DataType::Complex128:
      return MPI_C_DOUBLE_COMPLEX;
    default:
      return std::nullopt;
  }
}

RawMpi::RawMpi() {
  int level = MPI_THREAD_SINGLE;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
}
RawMpi::~RawMpi() {
  if (done_) MPI_Finalize();
}

void run_raw(Collective collective, const void* input, void* output, std::size_t count, hvd::DataType dtype, hvd::ReduceOp op) {
  const MPI_Datatype type = mpi_type(dtype).value();
  const std::size_t element = hvd::element_bytes(dtype);
  if (collective == Collective::Allgather) {
    int ranks = 1;
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    const int share = static_cast<int>(count) / ranks;
    MPI_Allgather(input, share, type, output, share, type, MPI_COMM_WORLD);
    return;
  }
  if (collective == Collective::Alltoall || collective == Collective::Reducescatter) {
    int ranks = 1;
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    const int share = static_cast<int>(count) / ranks;
    if (collective == Collective::Alltoall) {
      MPI_Alltoall(input, share, type, output, share, type, MPI_COMM_WORLD);
    } else {
      MPI_Reduce_scatter_block(input, output, share, type, mpi_op(dtype, op), MPI_COMM_WORLD);
    }
    return;
  }
  if (collective == Collective::Barrier) {
    MPI_Barrier(MPI_COMM_WORLD);
    return;
  }
  for (std::size_t begin = 0; begin < count; begin += kMostPerCall) {
    const int part = static_cast<int>(std::min(kMostPerCall, count - begin));
    const auto* from = static_cast<const std::byte*>(input) + begin * element;
    auto* to = static_cast<std::byte*>(output) + begin * element;
    if (collective == Collective::Broadcast) {
      MPI_Bcast(to, part, type, 0, MPI_COMM_WORLD);
    } else {
      MPI_Allreduce(from, to, part, type, mpi_op(dtype, op), MPI_COMM_WORLD);
    }
  }
}

void run_raw_in_place(void* data, std::size_t count, hvd::DataType dtype, hvd::ReduceOp op) {
  for (std::size_t begin = 0; begin < count; begin += kMostPerCall) {
    const int part = static_cast<int>(std::min(kMostPerCall, count - begin));
    auto* place = static_cast<std::byte*>(data) + begin * hvd::element_bytes(dtype);
    MPI_Allreduce(MPI_IN_PLACE, place, part, mpi_type(dtype).value(), mpi_op(dtype, op), MPI_COMM_WORLD);
  }
}

void run_raw_burst(const std::vector<hvd::Buffer>& inputs, const std::vector<hvd::Buffer>& outputs, hvd::ReduceOp op) {
  std::vector<MPI_Request> requests(inputs.size(), MPI_REQUEST_NULL);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const hvd::Buffer& input = inputs[i];
    const MPI_Datatype type = mpi_type(input.dtype).value();
    MPI_Iallreduce(input.data, outputs[i].data, static_cast<int>(input.shape.front()), type, mpi_op(input.dtype, op), MPI_COMM_WORLD,
                   &requests[i]);
  }
  MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE);
}

}  // namespace bench
