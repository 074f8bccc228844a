#include "examples/train/images/resample_impl.h"

namespace examples {

const ResampleKernels kAvx512ResampleKernels = {across, down};

}  // namespace examples
