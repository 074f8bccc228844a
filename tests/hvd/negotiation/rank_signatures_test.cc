// What ranks have said of a tensor, kept as runs: against a plain list by place.
#include <doctest/doctest.h>

#include <memory>
#include <random>
#include <vector>

#include "hvd/negotiation/values/rank_runs.h"

namespace hvd::test {
namespace {

SharedSignature with_rows(std::int64_t rows) {
  Signature signature;
  signature.tensors.push_back({DataType::Float32, {rows, 3}, {}});
  return std::make_shared<const Signature>(std::move(signature));
}

}  // namespace

TEST_CASE("rank signatures: runs of places say what a list by place says") {
  std::mt19937 random(3);
  for (int program = 0; program < 200; ++program) {
    CAPTURE(program);
    const int places = 1 + static_cast<int>(random() % 40);
    RankSignatures runs;
    std::vector<std::int64_t> rows(static_cast<std::size_t>(places));  // 0: nothing said
    for (int step = 0; step < 60; ++step) {
      const Run run{static_cast<int>(random() % static_cast<unsigned>(places)), 1};
      Run said = run;
      if (random() % 3 == 0)
        said.count = 1 + static_cast<int>(random() % static_cast<unsigned>(places - run.first));
      const auto value = static_cast<std::int64_t>(1 + random() % 3);
      runs.set(said, with_rows(value));
      for (int place = said.first; place < said.first + said.count; ++place)
        rows[static_cast<std::size_t>(place)] = value;
      std::size_t count = 0;
      for (std::size_t place = 0; place < rows.size(); ++place) {
        if (rows[place] != 0) ++count;
        if ((rows[place] == 0) != (runs.of(place) == nullptr)) FAIL("something at ", place);
        if (rows[place] != 0 && runs.of(place)->tensors.front().shape.front() != rows[place])
          FAIL("something else at ", place);
      }
      CHECK(runs.count() == count);
      CHECK(runs.all_equal(said, *with_rows(value)));
      CHECK(runs.all_say(said, runs.of(static_cast<std::size_t>(said.first))));
      bool all = true;
      for (const auto row : rows) all = all && row == value;
      CHECK(runs.all_equal({0, places}, *with_rows(value)) == all);
      for (std::size_t i = 1; i < runs.said().size(); ++i) {
        const auto& before = runs.said()[i - 1];
        const auto& after = runs.said()[i];
        CHECK(before.places.first + before.places.count <= after.places.first);
        CHECK((before.signature != after.signature ||
               before.places.first + before.places.count < after.places.first));
      }
    }
  }
}

TEST_CASE("rank signatures: what many ranks say alike takes the memory of one") {
  RankSignatures said;
  for (int place = 4095; place >= 0; --place) said.set({(place * 5) % 4096, 1}, with_rows(7));
  CHECK(said.said().size() == 1);
  CHECK(said.count() == 4096);
  CHECK(said.of(17).use_count() == 1);
}

}  // namespace hvd::test
