/// Signatures: how they travel, and the verdict over those of all ranks.
#include <doctest/doctest.h>

#include <span>
#include <string>
#include <vector>

#include "tests/support/signatures.h"

namespace hvd::test {

TEST_CASE("a signature survives its encoding, and a cut or altered one is refused") {
  Signature signature = signature_of(DataType::BFloat16, {3, 0, 5}, OpKind::Broadcast);
  signature.tensors.push_back({DataType::Int64, {}});
  signature.root = 3;
  signature.prescale_factor = 0.1;
  Writer writer;
  encode(writer, signature);
  Reader reader(writer.bytes());
  CHECK(decode_signature(reader) == signature);
  CHECK(reader.at_end());
  for (std::size_t length = 0; length < writer.bytes().size(); ++length) {
    Reader cut_reader(std::span(writer.bytes()).first(length));
    CHECK_THROWS_AS(decode_signature(cut_reader), WireError);
  }
  Bytes altered = writer.bytes();
  altered[0] = std::byte{200};
  Reader altered_reader(altered);
  CHECK_THROWS_AS(decode_signature(altered_reader), WireError);
}

TEST_CASE("the verdict names what differs first, and groups the ranks by what they sent") {
  const std::vector<int> ranks{0, 1, 2, 5};
  const auto a = shared(signature_of(DataType::Float32, {17, 3}));
  const auto b = shared(signature_of(DataType::Float32, {18, 3}));
  const auto c = shared(signature_of(DataType::Float64, {18, 3}));
  CHECK(verdict("x", ranks, std::vector{a, a, a, a}).ok());
  const Status shape = verdict("x", ranks, std::vector{a, a, a, b});
  CHECK(shape.code() == Status::Code::Mismatch);
  CHECK(shape.text() ==
        "allreduce 'x': the shape differs between ranks: ranks 0-2: float32 [17, 3]; rank 5: "
        "float32 [18, 3]");
  // dtype and shape differ: dtype is told
  const Status dtype = verdict("x", ranks, std::vector{a, c, b, c});
  CHECK(dtype.text() ==
        "allreduce 'x': the data type differs between ranks: rank 0: float32 [17, 3]; ranks 1, 5: "
        "float64 [18, 3]; rank 2: float32 [18, 3]");
  // Only the first dimension of a gather may differ.
  const auto g1 = shared(signature_of(DataType::Int8, {4, 2}, OpKind::Allgather));
  const auto g2 = shared(signature_of(DataType::Int8, {0, 2}, OpKind::Allgather));
  const auto g3 = shared(signature_of(DataType::Int8, {4, 3}, OpKind::Allgather));
  CHECK(verdict("g", ranks, std::vector{g1, g2, g1, g2}).ok());
  CHECK_FALSE(verdict("g", ranks, std::vector{g1, g2, g3, g2}).ok());
  // A tensor deep in a group is shown, not the group's first ones.
  Signature many = signature_of(DataType::Float32, {1});
  for (int i = 0; i < 30; ++i) many.tensors.push_back({DataType::Float32, {i}});
  Signature other = many;
  other.tensors[20].shape = {999};
  CHECK(
      verdict("group", ranks, std::vector{shared(many), shared(many), shared(many), shared(other)})
          .text()
          .find("[999]") != std::string::npos);
  // Nor is a tensor that differs in something else, or one that only some of the ranks have.
  Signature two = signature_of(DataType::Float32, {3}), mixed = two, one = two;
  two.tensors.push_back({DataType::Float32, {5}});
  mixed.tensors = {{DataType::Float32, {4}}, {DataType::Float64, {5}}};
  CHECK(verdict("group", std::vector{0, 1, 2}, std::vector{shared(two), shared(mixed), shared(one)})
            .text() ==
        "allreduce 'group': the data type differs between ranks: rank 0: tensor 1 is float32 [5]; "
        "rank 1: tensor 1 is float64 [5]; rank 2: 1 tensors");
}

}  // namespace hvd::test
