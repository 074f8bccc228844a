#pragma once
/// Programs of which one rank calls shutdown() while the others go on, for engines whose ranks are
/// threads or processes.

#include <doctest/doctest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "hvd/base/text.h"
#include "hvd/engine/engine.h"

namespace hvd::test {

inline Submission sum_of(std::vector<float>& values, const std::string& name, int set = 0) {
  Submission submission;
  submission.kind = OpKind::Allreduce;
  submission.name = name;
  submission.op = ReduceOp::Sum;
  submission.tensors.push_back({values.data(),
                                values.data(),
                                DataType::Float32,
                                {static_cast<std::int64_t>(values.size())},
                                nullptr,
                                true});
  submission.process_set = set;
  return submission;
}

/// Sums under the name. Returns the words of the Shutdown that it was told, or "no error".
inline std::string words_of(Engine& engine, const std::string& name, int set = 0) {
  std::vector<float> values(3, 1.0F);
  try {
    engine.wait(*engine.submit(sum_of(values, name, set), After::Wait));
  } catch (const Shutdown& error) {
    return error.what();
  }
  return "no error";
}

/// How that begins; what comes behind it is advice.
inline bool is_told(const std::string& words, int rank, const std::string& name) {
  return words.starts_with(formatted(
      "allreduce '{}': rank {} has ended, or called hvd::shutdown(), without submitting it. ", name,
      rank));
}

/// One rank has taken part so many times, submits once more, and leaves; the others go on until
/// they are told. What it submitted takes place, wherever its decision was when it left.
class LastSubmission {
 public:
  LastSubmission(int ranks, int leaver, int rounds)
      : ranks_(ranks), leaver_(leaver), rounds_(rounds), values_(3, 5.0F) {}
  /// To be followed by shutdown().
  void run(int rank, Engine& engine) {
    if (rank == leaver_) {
      for (int i = 0; i < rounds_; ++i) CHECK(words_of(engine, "x") == "no error");
      pending_ = engine.submit(sum_of(values_, "x"));
      return;
    }
    std::string words = "no error";
    while (words == "no error") words = words_of(engine, "x");
    CHECK(is_told(words, leaver_, "x"));
    CHECK(words_of(engine, "x") != "no error");  // also when the name comes again
  }
  /// After the leaver's shutdown(), where it ran.
  void check() const {
    CHECK(pending_->status.text() == "");
    CHECK(values_ == std::vector<float>(3, static_cast<float>(ranks_ - 1) + 5.0F));
  }

 private:
  int ranks_, leaver_, rounds_;
  std::vector<float> values_;
  std::shared_ptr<HandleState> pending_;
};

/// A thread of one rank goes on submitting, several at once, while another one shuts down; the
/// other ranks go on until they are told.
class SubmitsDuringShutdown {
 public:
  SubmitsDuringShutdown(int leaver, int rounds)
      : leaver_(leaver), rounds_(rounds), all_(kNames, std::vector<float>(3)), pending_(kNames) {}
  void run(int rank, Engine& engine) {
    if (rank != leaver_) {
      for (int i = 0; words_of(engine, name_of(i)) == "no error"; ++i) {
      }
      return;
    }
    std::atomic<int> submitted{0};
    std::thread other([&] { submit_until_shutdown(engine, submitted); });
    while (submitted < rounds_) std::this_thread::yield();
    engine.shutdown();
    other.join();
    for (const auto& handle : pending_) CHECK((!handle || handle->done.load()));
  }

 private:
  static constexpr int kNames = 64;
  static std::string name_of(int i) { return formatted("x{}", i % kNames); }
  void submit_until_shutdown(Engine& engine, std::atomic<int>& submitted) {
    try {
      for (int i = 0;; ++i, ++submitted) {
        auto& handle = pending_[static_cast<std::size_t>(i % kNames)];
        if (handle) engine.wait(*handle);
        handle = engine.submit(sum_of(all_[static_cast<std::size_t>(i % kNames)], name_of(i)));
      }
    } catch (const Shutdown&) {
    }
  }
  int leaver_, rounds_;
  std::vector<std::vector<float>> all_;
  std::vector<std::shared_ptr<HandleState>> pending_;
};

}  // namespace hvd::test
