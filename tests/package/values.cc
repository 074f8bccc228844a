// The core alone: its values.
#include <hvd/hvd.h>

#include <cstdio>

int main() {
  if (hvd::element_count({2, 3}) != 6 || hvd::element_bytes(hvd::DataType::BFloat16) != 2) return 1;
  try {
    hvd::Status(hvd::Status::Code::Mismatch, "expected").raise();
  } catch (const hvd::Mismatch& error) {
    std::printf("values: %s\n", error.what());
    return 0;
  }
  return 1;
}
