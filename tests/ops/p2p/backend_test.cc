/// Broadcast, allgather, process sets and failure across domains, end to end: engines over
/// P2pTransport and P2pBackend.

#include "ops/p2p/backend.h"

#include <doctest/doctest.h>

#include "tests/support/engine_probe.h"
#include "tests/support/mpi_cases.h"

namespace hvd::test {

TEST_CASE("broadcast: every root and size") {
  on_all_layouts([](MpiWorld& world) {
    for (int root = 0; root < mpi_size(); ++root)
      for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{17},
                                      std::size_t{65537}, std::size_t{3000001}}) {
        const Bytes expected = pattern(root, count, DataType::Float32, 5);
        for (const bool in_place : {true, false}) {
          Bytes input = pattern(mpi_rank(), count, DataType::Float32, 5);
          Bytes other(input.size());
          auto& output = in_place ? input : other;
          auto submission = submission_of(OpKind::Broadcast, "b" + std::to_string(count),
                                          input.data(), output.data(), count, DataType::Float32);
          submission.root = root;
          run(world.engine(), std::move(submission));
          CAPTURE(root);
          CAPTURE(count);
          const bool right = output == expected;
          CHECK(right);
        }
      }
  });
}

TEST_CASE("broadcast: many tensors at once") {
  on_all_layouts([](MpiWorld& world) {
    constexpr std::size_t kTensors = 200;
    const int root = mpi_size() - 1;
    std::vector<Bytes> values(kTensors);
    std::vector<std::shared_ptr<HandleState>> pending;
    for (std::size_t tensor = 0; tensor < kTensors; ++tensor) {
      values[tensor] =
          pattern(mpi_rank(), tensor * 31 % 9000, DataType::Int64, static_cast<unsigned>(tensor));
      auto submission =
          submission_of(OpKind::Broadcast, "b" + std::to_string(tensor), values[tensor].data(),
                        values[tensor].data(), tensor * 31 % 9000, DataType::Int64);
      submission.root = root;
      pending.push_back(world.engine().submit(std::move(submission)));
    }
    for (const auto& one : pending) world.engine().wait(*one);
    std::size_t wrong = 0;
    for (std::size_t tensor = 0; tensor < kTensors; ++tensor)
      if (values[tensor] !=
          pattern(root, tensor * 31 % 9000, DataType::Int64, static_cast<unsigned>(tensor)))
        ++wrong;
    CHECK(wrong == 0);
  });
}

TEST_CASE("allgather: other counts on every rank, also none; many at once") {
  on_all_layouts([](MpiWorld& world) {
    constexpr std::size_t kTensors = 60;
    const auto rows_of = [](int rank, std::size_t tensor) {
      const std::size_t base = tensor == 7 ? 400000 : tensor * tensor * 3;
      return (tensor + static_cast<std::size_t>(rank)) % 3 == 0
                 ? 0
                 : base / static_cast<std::size_t>(rank + 1);
    };
    for (int round = 0; round < 2; ++round) {
      std::vector<Bytes> inputs(kTensors);
      std::vector<Bytes> outputs(kTensors);
      std::vector<std::shared_ptr<HandleState>> pending;
      for (std::size_t tensor = 0; tensor < kTensors; ++tensor) {
        const std::size_t rows = rows_of(mpi_rank(), tensor);
        inputs[tensor] =
            pattern(mpi_rank(), rows * 3, DataType::Float32, static_cast<unsigned>(tensor));
        auto submission = submission_of(OpKind::Allgather, "g" + std::to_string(tensor),
                                        inputs[tensor].data(), nullptr, rows, DataType::Float32);
        submission.tensors.front().shape.push_back(3);
        submission.allocate = [&outputs, tensor](std::size_t /*index*/, std::int64_t total) {
          outputs[tensor].resize(static_cast<std::size_t>(total) * 12);
          return static_cast<void*>(outputs[tensor].data());
        };
        pending.push_back(world.engine().submit(std::move(submission)));
      }
      for (const auto& one : pending) world.engine().wait(*one);
      std::size_t wrong = 0;
      for (std::size_t tensor = 0; tensor < kTensors; ++tensor) {
        Bytes expected;
        for (const int rank : everyone()) {
          const Bytes part = pattern(rank, rows_of(rank, tensor) * 3, DataType::Float32,
                                     static_cast<unsigned>(tensor));
          expected.insert(expected.end(), part.begin(), part.end());
        }
        if (outputs[tensor] != expected) ++wrong;
      }
      CHECK(wrong == 0);
    }
  });
}

