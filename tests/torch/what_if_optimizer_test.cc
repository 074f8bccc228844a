// What happens if I ... : the wrapped optimizer, its groups, state and process set.
#include "tests/torch/support.h"
