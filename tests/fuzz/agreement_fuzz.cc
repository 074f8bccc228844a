// decode_agreement: what is read is what was written, and what cannot be read throws WireError.
#include "tests/fuzz/fuzz_examples.h"
#include "tests/fuzz/fuzz_support.h"

namespace hvd::fuzz {

Bytes example(test::Random& random) {
  Writer writer;
  encode(writer, agreement(random));
  return writer.take();
}

void take(Reader& input) {
  const Agreement read = decode_agreement(input);
  Writer writer;
  encode(writer, read);
  Reader again(writer.bytes());
  const Agreement same = decode_agreement(again);
  if (same.present != read.present || same.absent != read.absent || same.last != read.last)
    std::abort();
}

}  // namespace hvd::fuzz
