// send and recv beside MPI's: two ranks send a message to and fro, by turns with hvd and with
// MPI_Send and MPI_Recv. Prints for each size the medians of the time of one way, and hvd's in
// times of MPI's.
//   mpirun -np 2 build/tests/ping_pong [SECONDS-PER-SIZE [BYTES...]]
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "hvd/hvd.h"

namespace {

using Clock = std::chrono::steady_clock;

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

/// Returns the microseconds of one way.
double microseconds(int rank, int trips, const std::function<void()>& send,
                    const std::function<void()>& receive) {
  const auto began = Clock::now();
  for (int trip = 0; trip < trips; ++trip) {
    if (rank == 0) {
      send();
      receive();
    } else {
      receive();
      send();
    }
  }
  return std::chrono::duration<double, std::micro>(Clock::now() - began).count() / (2.0 * trips);
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 2;
  MPI_Init(nullptr, nullptr);
  hvd::init();
  const int rank = hvd::rank(), other = 1 - rank;
  if (rank == 0) std::printf("%12s %12s %12s %8s\n", "bytes", "hvd us", "MPI us", "ratio");
  std::vector<std::size_t> sizes{4, 64, 1024, 8192, 16384, 65536, 1 << 20, 4 << 20, 64 << 20};
  if (argc > 2) sizes.clear();
  for (int place = 2; place < argc; ++place)
    sizes.push_back(std::strtoul(argv[place], nullptr, 10));
  for (const std::size_t bytes : sizes) {
    std::vector<char> out(bytes, static_cast<char>(rank + 1)), in(bytes);
    const hvd::Buffer from{.data = out.data(),
                           .dtype = hvd::DataType::UInt8,
                           .shape = {static_cast<std::int64_t>(bytes)}};
    const hvd::Buffer to{.data = in.data(),
                         .dtype = hvd::DataType::UInt8,
                         .shape = {static_cast<std::int64_t>(bytes)}};
    const int count = static_cast<int>(bytes);
    const auto by_hvd = [&](int trips) {
      return microseconds(
          rank, trips, [&] { hvd::send(from, {.peer = other}); },
          [&] { hvd::recv(to, {.peer = other}); });
    };
    const auto by_mpi = [&](int trips) {
      return microseconds(
          rank, trips, [&] { MPI_Send(out.data(), count, MPI_BYTE, other, 0, MPI_COMM_WORLD); },
          [&] {
            MPI_Recv(in.data(), count, MPI_BYTE, other, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
          });
    };
    const int trips =
        static_cast<int>(std::clamp<std::size_t>((std::size_t{32} << 20) / bytes, 3, 2000));
    std::vector<double> hvd_times, mpi_times;
    const auto until = Clock::now() + std::chrono::duration<double>(seconds);
    for (int go = 1; go != 0;) {
      hvd_times.push_back(by_hvd(trips));
      MPI_Barrier(MPI_COMM_WORLD);
      mpi_times.push_back(by_mpi(trips));
      go = Clock::now() < until ? 1 : 0;
      MPI_Bcast(&go, 1, MPI_INT, 0, MPI_COMM_WORLD);
    }
    const double mine = median(hvd_times), theirs = median(mpi_times);
    if (rank == 0) std::printf("%12zu %12.2f %12.2f %8.2f\n", bytes, mine, theirs, mine / theirs);
    std::fflush(stdout);
  }
  hvd::shutdown();
  MPI_Finalize();
  return 0;
}
