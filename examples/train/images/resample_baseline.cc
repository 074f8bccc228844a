#include "examples/train/images/resample_impl.h"

namespace examples {

const ResampleKernels kBaselineResampleKernels = {across, down};

}  // namespace examples
