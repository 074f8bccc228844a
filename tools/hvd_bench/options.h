#pragma once
/// Options is the command line of hvd_bench as a value. Wrong options throw `WrongOptions`, whose
/// text says what is allowed.

#include <hvd/hvd.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace bench {

struct WrongOptions : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Collective : std::uint8_t {
  Allreduce,
  Broadcast,
  Allgather,
  Alltoall,
  Reducescatter,
  Barrier
};
constexpr bool reduces(Collective collective) {
  return collective == Collective::Allreduce || collective == Collective::Reducescatter;
}
/// Whether a rank's input or output is its share of the size that is named.
constexpr bool is_shared_out(Collective collective) {
  return collective == Collective::Allgather || collective == Collective::Alltoall ||
         collective == Collective::Reducescatter;
}
enum class Backend : std::uint8_t { Auto, Shm, Mpi };

struct Options {
  Collective collective = Collective::Allreduce;
  std::uint64_t min_bytes = 4;
  std::uint64_t max_bytes = std::uint64_t{64} << 20;
  std::uint64_t factor = 4;
  hvd::ReduceOp op = hvd::ReduceOp::Sum;
  hvd::DataType dtype = hvd::DataType::Float32;
  std::vector<bool> in_arena{
      false};  ///< one row each: ordinary memory, memory shared by the ranks of the host
  std::vector<bool> in_place{true};  ///< one row each
  std::vector<hvd::Compression> wires{
      hvd::Compression::none()};  ///< one row each: how the values travel
  bool on_gpu = false;
  bool async = false;
  bool into = false;  ///< an allgather, alltoall or reducescatter writes to memory that exists
  bool persistent = false;  ///< rows of their own for persistent operations, which need `into`
                            ///< where a result is shared out
  bool sweep = false;       ///< all collectives and sizes against MPI; see modes.h
  bool grouped = false;     ///< an allreduce is submitted as a group, a model's gradients as one
  int rounds = 11;          ///< measured; each takes all subjects in turn
  int warmup = 2;           ///< rounds before them
  int repeats = 0;  ///< operations in a row within a round; 0: 200 below 64 KiB, otherwise 1
  bool check = false;
  std::string json;   ///< a file; empty: none
  std::string model;  ///< empty: sizes from min_bytes to max_bytes
  Backend backend = Backend::Auto;
  bool versus_mpi = false;
  bool versus_packed = false;  ///< a model's gradients in one MPI_Allreduce, copied in and out
  bool versus_memcpy = false;
  bool versus_line = false;  ///< plain messages between hosts; see rivals.h
  int burst = 0;             ///< above 0: so many allreduces at once; see modes.h
  bool routes = false;       ///< nothing but the ways of such a world; see modes.h
  int ranks = 0;             ///< of these; 0: as many as were started, or as there are cores
  int hosts = 1;
  int cores = 0;            ///< of a host; 0: of this one
  double idle_seconds = 0;  ///< above 0: nothing but that
};

inline bool has_rivals(const Options& options) {
  return options.versus_mpi || options.versus_packed || options.versus_memcpy ||
         options.versus_line;
}

struct CommandLine {
  std::string help;  ///< not empty: print it and end
  Options options;
};

CommandLine parse_command_line(int argc, char** argv);

/// Returns the sizes from `min_bytes` to `max_bytes` by `factor`.
std::vector<std::uint64_t> sizes_of(const Options& options);

std::string name_of(Collective collective);
std::string name_of(Backend backend);
/// "none", "fp16", "bf16"
std::string name_of(hvd::Compression wire);

}  // namespace bench
