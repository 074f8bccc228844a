// How a process was started, as its variables tell: each launcher's, several at once, and those
// that are incomplete.
#include <doctest/doctest.h>

#include <map>
#include <string>

#include "hvd/errors.h"
#include "hvd/launch/launch.h"

namespace hvd::test {
namespace {

using Way = Launch::Way;
using Variables = std::map<std::string, std::string>;

Launch read(const Variables& variables) {
  return read_launch([&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    if (found == variables.end() || found->second.empty()) return std::nullopt;
    return found->second;
  });
}

std::string refusal(const Variables& variables) {
  try {
    read(variables);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

bool says(const std::string& text, const std::string& words) {
  return text.find(words) != std::string::npos;
}

Variables operator+(Variables all, const Variables& more) {
  for (const auto& [name, value] : more) all[name] = value;
  return all;
}

const Variables kMaster{{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "29500"}};
Variables torch(int rank, int size) {
  return kMaster + Variables{{"RANK", std::to_string(rank)},
                             {"WORLD_SIZE", std::to_string(size)},
                             {"LOCAL_RANK", std::to_string(rank)}};
}
Variables torchrun(int rank, int size) {
  return torch(rank, size) + Variables{{"TORCHELASTIC_RUN_ID", "none"}};
}
Variables open_mpi(int rank, int size) {
  return {{"OMPI_COMM_WORLD_RANK", std::to_string(rank)},
          {"OMPI_COMM_WORLD_SIZE", std::to_string(size)},
          {"PMIX_RANK", std::to_string(rank)}};
}
Variables slurm(int rank, int size) {
  return {{"SLURM_STEP_ID", "0"},
          {"SLURM_PROCID", std::to_string(rank)},
          {"SLURM_STEP_NUM_TASKS", std::to_string(size)},
          {"SLURM_NTASKS", "8"}};
}
Variables hydra(int rank, int size) {
  return {{"PMI_RANK", std::to_string(rank)}, {"PMI_SIZE", std::to_string(size)}};
}
Variables horovodrun(int rank, int size) {
  return {{"HOROVOD_RANK", std::to_string(rank)}, {"HOROVOD_SIZE", std::to_string(size)}};
}

}  // namespace

TEST_CASE("launch: nobody has started ranks") {
  CHECK(read({}).way == Way::Alone);
  CHECK_FALSE(read({}).hints.rank);
  // A batch script's own variables are no step's; a world of one is one, whoever says so.
  CHECK(read({{"SLURM_NTASKS", "4"}, {"SLURM_PROCID", "0"}, {"SLURM_JOB_ID", "7"}}).way ==
        Way::Alone);
  CHECK(read({{"WORLD_SIZE", "1"}}).way == Way::Alone);
  CHECK(read({{"RANK", "0"}}).way == Way::Alone);
  CHECK(read({{"RANK", ""}, {"WORLD_SIZE", ""}}).way == Way::Alone);
  CHECK(read({{"RANK", "sergeant"}}).way == Way::Alone);
  CHECK(read({{"RANK", "-1"}}).way == Way::Alone);
  CHECK(read({{"RANK", "-1"}, {"WORLD_SIZE", "1"}}).way == Way::Alone);
  CHECK(says(refusal({{"RANK", "sergeant"}, {"WORLD_SIZE", "1"}}), "RANK='sergeant'"));
  CHECK(read(torch(0, 1)).way == Way::Alone);
  CHECK(read(torchrun(0, 1)).way == Way::Alone);
  CHECK_FALSE(read(torchrun(0, 1)).hints.rank);  // spawn() may start ranks here
  CHECK(read(hydra(0, 1)).way == Way::Alone);
  CHECK(read(hydra(0, 1) + Variables{{"PMIX_RANK", "0"}}).way == Way::Alone);
  CHECK(read(horovodrun(0, 1)).way == Way::Alone);
  CHECK(read({{"PMI_RANK", "x"}}).way == Way::Alone);
}

TEST_CASE("launch: MPI's launchers") {
  for (const auto& variables : {open_mpi(2, 4), slurm(2, 4)}) {
    const Launch launch = read(variables);
    CHECK(launch.way == Way::Mpi);
    CHECK(launch.hints.rank == 2);
    CHECK(launch.hints.size == 4);
    CHECK_FALSE(launch.may_be_alone);
    CHECK_FALSE(launch.store);
  }
  CHECK(read(open_mpi(0, 1)).way == Way::Mpi);
  CHECK(read(open_mpi(0, 1)).may_be_alone);
  CHECK(read(open_mpi(1, 2) + slurm(0, 1)).hints.size == 2);
  CHECK(read(open_mpi(0, 1) + hydra(0, 4)).hints.size == 1);
  CHECK(read(open_mpi(2, 4) + horovodrun(1, 2)).hints.size == 4);
}

TEST_CASE("launch: steps of Slurm's, which MPI can start in or not") {
  // The shell of srun --pty or salloc, and one task: nothing that MPI would have to say.
  for (const auto& variables : {slurm(0, 1), slurm(0, 1) + Variables{{"PMIX_RANK", "0"}},
                                slurm(0, 1) + Variables{{"WORLD_SIZE", "8"}}}) {
    CHECK(read(variables).way == Way::Alone);
    CHECK_FALSE(read(variables).hints.rank);  // spawn() may start ranks here
  }
  const Launch bare = read(slurm(1, 4));
  CHECK(bare.way == Way::Mpi);
  CHECK_FALSE(bare.can_start_mpi);
  CHECK(says(no_process_manager(bare),
             "the launcher started 4 ranks, but MPI sees none of them: SLURM_PROCID=1, "
             "SLURM_STEP_NUM_TASKS=4"));
  CHECK(says(no_process_manager(bare), "--mpi=pmix"));
  CHECK_FALSE(read(slurm(1, 4) + torch(1, 4)).can_start_mpi);  // its store is where they meet
  for (const char* name : {"PMIX_RANK", "PMI_RANK", "PMI_FD"})
    CHECK(read(slurm(1, 4) + Variables{{name, "1"}}).can_start_mpi);
  CHECK(read(slurm(1, 4) + Variables{{"HVD_INIT", "mpi"}}).can_start_mpi);
  CHECK(read(open_mpi(1, 4) + slurm(0, 2)).can_start_mpi);  // salloc + mpirun
  // The mpiexec of MPICH starts a helper on each host by srun, which starts the ranks.
  CHECK(read(slurm(0, 1) + hydra(3, 4)).hints.rank == 3);
  CHECK_FALSE(read(slurm(0, 1) + hydra(3, 4)).may_be_alone);
  CHECK(read(slurm(0, 2) + hydra(3, 4)).hints.rank == 3);
  CHECK(read(slurm(2, 4) + hydra(2, 4)).launcher == "Slurm's srun");  // srun --mpi=pmi2
}

TEST_CASE("launch: launchers of another MPI, which may or may not start this one") {
  const std::vector<Variables> all{
      hydra(1, 4),
      {{"MV2_COMM_WORLD_RANK", "1"}, {"MV2_COMM_WORLD_SIZE", "4"}},
      {{"FLUX_TASK_RANK", "1"}, {"FLUX_JOB_SIZE", "4"}},
      {{"JSM_NAMESPACE_RANK", "1"}, {"JSM_NAMESPACE_SIZE", "4"}},
      horovodrun(1, 4),
      slurm(0, 1) + horovodrun(1, 4),
      {{"PMIX_RANK", "1"}},
      {{"PMIX_RANK", "1"}, {"PMIX_SERVER_URI2", "there"}},
      {{"PALS_RANKID", "1"}},
      hydra(1, 4) + Variables{{"RANK", "0"}, {"WORLD_SIZE", "1"}},
  };
  for (const auto& variables : all) {
    const Launch launch = read(variables);
    CAPTURE(launch.said);
    CHECK(launch.way == Way::Mpi);
    CHECK(launch.hints.rank == 1);
    CHECK_FALSE(launch.may_be_alone);
    const std::string text = wrong_world(launch, 1, "Some MPI");
    CHECK(says(text, launch.said));
    CHECK(says(text, launch.hints.size ? "the launcher started 4 ranks, but MPI sees 1"
                                       : "the launcher started several ranks, but MPI sees 1"));
    CHECK(says(text, "Some MPI"));
    CHECK(says(text, "HVD_INIT=tcp://"));
  }
  // Rank 0 of a job of which nothing tells the size: it depends on whether PMIx answers.
  CHECK_FALSE(read({{"PMIX_RANK", "0"}}).may_be_alone);
  CHECK(read({{"PMIX_RANK", "0"}, {"PMIX_SERVER_URI2", "there"}}).may_be_alone);
}

TEST_CASE("launch: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT") {
  const Launch launch = read(torchrun(1, 3));
  REQUIRE(launch.way == Way::Store);
  CHECK(launch.hints.rank == 1);
  CHECK(launch.hints.size == 3);
  REQUIRE(launch.store);
  CHECK(launch.store->host == "127.0.0.1");
  // the port itself is torchrun's, those next to it other jobs'
  CHECK(launch.store->first_port == 30509);
  CHECK(launch.store->ports == 16);
  CHECK(launch.store->text() == "127.0.0.1:30509-30524");
  CHECK(read(torchrun(1, 3) + Variables{{"MASTER_PORT", "65535"}}).store->first_port == 64510);
  // Another attempt, another port or another run is another job; a token is kept apart.
  const auto job = [](const Variables& more) { return read(torchrun(1, 3) + more).store->job; };
  CHECK(job({}) == read(torchrun(0, 3)).store->job);
  CHECK(job({}) != job({{"TORCHELASTIC_RESTART_COUNT", "1"}}));
  CHECK(job({}) != job({{"MASTER_PORT", "29600"}}));
  CHECK(job({}) != job({{"TORCHELASTIC_RUN_ID", "b"}}));
  CHECK(read(torchrun(1, 3) + Variables{{"HVD_INIT_TOKEN", "secret"}}).store->token == "secret");
  CHECK(says(job({{"HVD_INIT_TOKEN", "secret"}}), "secret") == false);
  CHECK(read(torch(1, 3)).way == Way::Store);

  for (const char* address : {"::1", "[::1]"})
    CHECK(read({{"RANK", "0"},
                {"WORLD_SIZE", "2"},
                {"MASTER_ADDR", address},
                {"MASTER_PORT", "29500"}})
              .store->host == "::1");
  for (const char* missing : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    Variables variables = torch(1, 3);
    variables.erase(missing);
    CHECK(says(refusal(variables), std::string(missing) + " is missing"));
  }
  CHECK(says(refusal({{"WORLD_SIZE", "2"}}), "RANK, MASTER_ADDR, MASTER_PORT are missing"));
  for (const Variables& wrong : {Variables{{"RANK", "3"}},
                                 {{"RANK", "-1"}},
                                 {{"RANK", "one"}},
                                 {{"WORLD_SIZE", "0"}},
                                 {{"WORLD_SIZE", "many"}}})
    CHECK(says(refusal(torch(1, 3) + wrong), "not allowed; WORLD_SIZE must be"));
  for (const char* port : {"0", "65536", "-1", "http"})
    CHECK(says(refusal(torch(1, 3) + Variables{{"MASTER_PORT", port}}), "MASTER_PORT: '"));
}

TEST_CASE("launch: pods of an indexed job") {
  const Variables pod{{"JOB_COMPLETION_INDEX", "2"}, {"KUBERNETES_SERVICE_HOST", "10.96.0.1"}};
  const Launch launch = read(pod + kMaster + Variables{{"WORLD_SIZE", "4"}});
  CHECK(launch.way == Way::Store);
  CHECK(launch.hints.rank == 2);
  CHECK(launch.hints.size == 4);
  REQUIRE(launch.store);
  CHECK(launch.store->may_be_named_later);
  CHECK(read(pod + torch(1, 4)).hints.rank == 1);  // what is said comes before the index
  CHECK(read(pod).way == Way::Alone);              // as many worlds of one
  CHECK(says(refusal(pod + Variables{{"WORLD_SIZE", "4"}}), "MASTER_ADDR"));
  CHECK(says(refusal(pod + kMaster + Variables{{"WORLD_SIZE", "2"}}), "not allowed"));
  const Launch by_mpi = read(pod + open_mpi(1, 2));  // in a pod whose program is mpirun
  CHECK(by_mpi.way == Way::Mpi);
  CHECK(by_mpi.hints.rank == 1);
  REQUIRE(read(torch(0, 2)).store);
  CHECK_FALSE(read(torch(0, 2)).store->may_be_named_later);
}

TEST_CASE("launch: several launchers at once") {
  // One torchrun for each host, started by srun or mpirun: the inner one counts.
  CHECK(read(slurm(0, 2) + torchrun(3, 8)).way == Way::Store);
  CHECK(read(open_mpi(0, 2) + torchrun(3, 8)).way == Way::Store);
  CHECK(read(slurm(1, 2) + torch(5, 8)).hints.rank == 5);
  // What a batch script exports for all is no launcher's.
  CHECK(read(open_mpi(1, 2) + kMaster + Variables{{"WORLD_SIZE", "8"}}).way == Way::Mpi);
  CHECK(read(open_mpi(1, 2) + torch(0, 1)).hints.size == 2);
  CHECK(read(slurm(1, 4) + torch(0, 1)).hints.size == 4);
  CHECK(read(slurm(1, 4) + torchrun(0, 1)).hints.size == 4);
  CHECK(read(open_mpi(1, 2) + torch(3, 8)).hints.size == 2);
  CHECK(read(open_mpi(1, 2) + Variables{{"RANK", "nonsense"}}).hints.rank == 1);
  CHECK(says(read(open_mpi(1, 2) + torchrun(0, 3)).outer,
             "OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=2"));
  CHECK(read(open_mpi(0, 1) + torchrun(0, 3)).outer.empty());
  CHECK(read(slurm(1, 2) + torchrun(1, 4)).outer.empty());  // one torchrun on each of two hosts
  // srun with the same numbers in RANK and WORLD_SIZE: MPI, and the store where MPI comes up alone.
  const Launch both = read(slurm(1, 4) + torch(1, 4));
  CHECK(both.way == Way::Mpi);
  CHECK(both.store);
  CHECK_FALSE(read(slurm(1, 4) + torch(2, 4)).store);
  CHECK(read(hydra(1, 4) + torch(1, 4)).way == Way::Store);
}

TEST_CASE("launch: HVD_INIT") {
  const auto with = [](const char* value, const Variables& more = {}) {
    return more + Variables{{"HVD_INIT", value}};
  };
  const Launch tcp = read(with("tcp://host:1234", {{"RANK", "1"}, {"WORLD_SIZE", "3"}}));
  REQUIRE(tcp.way == Way::Store);
  CHECK(tcp.is_forced);
  CHECK(tcp.store->host == "host");
  CHECK(tcp.store->text() == "host:1234");
  CHECK(read(with("tcp://[::1]:1234", torch(0, 2))).store->host == "::1");
  CHECK(read(with("tcp://[::1]:1234", torch(0, 2))).store->text() == "[::1]:1234");
  CHECK(read(with("file:///tmp/a b", torch(0, 2))).store->path == "/tmp/a b");
  CHECK(read(with("tcp://h:1", open_mpi(2, 4))).hints.rank == 2);
  CHECK(read(with("tcp://h:1", slurm(2, 4))).hints.rank == 2);
  CHECK(read(with("tcp://h:1", hydra(2, 4))).hints.rank == 2);
  CHECK(read(with("tcp://h:1", slurm(0, 2) + torch(3, 4))).hints.rank == 3);
  CHECK(read(with("tcp://h:1", torch(0, 1))).way == Way::Alone);
  // A container's RANK=0 WORLD_SIZE=1 does not make worlds of one of a launcher's ranks.
  for (const auto& launcher :
       {open_mpi(2, 4), slurm(2, 4), hydra(2, 4), horovodrun(2, 4), slurm(0, 1) + hydra(2, 4)})
    for (const char* place : {"tcp://h:1", "file:///f"}) {
      const Launch launch = read(with(place, launcher + torch(0, 1)));
      CHECK(launch.way == Way::Store);
      CHECK(launch.hints.rank == 2);
      CHECK(launch.hints.size == 4);
    }
  CHECK(read(with("tcp://h:1", slurm(0, 1) + torch(0, 1))).way == Way::Alone);
  CHECK(read(with("tcp://h:1", torch(3, 8) + hydra(2, 4))).hints.rank == 3);
  CHECK(read(with("alone", open_mpi(2, 4))).way == Way::Alone);
  CHECK(read(with("alone", open_mpi(2, 4))).is_forced);
  CHECK(read(with("mpi", torchrun(1, 2) + open_mpi(1, 4))).way == Way::Mpi);
  CHECK(read(with("mpi")).may_be_alone);
  CHECK_FALSE(read(with("mpi", hydra(1, 2))).may_be_alone);
  CHECK(says(refusal(with("tcp://host:1234")), "RANK and WORLD_SIZE are missing"));
  for (const char* wrong : {"tcp://host", "tcp://:12", "tcp://host:0", "tcp://host:65536",
                            "tcp://host:x", "tcp://", "tcp://a/b:1"})
    CHECK(says(refusal(with(wrong, torch(0, 2))),
               "after tcp:// come the host of rank 0 and a free port"));
  for (const char* wrong : {"udp://host:1", "file://relative", "file:x", "yes", "tcp:"})
    CHECK(says(refusal(with(wrong, torch(0, 2))),
               "is not allowed; it must be tcp://HOST:PORT or file:///PATH"));
}

}  // namespace hvd::test
