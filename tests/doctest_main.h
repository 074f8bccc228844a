#pragma once
/// What the mains of the test programs share. Include once per program, in its main.cc.
/// A hang is a failure with a name: the watchdog's thread ends the program when one test case runs
/// longer than its time, and says which case, where and on which rank. A filter that matches no
/// test case is a failure, not a pass.

#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>

#include "tests/support/sanitized.h"

namespace hvd::test {

/// Twice what any case needs beside four others on two cores; `TEST_CASE("..." *
/// doctest::timeout(300))` asks for more.
inline constexpr std::chrono::seconds kCaseLimit{kThreadSanitizer ? 240 : 120};

/// "rank 2 of 4: ", or empty in a program of one process.
inline std::string identity;  // NOLINT: set once by run(), before any test
inline int cases_run = 0;     // NOLINT: one program, one listener

class CaseWatchdog : public doctest::IReporter {
 public:
  explicit CaseWatchdog(const doctest::ContextOptions& /*options*/)
      : thread_([this] { watch(); }) {}
  ~CaseWatchdog() override {
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  CaseWatchdog(const CaseWatchdog&) = delete;
  CaseWatchdog& operator=(const CaseWatchdog&) = delete;

  void test_case_start(const doctest::TestCaseData& test) override {
    ++cases_run;
    set(&test);
  }
  void test_case_reenter(const doctest::TestCaseData& test) override { set(&test); }
  void test_case_end(const doctest::CurrentTestCaseStats& /*stats*/) override { set(nullptr); }

  void report_query(const doctest::QueryData& /*data*/) override {}
  void test_run_start() override {}
  void test_run_end(const doctest::TestRunStats& /*stats*/) override {}
  void test_case_exception(const doctest::TestCaseException& /*exception*/) override {}
  void subcase_start(const doctest::SubcaseSignature& /*subcase*/) override {}
  void subcase_end() override {}
  void log_assert(const doctest::AssertData& /*data*/) override {}
  void log_message(const doctest::MessageData& /*data*/) override {}
  void test_case_skipped(const doctest::TestCaseData& /*test*/) override {}

 private:
  void set(const doctest::TestCaseData* test) {
    {
      const std::lock_guard lock(mutex_);
      test_ = test;
      ++turn_;
    }
    changed_.notify_all();
  }

  void watch() {
    std::unique_lock lock(mutex_);
    while (!ending_) {
      const auto turn = turn_;
      const auto moved = [&] { return ending_ || turn_ != turn; };
      if (test_ == nullptr) {
        changed_.wait(lock, moved);
        continue;
      }
      const auto limit =
          std::max(kCaseLimit, std::chrono::seconds(static_cast<long>(test_->m_timeout)));
      if (changed_.wait_for(lock, limit, moved)) continue;
      std::fprintf(stderr, "%swatchdog: test case \"%s\" (%s:%u) still runs after %lld s\n",
                   identity.c_str(), test_->m_name, test_->m_file.c_str(), test_->m_line,
                   static_cast<long long>(limit.count()));
      std::signal(SIGABRT, SIG_DFL);  // doctest's handler would wait for the test that hangs
      std::abort();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  const doctest::TestCaseData* test_ = nullptr;
  unsigned long turn_ = 0;
  bool ending_ = false;
  std::thread thread_;  // last: it uses what is above
};

/// Runs the test cases chosen by the command line and returns the exit code. Of several ranks only
/// rank 0 prints a report of success.
inline int run(int argc, char** argv, int rank = 0, int size = 1) {
  if (size > 1) identity = "rank " + std::to_string(rank) + " of " + std::to_string(size) + ": ";
  doctest::Context context(argc, argv);
  context.setOption("no-colors", true);
  std::ostringstream quiet;
  if (rank != 0) context.setCout(&quiet);
  int failed = context.run();
  if (context.shouldExit()) return failed;  // --help, --list-test-cases and the like
  if (cases_run == 0) {
    std::fprintf(stderr, "%sno test case matches the filter\n", identity.c_str());
    failed = 1;
  }
  if (failed != 0 && rank != 0) std::cerr << identity << "failed\n" << quiet.str() << std::flush;
  return failed;
}

REGISTER_LISTENER("watchdog", 1, CaseWatchdog);

}  // namespace hvd::test
