// What happens if I ... : gradients, hooks, passes, clipping.
#include "tests/torch/support.h"
