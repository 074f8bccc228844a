#pragma once
/// read_launch() decides from the environment how this process finds the other ranks, before
/// anything is started: through MPI, through a store (ops/rendezvous), or not at all. It is a pure
/// function of the variables, for the caller's thread, and owns nothing. It throws InvalidArgument
/// for variables that contradict themselves or are incomplete, and says what to do.

#include <functional>
#include <optional>
#include <string>

#include "hvd/config.h"

namespace hvd {

/// Returns the value of a variable; empty where it is unset or empty.
using Environment = std::function<std::optional<std::string>(const std::string& name)>;

/// The place where ranks meet without MPI.
struct StoreAddress {
  std::string host;    ///< a name or an address; empty where it is a file
  int first_port = 0;  ///< of those that rank 0 may listen at: it takes the first that is free
  int ports = 1;       ///< how many there are
  std::string path;    ///< of the file in which rank 0 says where it listens
  std::string job;     ///< what tells this job from others on the same host; no secret
  std::string token;   ///< HVD_INIT_TOKEN: the job's secret; empty where there is none
  /// In a pod of Kubernetes, where `host` may be a pod that is not there yet: until then nobody
  /// knows its name.
  bool may_be_named_later = false;

  /// Returns the address as a message has it.
  [[nodiscard]] std::string text() const;
};

/// The way in which this process was started, as far as the environment tells.
struct Launch {
  enum class Way { Alone, Mpi, Store };
  Way way = Way::Alone;
  LauncherHints hints;     ///< this rank's numbers, as far as they are told
  std::string launcher;    ///< who has told them
  std::string said;        ///< the variables that tell, "PMI_RANK=2, PMI_SIZE=4"
  bool is_forced = false;  ///< the user has said so by HVD_INIT
  /// With Way::Mpi, whether a world of one is to be believed: nothing contradicts it.
  bool may_be_alone = true;
  /// With Way::Mpi, whether MPI can find others. Otherwise MPI_Init ends the process, or is alone.
  bool can_start_mpi = true;
  /// With Way::Store, and with Way::Mpi where the ranks can meet there in case MPI comes up alone.
  std::optional<StoreAddress> store;
  /// With Way::Store, a launcher of several ranks within whose job torchrun has said something
  /// else; empty if there is none.
  std::string outer;
};

/// Makes standard output line-buffered, once, if a launcher has started this process as a rank:
/// what a rank prints is to be heard line by line. The C library keeps back what goes to a pipe
/// until it has 4 KiB or the process ends in order, so an exception that nobody catches, or a
/// signal, would take the last lines of a rank along, and those of several ranks would be torn. The
/// library calls it before main(), so that what the program itself says of its buffers counts. Any
/// thread.
void print_whole_lines() noexcept;

Launch read_launch(const Environment& environment);
/// Returns that of this process.
Launch read_launch();

/// Returns the sentence for a process whose launcher has announced several ranks where MPI,
/// `library` by its own name, sees `size`.
std::string wrong_world(const Launch& launch, int size, const std::string& library);

/// Returns the sentence for a process that should meet the others through MPI, which cannot be
/// used: `problem` says why.
std::string no_mpi(const Launch& launch, const std::string& problem);

/// Returns the sentence for a process that a launcher of several ranks has given nothing by which
/// MPI could find the others.
std::string no_process_manager(const Launch& launch);

}  // namespace hvd
