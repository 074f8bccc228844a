// What happens if I ... : DistributedDataParallel and averages of a model.
#include "tests/torch/support.h"
