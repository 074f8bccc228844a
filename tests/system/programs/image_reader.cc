// What the trainer's reader makes of a folder of images, for tests and measurements in Python:
//   image_reader train|val FOLDER SIZE RESIZE SEED EPOCH SHRINK OUT      a line for each image
//                                                                        (file, label, crop), the
//                                                                        numbers in OUT
//   image_reader speed FOLDER SIZE BATCH WORKERS SECONDS                  images per second of
//                                                                         training batches, made by
//                                                                         threads
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "examples/train/images/reader.h"

namespace {

using namespace examples;

int number(const char* text) { return std::atoi(text); }

int compare(char** arguments) {
  const std::string mode = arguments[1];
  const ImageFolder folder(arguments[2]);
  const ImageReader reader({.size = number(arguments[3]),
                            .resize = number(arguments[4]),
                            .shrink = number(arguments[7]) != 0});
  const auto size = static_cast<std::size_t>(reader.options().size);
  std::FILE* out = std::fopen(arguments[8], "wb");
  if (out == nullptr) return 1;
  std::vector<float> planes(3 * size * size);
  for (std::size_t i = 0; i < folder.size(); ++i) {
    const auto file = folder.path(i);
    std::string words;
    Crop crop;
    try {
      if (mode == "train") {
        crop = reader.read_training(file,
                                    Random{static_cast<std::uint64_t>(number(arguments[5])),
                                           static_cast<std::uint64_t>(number(arguments[6])), i},
                                    planes.data());
      } else {
        reader.read_validation(file, planes.data());
      }
    } catch (const ImageError& error) {
      words = error.what();
    }
    std::printf("%s\t%d\t%d\t%d\t%d\t%d\t%d\t%s\n", file.c_str(), folder.label(i), crop.box.left,
                crop.box.top, crop.box.width, crop.box.height, crop.mirror ? 1 : 0, words.c_str());
    std::fwrite(planes.data(), sizeof(float), planes.size(), out);
  }
  return std::fclose(out) == 0 ? 0 : 1;
}

int measure(char** arguments) {
  const ImageFolder folder(arguments[2]);
  const ImageReader reader({.size = number(arguments[3]), .resize = number(arguments[3])});
  const auto numbers = 3 * static_cast<std::size_t>(number(arguments[3])) *
                       static_cast<std::size_t>(number(arguments[3]));
  const auto batch = static_cast<std::size_t>(number(arguments[4])),
             workers = static_cast<std::size_t>(number(arguments[5]));
  std::atomic<std::size_t> next = 0, read = 0;
  std::atomic<bool> over = false;
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < workers; ++i) {
    threads.emplace_back([&] {
      while (!over) {
        const auto first = next.fetch_add(batch);
        std::vector<float> planes(batch * numbers);
        std::vector<BadImage> bad;
        for (std::size_t image = 0; image < batch; ++image) {
          read_training_image(reader, folder, (first + image) % folder.size(), 1,
                              first / folder.size(), planes.data() + image * numbers, bad);
        }
        read += batch;
      }
    });
  }
  while (read < workers * batch) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // warm
  const auto begin = std::chrono::steady_clock::now();
  const std::size_t before = read;
  std::this_thread::sleep_for(std::chrono::seconds(number(arguments[6])));
  const std::size_t counted = read - before;
  const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
  over = true;
  for (auto& thread : threads) thread.join();
  std::printf("%.1f\n", static_cast<double>(counted) / spent.count());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc == 9) return compare(argv);
    if (argc == 7) return measure(argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "image_reader: %s\n", error.what());
    return 1;
  }
  return 2;
}
