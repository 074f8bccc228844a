/// Requests over a wire that only remembers what it was told.

#include "ops/p2p/exchange.h"

#include <doctest/doctest.h>

#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace hvd::test {
namespace {

struct Asked {
  bool is_send;
  const std::byte* at;
  std::size_t bytes;
  int peer, tag;
};

/// Rank 0's end. All that was posted is done at the next test.
class RememberingWire final : public PointToPoint {
 public:
  RememberingWire(std::vector<Asked>& asked, std::size_t piece) : asked_(asked), piece_(piece) {}
  std::string_view name() const override { return "remembering"; }
  int rank() const override { return 0; }
  int largest_tag() const override { return 1 << 20; }
  std::size_t piece_bytes() const override { return piece_; }
  Posted send(std::span<const std::byte> bytes, int to, int tag, SendMode /*mode*/) override {
    asked_.push_back({true, bytes.data(), bytes.size(), to, tag});
    return {asked_.size(), to, true};
  }
  Posted receive(std::span<std::byte> bytes, int from, int tag) override {
    asked_.push_back({false, bytes.data(), bytes.size(), from, tag});
    return {asked_.size(), from, false};
  }
  void test(std::span<Posted> posted, std::vector<Finished>& finished) override {
    for (std::size_t place = 0; place < posted.size(); ++place) {
      finished.push_back(
          {place, posted[place].is_send ? 0 : asked_[posted[place].handle - 1].bytes});
      posted[place].handle = 0;
    }
  }
  std::optional<Claimed> claim(int /*tag*/) override { return std::nullopt; }
  Posted receive_claimed(const Claimed& /*claimed*/, std::span<std::byte> /*bytes*/) override {
    return {};
  }
  bool drop(Posted& posted) noexcept override {
    posted.handle = 0;
    return false;
  }
  void keep(std::shared_ptr<void> /*memory*/) noexcept override {}
  bool flush() override { return true; }

 private:
  std::vector<Asked>& asked_;
  const std::size_t piece_;
};

}  // namespace

TEST_CASE("what is long travels to another host in pieces, and within a host whole") {
  constexpr std::size_t kPiece = 1000;
  std::vector<Asked> asked;
  Exchange exchange(std::make_unique<RememberingWire>(asked, kPiece), {0, 0, 1}, true);
  std::vector<std::byte> memory(5 * kPiece);
  for (const std::size_t bytes :
       {std::size_t{0}, std::size_t{1}, kPiece, kPiece + 1, 3 * kPiece, 4 * kPiece + 7})
    for (const int peer : {1, 2})
      for (const bool is_send : {true, false}) {
        CAPTURE(bytes);
        CAPTURE(peer);
        CAPTURE(is_send);
        asked.clear();
        Requests requests(exchange, nullptr);
        std::size_t pending = 0;
        const std::span<std::byte> run{memory.data(), bytes};
        if (is_send) {
          requests.send(run, peer, 5, SendMode::Synchronous, pending);
        } else {
          requests.receive(run, peer, 5, pending);
        }
        const std::size_t messages = peer == 1 || bytes == 0 ? 1 : (bytes + kPiece - 1) / kPiece;
        CHECK(asked.size() == messages);
        CHECK(pending == messages);
        const std::byte* at = memory.data();
        for (const Asked& one : asked) {
          CHECK(one.at == at);
          CHECK(one.is_send == is_send);
          CHECK(one.peer == peer);
          CHECK(one.tag == 5);
          at += one.bytes;
        }
        CHECK(at == memory.data() + bytes);
        CHECK(requests.bytes_to_other_hosts() == (is_send && peer == 2 ? bytes : 0));
        CHECK(requests.poll());
        CHECK(pending == 0);
      }
}

TEST_CASE("the buffers of a batch that is over serve the next") {
  std::vector<Asked> asked;
  Exchange exchange(std::make_unique<RememberingWire>(asked, 1000), {0, 0, 1}, true);
  constexpr std::size_t kBytes = 5000;
  const auto run = [&](std::size_t bytes) {
    Requests requests(exchange, nullptr);
    std::size_t pending = 0;
    const auto buffer = requests.buffer(bytes);
    requests.send(buffer, 1, 5, SendMode::Ordinary, pending);
    CHECK(requests.poll());
    return buffer.data();
  };
  const auto* const first = run(kBytes);
  const std::vector<std::byte> others(kBytes + 64);  // where that was given back
  CHECK(run(kBytes) == first);
  CHECK(run(kBytes / 2 + 100) == first);
  CHECK(run(kBytes / 4) != first);  // it is to be used for no less than half its size
}

}  // namespace hvd::test
