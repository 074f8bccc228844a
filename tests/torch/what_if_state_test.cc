// What happens if I ... : broadcasts, checkpoints and what is saved.
#include "tests/torch/support.h"
