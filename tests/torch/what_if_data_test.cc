// What happens if I ... : samplers, collectives in place, loss scaling.
#include "tests/torch/support.h"
