#pragma once
/// The precompiled header of everything that uses LibTorch (CMake adds it by itself; no file
/// includes it).
#include <torch/torch.h>
