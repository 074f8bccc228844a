#include "examples/train/images/resample_impl.h"

namespace examples {

const ResampleKernels kAvx2ResampleKernels = {across, down};

}  // namespace examples
