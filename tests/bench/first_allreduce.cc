// How long a start takes. As a rank, under whatever has started it: rank 0 prints the milliseconds
// from BEGAN, which start_times.sh sets to the nanoseconds of the clock, to the end of the first
// allreduce. With --threads N: N threads, as ranks of a launcher that takes no time itself, meet in
// the store over TCP and do an exchange; prints the milliseconds of that.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "hvd/hvd.h"
#include "ops/rendezvous/store_meeting.h"

namespace {

using namespace std::chrono_literals;

int measure_process() {
  hvd::init();
  float value = 1;
  const hvd::Buffer buffer{.data = &value, .dtype = hvd::DataType::Float32, .shape = {1}};
  hvd::allreduce(buffer, buffer, {.op = hvd::ReduceOp::Sum});
  const auto now = std::chrono::duration_cast<std::chrono::nanoseconds>(
                       std::chrono::system_clock::now().time_since_epoch())
                       .count();
  const char* const began = std::getenv("BEGAN");
  if (hvd::rank() == 0 && began != nullptr)
    std::printf("%.0f\n", static_cast<double>(now - std::atoll(began)) / 1e6);
  hvd::shutdown();
  return 0;
}

int measure_threads(int size) {
  const auto began = std::chrono::steady_clock::now();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([=] {
      hvd::Launch launch;
      launch.way = hvd::Launch::Way::Store;
      launch.hints = {.rank = rank, .size = size, .local_rank = rank};
      launch.store = hvd::StoreAddress{};
      launch.store->host = "127.0.0.1";
      launch.store->first_port = 23456;
      launch.store->ports = 16;
      launch.store->job = "start";
      const auto ranks = hvd::meet_in_store(launch, 30s);
      static_cast<void>(ranks->allgather(hvd::Bytes(100)));
      ranks->barrier();
    });
  for (auto& thread : threads) thread.join();
  std::printf(
      "%.0f\n",
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - began).count());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3 && std::strcmp(argv[1], "--threads") == 0)
    return measure_threads(std::atoi(argv[2]));
  return measure_process();
}
