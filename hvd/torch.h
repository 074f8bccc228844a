#pragma once
// The front door for LibTorch users; everything is in torch_bindings/.
#include "torch_bindings/torch.h"
