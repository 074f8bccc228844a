#pragma once
/// Room card: all of hvd for LibTorch users: `#include <hvd/torch.h>`.

#include "hvd/hvd.h"
#include "hvd/spawn.h"
#include "torch_bindings/autocast.h"
#include "torch_bindings/checkpoint.h"
#include "torch_bindings/collectives.h"
#include "torch_bindings/data_parallel.h"
#include "torch_bindings/distributed_data_parallel.h"
#include "torch_bindings/grad_scaler.h"
#include "torch_bindings/learning_rate.h"
#include "torch_bindings/metrics.h"
#include "torch_bindings/moving_average.h"
#include "torch_bindings/optimizer.h"
#include "torch_bindings/parameters.h"
#include "torch_bindings/sampler.h"
#include "torch_bindings/sync_batch_norm.h"
#include "torch_bindings/threads.h"
