#pragma once
/// Which part of an image becomes the network's input: torchvision's RandomResizedCrop with RandomHorizontalFlip for training, Resize with
/// CenterCrop for validation. Pure functions.

#include "examples/train/data/random.h"
#include "examples/train/images/pixels.h"
#include "examples/train/images/resample.h"

namespace examples {

/// A part of an image, to be resized to the output's size.
struct Crop {
  Box box;
  bool mirror = false;
};

/// A box of 8 to 100 % of the image's area and an aspect ratio of 3/4 to 4/3, anywhere, half of them mirrored. Where ten tries give no
/// box that fits in the image, the middle of it.
Crop random_crop(Size image, Random& random);

/// The whole image, its shorter side resized to `resize`, of which the middle `size` x `size` pixels are taken.
struct CenterCrop {
  Stretch across, down;
};
/// `resize` is at least `size`.
CenterCrop center_crop(Size image, int resize, int size);

}  // namespace examples
