#include "hvd/negotiation/leaders/late_report.h"

#include <algorithm>
#include <span>

#include "hvd/base/text.h"
#include "hvd/negotiation/values/rank_runs.h"
#include "hvd/negotiation/values/records.h"
#include "hvd/negotiation/values/unit_names.h"

namespace hvd {

namespace {

std::string in_words(std::chrono::nanoseconds time) {
  using namespace std::chrono_literals;
  if (time % 1s == 0ns) return formatted("{} s", time / 1s);
  if (time % 1ms == 0ns) return formatted("{} ms", time / 1ms);
  if (time % 1us == 0ns) return formatted("{} us", time / 1us);
  return formatted("{} ns", time.count());
}

}  // namespace

void encode(Writer& writer, const LateReport& report) {
  encode(writer, report.key);
  writer.put(report.rank)
      .put(report.deadline.count())
      .put_list(std::span<const int>(report.missing));
  writer.put(static_cast<std::uint32_t>(report.some_of.size()));
  for (const auto& ranks : report.some_of) writer.put_list(std::span<const int>(ranks));
}

LateReport decode_late_report(Reader& reader) {
  LateReport report;
  report.key = decode_key(reader);
  report.rank = reader.get<int>();
  report.deadline = std::chrono::nanoseconds(reader.get<std::chrono::nanoseconds::rep>());
  report.missing = reader.get_list<int>();
  for (auto left = reader.get<std::uint32_t>(); left > 0; --left)
    report.some_of.push_back(reader.get_list<int>());
  return report;
}

std::string late_text(const UnitKey& key, int rank, std::chrono::nanoseconds deadline,
                      std::string_view members) {
  return formatted("{} '{}'{} of rank {} has not ended by its deadline of {}: ", name_of(key.kind),
                   display_name(key.name), members, rank, in_words(deadline));
}

Status late_status(LateReport report) {
  std::vector<std::string> who;
  std::sort(report.missing.begin(), report.missing.end());
  std::sort(report.some_of.begin(), report.some_of.end());
  if (report.missing.size() == 1)
    who.push_back(formatted("rank {} has not submitted it", report.missing.front()));
  if (report.missing.size() > 1)
    who.push_back(formatted("ranks {} have not submitted it", rank_list(report.missing)));
  for (const auto& ranks : report.some_of)
    who.push_back(formatted("some of ranks {} have not submitted it", rank_list(ranks)));
  return {Status::Code::StallTimeout,
          late_text(report.key, report.rank, report.deadline) + joined(who, "; ")};
}

}  // namespace hvd
