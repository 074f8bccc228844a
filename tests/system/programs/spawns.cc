// Starts its own ranks: spawns RANKS [fail RANK | where | sleep | text]. Prints what each rank
// knows; what spawn() throws becomes "caught: ..." and exit code 3. where: rank 0 fails with the
// name of the folder for such reports. sleep: for a minute, once all have met.
#include <chrono>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "hvd/hvd.h"
#include "hvd/spawn.h"

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  try {
    hvd::spawn(std::stoi(arguments.at(0)), [&] {
      hvd::init();
      float sum = static_cast<float>(hvd::rank()) + 1;
      const hvd::Buffer buffer{.data = &sum, .dtype = hvd::DataType::Float32, .shape = {1}};
      hvd::allreduce(buffer, buffer, {.op = hvd::ReduceOp::Sum});
      if (arguments.size() > 2 && arguments[1] == "fail" && hvd::rank() == std::stoi(arguments[2]))
        throw std::runtime_error("the user's");
      if (arguments.size() > 1 && arguments[1] == "sleep") {
        if (hvd::rank() == 0) std::puts("all have met");
        std::fflush(stdout);
        std::this_thread::sleep_for(std::chrono::minutes(1));
      }
      const char* const folder = hvd::detail::spawn_reports();
      if (arguments.size() > 1 && arguments[1] == "where" && hvd::rank() == 0)
        throw std::runtime_error(folder == nullptr ? "none" : folder);
      std::printf("rank %d of %d: sum %g, argument '%s'\n", hvd::rank(), hvd::size(), sum,
                  arguments.size() > 1 ? arguments[1].c_str() : "");
      hvd::shutdown();
    });
    std::printf("end\n");
  } catch (const std::exception& error) {
    std::printf("caught: %s\n", error.what());
    return 3;
  }
  return 0;
}
