// With the fmt of LibTorch, where it brings one.
#include "hvd/text_definition.h"
