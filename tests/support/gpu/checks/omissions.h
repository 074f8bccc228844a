#pragma once
/// Leaves out one call of a kind, by its number among those of a rank: whoever counts on it must be
/// found out. It says where the call was. Any thread.

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace hvd::gpu::test {

class Omissions {
 public:
  enum class Kind : std::uint8_t {
    Wait,     ///< cudaStreamWaitEvent
    Record,   ///< cudaEventRecord
    Device,   ///< cudaSetDevice, or cuCtxPushCurrent with what takes it back
    Capture,  ///< cudaThreadExchangeStreamCaptureMode
  };
  static const std::vector<Kind>& kinds();

  struct Call {
    Kind kind = Kind::Wait;
    int rank = 0;
    int number = 0;  ///< from 1
  };
  /// Lets that call do nothing and succeed.
  void leave_out(const Call& call) { left_out_ = call; }
  /// Counts a call that `where` describes; returns whether it is the one to be left out.
  bool happens(Kind kind, int rank, const std::string& where);
  /// Returns how many calls the rank has made.
  [[nodiscard]] int count(Kind kind, int rank) const;
  /// Returns where the call was that was left out; empty: there was none.
  [[nodiscard]] std::string place() const;

 private:
  mutable std::mutex mutex_;
  Call left_out_;
  std::map<std::pair<Kind, int>, int> counts_;  ///< by kind and rank
  std::string place_;
};

const char* name_of(Omissions::Kind kind);

}  // namespace hvd::gpu::test
