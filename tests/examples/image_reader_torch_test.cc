// What the trainer's reader makes of image files: parts of them, resizing, crops, bad files.
// tests/system/scripts/image_reader.sh compares it with torchvision.
#include "examples/train/images/reader.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "examples/train/images/codecs.h"

namespace {

namespace fs = std::filesystem;
using namespace examples;
using Bytes = std::vector<std::uint8_t>;

/// Pixels that vary smoothly and by channel, with edges.
Bytes picture(Size size) {
  Bytes rgb;
  for (int y = 0; y < size.height; ++y) {
    for (int x = 0; x < size.width; ++x) {
      rgb.push_back(static_cast<std::uint8_t>(128 + 100 * std::sin(0.11 * x + 0.03 * y)));
      rgb.push_back(static_cast<std::uint8_t>(x / 9 % 2 == y / 7 % 2 ? 220 : 30));
      rgb.push_back(static_cast<std::uint8_t>(3 * x + 5 * y));
    }
  }
  return rgb;
}

class ImageFiles {
 public:
  ImageFiles()
      : path_(fs::temp_directory_path() / ("hvd_image_test." + std::to_string(::getpid()))) {
    fs::create_directories(path_);
  }
  ~ImageFiles() {  // not fs::remove_all: LibTorch brings its own, which crashes
    std::vector<fs::path> entries;
    for (const auto& entry : fs::recursive_directory_iterator(path_))
      entries.push_back(entry.path());
    for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) fs::remove(*entry);
    fs::remove(path_);
  }
  ImageFiles(const ImageFiles&) = delete;
  ImageFiles& operator=(const ImageFiles&) = delete;

  std::string put(const std::string& name, const Bytes& bytes) const {
    fs::create_directories((path_ / name).parent_path());
    std::ofstream(path_ / name, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
    return (path_ / name).string();
  }
  fs::path path() const { return path_; }

 private:
  fs::path path_;
};

void check_part(const Bytes& file, const Pixels& whole, const Box& part, int shrink) {
  Pixels got;
  EncodedImage::open(file)->decode(part, got, shrink);
  REQUIRE(got.part.left <= part.left);
  REQUIRE(got.part.left + got.part.width >= part.left + part.width);
  int different = 0;
  for (int y = part.top; y < part.top + part.height; ++y) {
    for (int x = part.left; x < part.left + part.width; ++x)
      different += std::memcmp(got.at(x, y), whole.at(x, y), 3) != 0 ? 1 : 0;
  }
  CHECK(different == 0);
}

TEST_CASE("a part of a JPEG file is decoded as it is in the whole") {
  const Size size{151, 117};
  const auto rgb = picture(size);
  Random random{7};
  for (const auto& [across, down] : {std::pair{1, 1}, {2, 1}, {2, 2}, {1, 2}, {4, 1}}) {
    for (const int kind : {0, 1, 2}) {
      const auto file = encode_jpeg(rgb, size,
                                    {.quality = 80,
                                     .across = across,
                                     .down = down,
                                     .progressive = kind == 1,
                                     .grey = kind == 2});
      for (const int shrink : {1, 2, 4, 8}) {
        CAPTURE(across);
        CAPTURE(down);
        CAPTURE(kind);
        CAPTURE(shrink);
        const auto image = EncodedImage::open(file);
        const Size small = image->shrunk(shrink);
        Pixels whole;
        image->decode({0, 0, small.width, small.height}, whole, shrink);
        for (int i = 0; i < 12; ++i) {
          const int left = random.below(small.width), top = random.below(small.height);
          check_part(file, whole,
                     {left, top, 1 + random.below(small.width - left),
                      1 + random.below(small.height - top)},
                     shrink);
        }
      }
    }
  }
}

TEST_CASE(
    "sizes: larger, smaller, one pixel; a picture of one colour keeps it; sides that are too "
    "unlike are refused") {
  const ImageFiles folder;
  const ImageReader reader({.size = 24, .resize = 30, .mean = {0, 0, 0}, .deviation = {1, 1, 1}});
  std::vector<float> planes(3 * 24 * 24);
  for (const auto& size : {Size{50, 37}, {24, 24}, {7, 61}, {300, 5}, {1, 1}, {500, 400}}) {
    const auto pixels =
        static_cast<std::size_t>(size.width) * static_cast<std::size_t>(size.height);
    const auto file = folder.put("grey.jpg", encode_jpeg(Bytes(3 * pixels, 102), size));
    for (const bool validation : {false, true}) {
      std::fill(planes.begin(), planes.end(), 0.0F);
      validation ? reader.read_validation(file, planes.data())
                 : (void)reader.read_training(file, Random{1}, planes.data());
      for (const float value : planes) REQUIRE(value == doctest::Approx(0.4).epsilon(0.01));
    }
  }
  const auto file = folder.put("line.jpg", encode_jpeg(Bytes(3 * 60'000, 102), {60'000, 1}));
  CHECK_NOTHROW(reader.read_training(file, Random{1}, planes.data()));
  CHECK_THROWS_AS(ImageReader({.size = 224, .resize = 256}).read_validation(file, planes.data()),
                  ImageError);
}

TEST_CASE("a mirrored crop is the other way round") {
  const ImageFiles folder;
  Bytes ramp;  // lighter from left to right
  for (int i = 0; i < 40 * 40; ++i)
    ramp.insert(ramp.end(), 3, static_cast<std::uint8_t>(20 + 5 * (i % 40)));
  const auto file = folder.put("ramp.jpg", encode_jpeg(ramp, {40, 40}));
  const ImageReader reader({.size = 24, .resize = 24});
  std::vector<float> planes(3 * 24 * 24);
  int mirrored = 0;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    const bool is_mirrored = reader.read_training(file, Random{seed}, planes.data()).mirror;
    mirrored += is_mirrored ? 1 : 0;
    for (std::size_t row = 0; row < planes.size(); row += 24)
      REQUIRE((planes[row] > planes[row + 23]) == is_mirrored);
  }
  CHECK((mirrored > 5 && mirrored < 35));
}

