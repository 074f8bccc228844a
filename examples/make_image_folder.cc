// This makes a folder of JPEG files of the synthetic pictures, as --dataset folder of the trainer
// reads it:
//   make_image_folder FOLDER [--train N] [--val N] [--side PIXELS] [--quality PERCENT] [--seed N]
#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "examples/train/images/codecs.h"
#include "examples/train/images/synthetic.h"

namespace {

namespace fs = std::filesystem;

struct Options {
  std::string folder;
  int train = 2000, val = 200;
  int quality = 90;
  examples::SyntheticPicture picture{.side = 96};
};

Options parse(int argc, char** argv) {
  Options options;
  CLI::App app(
      "Makes a folder of JPEG files, a folder per class in train/ and val/, of synthetic pictures.",
      "make_image_folder");
  app.option_defaults()->always_capture_default();
  app.add_option("folder", options.folder, "Where they go")->required();
  app.add_option("--train", options.train, "Training images")->check(CLI::Range(1, 10'000'000));
  app.add_option("--val", options.val, "Validation images")->check(CLI::Range(1, 10'000'000));
  app.add_option("--side", options.picture.side, "Pixels of a side")->check(CLI::Range(8, 10'000));
  app.add_option("--quality", options.quality, "Of the JPEG files")->check(CLI::Range(1, 100));
  app.add_option("--seed", options.picture.seed, "Other pictures for each");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }
  return options;
}

std::vector<std::uint8_t> jpeg_of(const Options& options, int label, int split, int number) {
  const auto plane = static_cast<std::size_t>(options.picture.side) *
                     static_cast<std::size_t>(options.picture.side);
  std::vector<std::uint8_t> planes(3 * plane), pixels(3 * plane);
  examples::draw_synthetic(planes.data(), label, options.picture, static_cast<std::uint64_t>(split),
                           static_cast<std::uint64_t>(number));
  for (std::size_t i = 0; i < plane; ++i) {
    for (std::size_t c = 0; c < 3; ++c) pixels[3 * i + c] = planes[c * plane + i];
  }
  return examples::encode_jpeg(pixels, {options.picture.side, options.picture.side},
                               {.quality = options.quality});
}

void write(const fs::path& file, const std::vector<std::uint8_t>& bytes) {
  std::ofstream out(file, std::ios::binary);
  out.write(reinterpret_cast<const char*>(bytes.data()),
            static_cast<std::streamsize>(bytes.size()));
  out.close();
  if (!out) throw std::runtime_error("cannot write " + file.string());
}

void make_split(const Options& options, int split, const std::string& name, int images) {
  for (int label = 0; label < examples::kSyntheticClasses; ++label) {
    fs::create_directories(fs::path(options.folder) / name / ("wave" + std::to_string(label)));
  }
  for (int i = 0; i < images; ++i) {
    const int label = i % examples::kSyntheticClasses;
    char file[32];
    std::snprintf(file, sizeof(file), "%07d.jpg", i);
    write(fs::path(options.folder) / name / ("wave" + std::to_string(label)) / file,
          jpeg_of(options, label, split, i));
  }
}

}  // namespace

int main(int argc, char** argv) {
  const auto options = parse(argc, argv);
  try {
    make_split(options, 0, "train", options.train);
    make_split(options, 1, "val", options.val);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "make_image_folder: %s\n", error.what());
    return 1;
  }
  return 0;
}