TEST_CASE("process sets across domains, several under way at once") {
  Config config;
  config.process_sets = some_sets();
  for (const Layout& layout : layouts())
    for (const bool shm : {true, false}) {
      CAPTURE(std::string(layout.name));
      CAPTURE(shm);
      MpiWorld world({layout.domain_of, config, shm});
      for (unsigned round = 0; round < 5; ++round) {
        struct Job {
          std::vector<int> ranks;
          Reducing how;
          std::size_t count;
          unsigned salt;
          int root;
          Bytes reduced_values, broadcast_values, gathered;
          std::vector<std::shared_ptr<HandleState>> pending;
        };
        std::vector<std::unique_ptr<Job>> jobs;
        for (std::size_t set = 0; set <= config.process_sets.size(); ++set)
          for (const std::size_t count : {std::size_t{5}, std::size_t{30000}}) {
            const auto ranks = set == 0 ? everyone() : config.process_sets[set - 1];
            if (!std::binary_search(ranks.begin(), ranks.end(), mpi_rank())) continue;
            auto job = std::make_unique<Job>();
            const auto salt = static_cast<unsigned>(set * 100 + count) + round;
            *job = {ranks,
                    {count == 5 ? DataType::Int32 : DataType::Float32, ReduceOp::Average},
                    count,
                    salt,
                    ranks.back(),
                    {},
                    {},
                    {},
                    {}};
            const Bytes mine = pattern(mpi_rank(), count, job->how.dtype, salt);
            job->reduced_values = job->broadcast_values = mine;
            const std::string name = std::to_string(count);
            const auto submit = [&](Submission submission) {
              submission.process_set = static_cast<int>(set);
              job->pending.push_back(world.engine().submit(std::move(submission)));
            };
            submit(reduction_of("r" + name, job->reduced_values.data(), job->reduced_values.data(),
                                count, job->how));
            auto broadcast =
                submission_of(OpKind::Broadcast, "b" + name, job->broadcast_values.data(),
                              job->broadcast_values.data(), count, job->how.dtype);
            broadcast.root = job->root;
            submit(std::move(broadcast));
            auto gather = submission_of(OpKind::Allgather, "g" + name, nullptr, nullptr, count,
                                        job->how.dtype);
            auto input = std::make_shared<Bytes>(mine);
            gather.tensors.front().input = input->data();
            gather.keep_alive = input;
            gather.allocate = [target = job.get()](std::size_t /*index*/, std::int64_t rows) {
              target->gathered.resize(static_cast<std::size_t>(rows) * 4);
              return static_cast<void*>(target->gathered.data());
            };
            submit(std::move(gather));
            jobs.push_back(std::move(job));
          }
        for (const auto& job : jobs) {
          for (const auto& pending : job->pending) world.engine().wait(*pending);
          const auto inputs = patterns(job->ranks, job->count, job->how.dtype, job->salt);
          const bool sum_right =
              job->reduced_values == reduced(world.topology(), job->ranks, inputs, job->how);
          CHECK(sum_right);
          CHECK(job->broadcast_values == inputs.back());
          Bytes all;
          for (const auto& input : inputs) all.insert(all.end(), input.begin(), input.end());
          CHECK(job->gathered == all);
        }
      }
      static_cast<void>(EngineProbe::drop_repeated(world.engine()));
      // ShmBackend keeps some until the next is staged
      if (!shm) CHECK(world.arena().used_bytes() == 0);
    }
}

TEST_CASE("a failed world drops what it has begun, and the next one works") {
  if (mpi_size() < 2) return;
  for (const Layout& layout : layouts()) {
    {
      CAPTURE(std::string(layout.name));
      MpiWorld world({layout.domain_of, {}, false});
      Bytes values = pattern(mpi_rank(), 3000000, DataType::Float32, 1);
      auto pending =
          world.engine().submit(reduction_of("doomed", values.data(), values.data(), 3000000, {}));
      MPI_Barrier(MPI_COMM_WORLD);
      if (mpi_rank() == mpi_size() - 1)
        world.board().set_failure({Status::Code::BackendError, "the test says so"});
      try {
        world.engine().wait(*pending);
      } catch (const BackendError& error) {
        CHECK(std::string(error.what()).find("the test says so") != std::string::npos);
      }
    }
    MpiWorld world({layout.domain_of, {}, false});
    const auto inputs = patterns(everyone(), 1000, DataType::Float32, 3);
    Bytes values = inputs[static_cast<std::size_t>(mpi_rank())];
    run(world.engine(), reduction_of("next", values.data(), values.data(), 1000, {}));
    CHECK(values == reduced(world.topology(), everyone(), inputs, {}));
  }
}

TEST_CASE("MPI's errors are named") {
  const MpiComm comm = MpiComm::duplicate(MPI_COMM_WORLD);
  char byte = 0;
  try {
    comm.check(MPI_Send(&byte, 1, MPI_BYTE, 1000, 0, comm.get()), "MPI_Send");
    FAIL("a rank that does not exist");
  } catch (const BackendError& error) {
    const std::string text = error.what();
    CHECK(text.find("MPI_Send on rank " + std::to_string(mpi_rank())) == 0);
    CHECK(text.find("MPI_ERR_RANK") != std::string::npos);
  }
}

}  // namespace hvd::test
