#pragma once
/// Room card: all of hvd for LibTorch users: `#include <hvd/torch.h>`.

#include "hvd/hvd.h"
#include "torch_bindings/checkpoint.h"
#include "torch_bindings/collectives.h"
#include "torch_bindings/metrics.h"
#include "torch_bindings/optimizer.h"
#include "torch_bindings/parameters.h"
#include "torch_bindings/sampler.h"
#include "torch_bindings/threads.h"
