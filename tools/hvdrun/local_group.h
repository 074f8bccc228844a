#pragma once
/// LocalGroup is the ranks that hvdrun starts itself, all on this host. It owns their processes, and the folder with the file by which they
/// meet. For one thread. Throws std::runtime_error with the system's words.

#include <array>
#include <list>
#include <string>
#include <vector>

#include "tools/hvdrun/plan.h"
#include "tools/hvdrun/rank.h"
#include "tools/hvdrun/ranks.h"

namespace hvdrun {

class LocalGroup final : public RankGroup {
 public:
  /// Starts the ranks. `outlets`, which are borrowed, take standard output and error of the ranks.
  LocalGroup(const Plan& plan, const OutputOptions& options, const std::array<Outlet*, 2>& outlets);
  ~LocalGroup() override;
  LocalGroup(const LocalGroup&) = delete;
  LocalGroup& operator=(const LocalGroup&) = delete;

  std::vector<Rank*> ranks() override;
  void add_waited(std::vector<pollfd>& waited) const override;
  void pass_on() override;
  [[nodiscard]] bool has_said_all() const override;
  void finish_output() override;
  void begin_to_end() override {}

 private:
  class LocalRank;
  /// A folder of this user's alone, for the file by which the ranks meet.
  class MeetingPlace {
   public:
    MeetingPlace();
    ~MeetingPlace();
    MeetingPlace(const MeetingPlace&) = delete;
    MeetingPlace& operator=(const MeetingPlace&) = delete;
    /// Returns it as HVD_INIT has it.
    [[nodiscard]] std::string address() const;

   private:
    std::string path_;
  };
  MeetingPlace place_;
  std::list<LocalRank> ranks_;
};

}  // namespace hvdrun