TEST_CASE(
    "random crops are torchvision's: inside, of the right areas and shapes, the middle where none "
    "fits") {
  Random random{1};
  double area = 0, mirrored = 0;
  for (int i = 0; i < 20'000; ++i) {
    const auto crop = random_crop({500, 375}, random);
    CHECK((crop.box.left >= 0 && crop.box.top >= 0 && crop.box.left + crop.box.width <= 500 &&
           crop.box.top + crop.box.height <= 375));
    const double ratio = static_cast<double>(crop.box.width) / crop.box.height;
    CHECK((ratio > 0.73 && ratio < 1.36));
    area += crop.box.width * crop.box.height / (500.0 * 375) / 20'000;
    mirrored += crop.mirror ? 1.0 / 20'000 : 0;
  }
  CHECK(area == doctest::Approx(0.5).epsilon(0.05));  // torchvision: 0.497
  CHECK(mirrored == doctest::Approx(0.5).epsilon(0.05));
  CHECK(random_crop({1000, 10}, random).box == Box{493, 0, 13, 10});
  CHECK(random_crop({10, 1000}, random).box == Box{0, 493, 10, 13});
  CHECK(random_crop({1, 1}, random).box == Box{0, 0, 1, 1});
}

TEST_CASE(
    "files that are no images, or end early, are bad whatever the part; damaged ones never crash") {
  const ImageFiles folder;
  const ImageReader reader({.size = 16, .resize = 20});
  std::vector<float> planes(3 * 16 * 16);
  const auto why = [&](const std::string& file, std::uint64_t seed = 0) -> std::string {
    try {
      reader.read_training(file, Random{seed}, planes.data());
      return "";
    } catch (const ImageError& error) {
      return error.what();
    }
  };
  const auto good = encode_jpeg(picture({90, 70}), {90, 70});
  CHECK(why(folder.put("good.jpg", good)).empty());
  CHECK(why(folder.put("empty.jpg", {})) == "the file is empty");
  CHECK(why(folder.put("text.jpg", {'h', 'e', 'l', 'l', 'o'})) ==
        "the file is neither JPEG nor PNG");
  CHECK(why((folder.path() / "missing.jpg").string()).find("No such file") != std::string::npos);
  CHECK(why(folder.path().string()) == "it is no file");
  for (std::size_t length = 1; length < good.size(); length += 97) {
    const auto file = folder.put(
        "short.jpg", Bytes(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(length)));
    for (std::uint64_t seed = 0; seed < 3; ++seed) CHECK_FALSE(why(file, seed).empty());
  }
  Random random{3};
  for (int i = 0; i < 300; ++i) {
    auto damaged = good;
    for (int n = 0; n < 5; ++n)
      damaged[static_cast<std::size_t>(random.below(static_cast<int>(damaged.size())))] =
          static_cast<std::uint8_t>(random.next());
    (void)why(folder.put("damaged.jpg", damaged), static_cast<std::uint64_t>(i));
  }
}

TEST_CASE("the next good image stands in for a bad one, the same in every thread") {
  const ImageFiles folder;
  for (int i = 0; i < 6; ++i) {
    auto file = encode_jpeg(picture({60 + i, 50}), {60 + i, 50});
    if (i == 2 || i == 3) file.resize(file.size() / 2);
    folder.put("train/" + std::string(i < 3 ? "a" : "b") + "/" + std::to_string(i) + ".jpg", file);
  }
  const ImageReader reader({.size = 16, .resize = 20});
  const ImageFolder images(folder.path() / "train");
  REQUIRE(images.size() == 6);
  const auto read = [&](std::size_t image, std::vector<BadImage>& bad, std::uint64_t epoch = 4) {
    std::vector<float> planes(3 * 16 * 16);
    const int label = read_training_image(reader, images, image, 9, epoch, planes.data(), bad);
    return std::pair(label, planes);
  };
  std::vector<BadImage> bad, none;
  const auto there = read(2, bad);
  CHECK(there.first == 1);
  REQUIRE(bad.size() == 2);
  CHECK(bad[0].file == images.path(2));
  CHECK(bad[1].file == images.path(3));
  CHECK(bad[0].why.find("truncated") != std::string::npos);
  CHECK(read(4, none).first == 1);
  CHECK(none.empty());
  CHECK(read(1, none) == read(1, none));
  CHECK(read(1, none) != read(1, none, 5));
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      std::vector<BadImage> mine;
      for (int i = 0; i < 20; ++i) CHECK(read(2, mine) == there);
    });
  }
  for (auto& thread : threads) thread.join();
  std::vector<float> planes(3 * 16 * 16);
  CHECK_FALSE(read_validation_image(reader, images, 3, planes.data(), bad));
  CHECK(read_validation_image(reader, images, 4, planes.data(), bad));
}

TEST_CASE("a folder without a good image is an error, not an endless search") {
  const ImageFiles folder;
  for (int i = 0; i < 3; ++i) folder.put("train/a/" + std::to_string(i) + ".jpg", {});
  const ImageReader reader({.size = 8, .resize = 8});
  const ImageFolder images(folder.path() / "train");
  std::vector<float> planes(3 * 8 * 8);
  std::vector<BadImage> bad;
  CHECK_THROWS_AS(read_training_image(reader, images, 0, 1, 1, planes.data(), bad), FolderError);
}

}  // namespace
