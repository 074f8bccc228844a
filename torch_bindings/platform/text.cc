// With the fmt of LibTorch, where it brings one.
// Tested in tests/torch_bindings/collectives/operation_test.cc
#include "hvd/base/text_definition.h"
