#include "hvd/launch/launch.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <string_view>
#include <utility>
#include <vector>

#include "hvd/base/text.h"
#include "hvd/errors.h"

namespace hvd {

namespace {

constexpr std::string_view kAllowed =
    "tcp://HOST:PORT or file:///PATH (the ranks meet there), mpi (through MPI), or alone (a world "
    "of one)";
constexpr int kMostPort = 65535;
constexpr int kPortsTried = 16;
constexpr int kPortsBehind = 1009;  // those next to MASTER_PORT are other jobs' MASTER_PORT

/// The variables in which a launcher says this rank's numbers; it may have none for some.
struct Names {
  std::string_view launcher, rank, size;
};
constexpr Names kOpenMpi{"Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"};
constexpr Names kSlurm{"Slurm's srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"};
constexpr Names kTorch{"torchrun, or the like,", "RANK", "WORLD_SIZE"};
// Launchers that may belong to another MPI, or to none. Where one says how many ranks there are it
// comes before those that do not.
constexpr std::array<Names, 7> kOthers{
    {{"mpiexec of MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE"},
     {"MVAPICH's launcher", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"},
     {"flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"},
     {"jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"},
     {"horovodrun, or the like,", "HOROVOD_RANK", "HOROVOD_SIZE"},
     {"mpiexec of PALS", "PALS_RANKID", ""},
     {"a launcher that speaks PMIx", "PMIX_RANK", ""}}};

std::optional<int> number(const std::string& text) {
  int value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end) return std::nullopt;
  return value;
}

struct Announcement {
  std::string launcher, said;
  LauncherHints hints;
  /// Returns whether there are, or may be, several ranks.
  [[nodiscard]] bool is_of_several() const {
    return hints.size ? *hints.size > 1 : hints.rank.has_value();
  }
};

Announcement read(const Environment& environment, const Names& names) {
  Announcement found{std::string(names.launcher), {}, {}};
  const auto look = [&](std::string_view name) -> std::optional<int> {
    const auto text = name.empty() ? std::nullopt : environment(std::string(name));
    const auto value = text ? number(*text) : std::nullopt;
    if (value) found.said += formatted("{}{}={}", found.said.empty() ? "" : ", ", name, *value);
    return value;
  };
  found.hints.rank = look(names.rank);
  found.hints.size = look(names.size);
  return found;
}

/// The launcher of MPI that this library is at home with. Under `salloc` + `mpirun` Slurm's step
/// variables of remote ranks are wrong; they count only where Slurm itself started the step.
Announcement read_mpi_launcher(const Environment& environment) {
  Announcement found = read(environment, kOpenMpi);
  if (!found.hints.rank && environment("SLURM_STEP_ID")) found = read(environment, kSlurm);
  return found;
}

/// RANK and WORLD_SIZE. Throws InvalidArgument where they cannot be a rank's. A RANK that is no
/// number may be somebody's rank in an army where nothing else speaks of ranks, and RANK=-1
/// WORLD_SIZE=1 is how some frameworks write that nothing is distributed.
Announcement read_torch(const Environment& environment) {
  Announcement torch = read(environment, kTorch);
  const bool is_no_rank = !environment("WORLD_SIZE") && !torch.hints.rank;
  if (is_no_rank || (torch.hints.rank == -1 && torch.hints.size.value_or(1) == 1))
    return {torch.launcher, {}, {}};
  const auto text = [&](const char* name) {
    return formatted("{}='{}'", name, environment(name).value_or(""));
  };
  const bool wrong =
      (environment("RANK") && (!torch.hints.rank || *torch.hints.rank < 0)) ||
      (environment("WORLD_SIZE") && (!torch.hints.size || *torch.hints.size < 1)) ||
      (torch.hints.rank && torch.hints.size && *torch.hints.rank >= *torch.hints.size);
  if (!wrong) return torch;
  throw InvalidArgument(
      formatted("{}, {}: not allowed; WORLD_SIZE must be the number of ranks, and RANK this one's, "
                "from 0 to WORLD_SIZE - 1",
                text("RANK"), text("WORLD_SIZE")));
}

bool is_complete(const Announcement& torch) { return torch.hints.rank && torch.hints.size; }
bool is_of_slurm(const Announcement& found) { return found.launcher == kSlurm.launcher; }

/// Returns whether MPI can find the others by what srun has given this process. Without PMIx and
/// PMI, as srun --mpi=none starts it, Open MPI does not even come up alone: MPI_Init ends the
/// process.
bool can_start_mpi(const Environment& environment, const Announcement& found) {
  if (!is_of_slurm(found)) return true;
  constexpr std::array kManagers{"PMIX_RANK", "PMIX_NAMESPACE", "PMI_RANK", "PMI_SIZE",
                                 "PMI_FD",    "PMI_PORT",       "PMI_JOBID"};
  return std::any_of(kManagers.begin(), kManagers.end(),
                     [&](const char* name) { return environment(name).has_value(); });
}

/// An IPv6 address may stand in brackets, as before a port.
bool is_bracketed(const std::string& host) {
  return host.size() > 2 && host.front() == '[' && host.back() == ']';
}

/// `text` is what follows "tcp://": HOST:PORT, an IPv6 address in brackets.
StoreAddress read_tcp(const std::string& text) {
  const auto colon = text.rfind(':');
  StoreAddress address;
  const auto port = colon == std::string::npos ? std::nullopt : number(text.substr(colon + 1));
  if (port) address.host = text.substr(0, colon);
  if (is_bracketed(address.host)) address.host = address.host.substr(1, address.host.size() - 2);
  if (!port || *port < 1 || *port > kMostPort || address.host.empty() ||
      address.host.find('/') != std::string::npos)
    throw InvalidArgument(
        formatted("HVD_INIT: 'tcp://{}' is not allowed; after tcp:// come the host of rank 0 and a "
                  "free port of it, 1 to {}",
                  text, kMostPort));
  address.first_port = *port;
  return address;
}

/// Notes what tells the job from others; `port` is the one that the user has named.
void name_job(StoreAddress& address, int port, const Environment& environment) {
  // The processes of an attempt that torchrun has given up may still be there.
  address.job = formatted("{} {} {}", port, environment("TORCHELASTIC_RUN_ID").value_or(""),
                          environment("TORCHELASTIC_RESTART_COUNT").value_or(""));
  address.token = environment("HVD_INIT_TOKEN").value_or("");
  address.may_be_named_later = environment("KUBERNETES_SERVICE_HOST").has_value();
}

/// In a pod of an indexed job that says WORLD_SIZE, and no RANK, that is the job's index. Without
/// WORLD_SIZE the pods may be as many worlds of one.
Environment with_index_of_job(const Environment& environment) {
  const bool is_rank =
      environment("WORLD_SIZE") && !environment("RANK") && environment("JOB_COMPLETION_INDEX");
  return [&environment, is_rank](const std::string& name) {
    return environment(is_rank && name == "RANK" ? "JOB_COMPLETION_INDEX" : name);
  };
}

/// Returns where MASTER_ADDR and MASTER_PORT say that ranks meet; none if they do not say. The port
/// itself belongs to torchrun, or to the program's own c10d: rank 0 takes one far behind it.
std::optional<StoreAddress> read_master(const Environment& environment) {
  const auto host = environment("MASTER_ADDR");
  const auto text = environment("MASTER_PORT");
  if (!host || !text) return std::nullopt;
  const auto port = number(*text);
  if (!port || *port < 1 || *port > kMostPort)
    throw InvalidArgument(formatted("MASTER_PORT: '{}' is not allowed; it must be a port, 1 to {}",
                                    *text, kMostPort));
  StoreAddress address;
  address.host = is_bracketed(*host) ? host->substr(1, host->size() - 2) : *host;
  address.ports = kPortsTried;
  const int behind = kPortsBehind + kPortsTried;
  address.first_port = *port + behind <= kMostPort ? *port + kPortsBehind : *port - behind;
  name_job(address, *port, environment);
  return address;
}

Launch launch_by(Launch::Way way, Announcement by) {
  Launch launch;
  launch.way = way;
  launch.hints = by.hints;
  launch.launcher = std::move(by.launcher);
  launch.said = std::move(by.said);
  return launch;
}

/// A world of one needs nobody to meet; whether the process was launched is no matter then.
Launch launch_in_store(Announcement by, StoreAddress address) {
  if (*by.hints.size == 1) return {};
  Launch launch = launch_by(Launch::Way::Store, std::move(by));
  launch.store = std::move(address);
  return launch;
}

/// The first announcement of several ranks by a launcher that may be of another MPI. One that
/// leaves their number open counts only where none says that there is one.
std::optional<Announcement> read_others(const Environment& environment, bool is_one = false) {
  for (const Names& names : kOthers) {
    Announcement found = read(environment, names);
    if (found.is_of_several() && (found.hints.size || !is_one)) return found;
    is_one = is_one || found.hints.size == 1;
  }
  return std::nullopt;
}

/// The launcher other than torchrun whose numbers count: that of MPI, or another one that a step of
/// Slurm's has started, as the mpiexec of MPICH starts its helpers by srun, one for each host.
Announcement read_launcher(const Environment& environment) {
  Announcement mpi = read_mpi_launcher(environment);
  if (mpi.hints.rank && !is_of_slurm(mpi)) return mpi;
  auto other = read_others(environment, mpi.hints.size == 1);
  if (!other) return mpi;
  return !mpi.hints.rank || other->hints.size.value_or(0) > mpi.hints.size.value_or(1)
             ? std::move(*other)
             : mpi;
}

/// The numbers for ranks that meet where HVD_INIT says. Any launcher's are as good, such as those
/// of srun --mpi=none or of another MPI's mpiexec; a WORLD_SIZE of 1, which containers export, does
/// not hide them.
Announcement read_for_store(const Environment& environment) {
  Announcement torch = read_torch(environment);
  if (is_complete(torch) && *torch.hints.size > 1) return torch;
  Announcement launcher = read_launcher(environment);
  const bool is_better = is_complete(launcher) && (*launcher.hints.size > 1 || !is_complete(torch));
  return is_better ? launcher : torch;
}

/// Follows HVD_INIT.
Launch read_forced(const Environment& environment, const std::string& wanted) {
  const Announcement mpi = read_mpi_launcher(environment);
  Launch launch;
  if (wanted == "alone") {
    launch.hints = {.rank = 0, .size = 1};
  } else if (wanted == "mpi") {
    launch =
        launch_by(Launch::Way::Mpi, mpi.hints.rank ? mpi : read_others(environment).value_or(mpi));
    launch.may_be_alone = launch.hints.size ? *launch.hints.size == 1 : !launch.hints.rank;
  } else {
    StoreAddress address;
    if (wanted.starts_with("tcp://")) {
      address = read_tcp(wanted.substr(6));
    } else if (wanted.starts_with("file:///")) {
      address.path = wanted.substr(7);
    } else {
      throw InvalidArgument(
          formatted("HVD_INIT: '{}' is not allowed; it must be {}", wanted, kAllowed));
    }
    name_job(address, address.first_port, environment);
    Announcement by = read_for_store(environment);
    if (!is_complete(by))
      throw InvalidArgument(
          formatted("HVD_INIT={}: RANK and WORLD_SIZE are missing; each rank needs them to be its "
                    "number, from 0, and the number of ranks",
                    wanted));
    launch = launch_in_store(std::move(by), std::move(address));
  }
  launch.is_forced = true;
  return launch;
}

/// The sentence for RANK and WORLD_SIZE that announce several ranks but no meeting place.
[[noreturn]] void refuse_torch(const Environment& environment, const Announcement& torch) {
  std::vector<std::string> missing;
  for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
    if (!environment(name)) missing.emplace_back(name);
  throw InvalidArgument(
      formatted("hvd::init(): {} says that there are several ranks, but {} {} missing: set all of "
                "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun does, or RANK, "
                "WORLD_SIZE and HVD_INIT=tcp://HOST:PORT, or start the ranks by mpirun; unset {}, "
                "or set HVD_INIT=alone, if this is meant to be a world of one",
                torch.said, joined(missing, ", "), missing.size() == 1 ? "is" : "are",
                torch.hints.size ? "WORLD_SIZE" : "RANK"));
}

/// Returns whether RANK and WORLD_SIZE were set by a launcher that runs below the one of MPI: by
/// torchrun, or on each of several hosts of a Slurm step.
bool is_inner(const Environment& environment, const Announcement& torch, const Announcement& mpi) {
  if (!is_complete(torch) || *torch.hints.size == 1) return false;
  if (environment("TORCHELASTIC_RUN_ID")) return true;
  return is_of_slurm(mpi) && mpi.hints.size.value_or(1) < *torch.hints.size;
}

/// Through MPI, as a launcher that may be of another MPI has started it.
Launch launch_by_other(const Environment& environment, Announcement other) {
  Launch launch = launch_by(Launch::Way::Mpi, std::move(other));
  const bool has_server = environment("PMIX_SERVER_URI2") || environment("PMIX_SERVER_URI21") ||
                          environment("PMIX_SERVER_URI3") || environment("PMIX_SERVER_URI4") ||
                          environment("PMIX_SERVER_URI41");
  launch.may_be_alone = !launch.hints.size && launch.hints.rank == 0 && has_server;
  return launch;
}

/// Through MPI, as its own launcher has started it; `torch` is what RANK and WORLD_SIZE say.
Launch launch_by_mpi(const Environment& environment, Announcement mpi, const Announcement& torch) {
  const bool can_start = can_start_mpi(environment, mpi);
  Launch launch = launch_by(Launch::Way::Mpi, std::move(mpi));
  launch.can_start_mpi = can_start;
  launch.may_be_alone = launch.hints.size.value_or(1) == 1;
  const bool agrees = is_complete(torch) && torch.hints.rank == launch.hints.rank &&
                      torch.hints.size == launch.hints.size;
  if (agrees && !launch.may_be_alone) launch.store = read_master(environment);
  return launch;
}

/// Returns whether a launcher has started this process. A rank that hvdrun has started alone
/// counts: it has no number, but HVD_INIT.
bool is_launched() {
  try {
    const Launch launch = read_launch();
    return launch.is_forced || launch.hints.rank.has_value();
  } catch (const InvalidArgument&) {
    return true;  // a rank whose variables are wrong; hvd::init() says so
  }
}

[[maybe_unused]] const bool before_main = (print_whole_lines(), true);

}  // namespace

void print_whole_lines() noexcept {
  static const bool once = is_launched() && std::setvbuf(stdout, nullptr, _IOLBF, 0) == 0;
  static_cast<void>(once);
}

std::string StoreAddress::text() const {
  if (!path.empty()) return path;
  const std::string name = host.find(':') == std::string::npos ? host : formatted("[{}]", host);
  return ports == 1 ? formatted("{}:{}", name, first_port)
                    : formatted("{}:{}-{}", name, first_port, first_port + ports - 1);
}

Launch read_launch(const Environment& said) {
  const Environment environment = with_index_of_job(said);
  if (const auto wanted = environment("HVD_INIT")) return read_forced(environment, *wanted);
  Announcement mpi = read_mpi_launcher(environment);
  std::string outer;
  if (mpi.hints.rank) {
    // these may be anything: mpirun passes on what its caller has
    Announcement torch = read(environment, kTorch);
    if (!is_inner(environment, torch, mpi)) {
      Announcement counts = read_launcher(environment);
      if (counts.launcher != mpi.launcher) return launch_by_other(environment, std::move(counts));
      // A step of one task, such as the shell that salloc opens: MPI has nothing to add, and may
      // not be able to start there.
      if (is_of_slurm(mpi) && mpi.hints.size == 1) return {};
      return launch_by_mpi(environment, std::move(mpi), torch);
    }
    if (mpi.hints.size.value_or(1) > 1 && !is_of_slurm(mpi))
      outer = formatted("{} ({})", mpi.launcher, mpi.said);
  }
  auto other = read_others(environment);
  Announcement torch = read_torch(environment);
  if (is_complete(torch) && (*torch.hints.size > 1 || !other)) {
    auto address = read_master(environment);
    if (address || *torch.hints.size == 1) {
      Launch launch =
          launch_in_store(std::move(torch), std::move(address).value_or(StoreAddress{}));
      launch.outer = std::move(outer);
      return launch;
    }
  }
  if (other) return launch_by_other(environment, std::move(*other));
  if (torch.hints.size.value_or(1) > 1 || torch.hints.rank.value_or(0) > 0)
    refuse_torch(environment, torch);
  return {};
}

Launch read_launch() { return read_launch(detail::variable_of_environment); }

LauncherHints launcher_hints() {
  try {
    return read_launch().hints;
  } catch (const InvalidArgument&) {
    return {};  // hvd::init() says what is wrong
  }
}

std::string no_process_manager(const Launch& launch) {
  return formatted(
      "the launcher started {} ranks, but MPI sees none of them: {} say that {} started this "
      "process as one of them, and it has given it neither PMIx nor PMI, by which MPI finds the "
      "others: start it by srun --mpi=pmix, or by mpirun; or let the ranks meet without MPI, "
      "by HVD_INIT=tcp://HOST:PORT with the host of rank 0 and a free port of it; or set "
      "HVD_INIT=alone if each process is to be a world "
      "of its own, HVD_INIT=mpi to start MPI nevertheless",
      launch.hints.size ? formatted("{}", *launch.hints.size) : std::string("several"), launch.said,
      launch.launcher);
}

std::string no_mpi(const Launch& launch, const std::string& problem) {
  std::string who = "HVD_INIT=mpi is set";
  if (launch.way != Launch::Way::Mpi) {
    who = "the program has started MPI itself";
  } else if (!launch.said.empty()) {
    who = formatted("{} say that {} started this process", launch.said, launch.launcher);
  }
  return formatted(
      "hvd::init(): {}, so the ranks should meet through MPI, but {}; start them by the launcher "
      "of the MPI that hvd was built with, with its libraries installed or on LD_LIBRARY_PATH; or "
      "without MPI, by hvdrun or torchrun on one host, on several by HVD_INIT=tcp://HOST:PORT with "
      "the host of rank 0 and a free port of it; or set HVD_INIT=alone if this is meant to be a "
      "world of one",
      who, problem);
}

std::string wrong_world(const Launch& launch, int size, const std::string& library) {
  const std::string ranks =
      launch.hints.size ? formatted("{} ranks", *launch.hints.size) : std::string("several ranks");
  return formatted(
      "the launcher started {}, but MPI sees {}: {} say that {} started this process as one of {}, "
      "and the MPI that hvd was built with ({}) {}. This program was built for another MPI than "
      "that of its launcher: start it with the mpirun that belongs to the MPI it was built with{}; "
      "or let the ranks meet without MPI, by HVD_INIT=tcp://HOST:PORT with the host of rank 0 and "
      "a free port of it; or set "
      "HVD_INIT=alone if each process is to be a world of its own",
      ranks, size, launch.said, launch.launcher, ranks, library,
      size == 1 ? "came up as a world of one" : "disagrees",
      launch.launcher == kSlurm.launcher ? " (under srun: srun --mpi=pmix)" : "");
}

}  // namespace hvd
