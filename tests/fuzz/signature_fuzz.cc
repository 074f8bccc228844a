// decode_signature: what is read is what was written, and what cannot be read throws WireError.
#include "tests/fuzz/fuzz_examples.h"
#include "tests/fuzz/fuzz_support.h"

namespace hvd::fuzz {

Bytes example(test::Random& random) {
  Writer writer;
  encode(writer, signature(random, static_cast<OpKind>(random.below(8)), 3));
  return writer.take();
}

void take(Reader& input) {
  const Signature read = decode_signature(input);
  // NaN equals nothing
  if (read.prescale_factor != read.prescale_factor ||
      read.postscale_factor != read.postscale_factor)
    return;
  Writer writer;
  encode(writer, read);
  Reader again(writer.bytes());
  if (!(decode_signature(again) == read)) std::abort();
  is_plausible(read, 3);
}

}  // namespace hvd::fuzz
