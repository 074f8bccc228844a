// This is the example trainer: mpirun -np 4 train [options]; --help lists them. Exit codes: 0 done,
// 1 failed, 2 wrong options.
#include <hvd/torch.h>

#include <chrono>
#include <cstdio>
#include <string>
#include <thread>

#include "examples/train/trainer/collectively.h"
#include "examples/train/trainer/options.h"
#include "examples/train/trainer/trainer.h"

namespace {

/// This process's rank before the world starts, as the launcher tells it.
int launcher_rank() { return hvd::launcher_hints().rank.value_or(0); }

int complain(int rank, const std::string& words) {
  std::fprintf(stderr, "train: rank %d: %s\n", rank, words.c_str());
  std::fflush(stderr);
  return 1;
}

/// All ranks find the same mistake in the options; rank 0 says so. The others give it the time: the
/// first to leave makes mpirun end the rest.
int complain_of_options(const std::string& words) {
  if (launcher_rank() == 0) {
    std::fprintf(stderr, "train: %s\n", words.c_str());
  } else {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
  }
  return 2;
}

int train(const examples::Options& options) {
  try {
    {
      examples::Trainer trainer(options);
      trainer.run();
    }
    hvd::shutdown();
    return 0;
  } catch (const examples::Refused& refused) {  // all ranks are here
    if (*refused.what() != '\0') complain(hvd::rank(), refused.what());
    hvd::shutdown();
    return 1;
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const auto line = examples::parse_command_line(argc, argv);
    if (!line.help.empty()) {
      if (launcher_rank() == 0) std::fputs(line.help.c_str(), stdout);
      return 0;
    }
    int code = 0;
    const auto work = [&] {
      hvd::init();
      code = train(line.options);
    };
    if (line.options.processes > 0) {
      // here only if no launcher has started this process
      hvd::spawn(static_cast<int>(line.options.processes), work);
    } else {
      work();
    }
    return code;
  } catch (const examples::UsageError& error) {
    return complain_of_options(error.what());
  } catch (const std::exception& error) {
    return complain(launcher_rank(), examples::words_of(error));
  }
}
