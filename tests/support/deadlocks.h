#pragma once
/// Programs whose ranks come to wait for one another, for ranks that are threads and ranks that are
/// processes.

#include <doctest/doctest.h>

#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "hvd/engine/engine.h"

namespace hvd::test {

/// The sum over the ranks of what they give.
inline float sum_of(Engine& engine, const std::string& name, float value, int process_set = 0) {
  std::vector<float> values{value};
  Submission submission;
  submission.name = name;
  submission.op = ReduceOp::Sum;
  submission.process_set = process_set;
  submission.tensors.push_back(
      {values.data(), values.data(), DataType::Float32, {1}, nullptr, true});
  if (!engine.small_calls().try_run(call_of(submission)))
    engine.wait(*engine.submit(submission, After::Wait));
  return values.front();
}

/// What the Mismatch says that the call ends with, within seconds.
inline std::string mismatch_of(const std::function<void()>& call) {
  const auto begin = std::chrono::steady_clock::now();
  std::string text;
  try {
    call();
    text = "(no error)";
  } catch (const Mismatch& error) {
    text = error.what();
  } catch (const std::exception& error) {
    text = std::string("(another error) ") + error.what();
  }
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(20));
  return text;
}

/// Rank 0 catches an error of its own and leaves out the rest of a step; then all do as they did
/// before.
class LeftOut {
 public:
  explicit LeftOut(int size) : size_(static_cast<float>(size)) {}
  void run(int rank, Engine& engine) const {
    for (int step = 0; step < 3; ++step) {
      CHECK(sum_of(engine, "gradients", 1) == size_);
      CHECK(sum_of(engine, "loss", 2) == 2 * size_);
    }
    std::vector<float> loss{2};
    Submission besides;
    besides.name = "loss";
    besides.op = ReduceOp::Sum;
    besides.tensors.push_back({loss.data(), loss.data(), DataType::Float32, {1}, nullptr, true});
    const auto pending = rank == 0 ? nullptr : engine.submit(std::move(besides), After::Return);
    if (rank != 0) CHECK(says_who(mismatch_of([&] { sum_of(engine, "gradients", 1); })));
    if (rank != 0) CHECK_THROWS_AS(engine.wait(*pending), Deadlock);
    if (rank == 0) CHECK(says_who(mismatch_of([&] { sum_of(engine, "accuracy", 3); })));
    for (int step = 0; step < 3; ++step) {
      CHECK(sum_of(engine, "gradients", 1) == size_);
      CHECK(sum_of(engine, "accuracy", 3) == 3 * size_);
      CHECK(sum_of(engine, "loss", 2) == 2 * size_);
    }
  }

 private:
  [[nodiscard]] bool says_who(const std::string& error) const {
    CAPTURE(error);
    CHECK(error.find("can never end, as the ranks wait for one another") != std::string::npos);
    // of the others those that are known to wait by then: on a busy machine not all. No
    // std::regex: in libstdc++ its scanner's table is filled by all threads without a lock.
    const std::size_t end = error.find(" for allreduce 'gradients'");
    const std::size_t begin = error.find(who_holds);
    if (begin == std::string::npos || end == std::string::npos || begin + who_holds.size() > end)
      return false;
    const std::string others =
        error.substr(begin + who_holds.size(), end - begin - who_holds.size());
    return others.starts_with("rank") && others.find("wait") != std::string::npos &&
           others.find('0') == std::string::npos && others.find("for") == std::string::npos;
  }
  const std::string who_holds = "rank 0 waits for allreduce 'accuracy'; ";
  const float size_;
};

}  // namespace hvd::test
