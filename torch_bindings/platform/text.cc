// With the fmt of LibTorch, where it brings one.
#include "hvd/base/text_definition.h"
