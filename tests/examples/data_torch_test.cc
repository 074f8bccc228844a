// The trainer's readers, synthetic images, batches and evaluation (examples/).
#include <doctest/doctest.h>
#include <hvd/torch.h>
#include <torch/torch.h>
#include <unistd.h>
#include <zlib.h>

#include <filesystem>
#include <fstream>
#include <numeric>

#include "examples/train/data/batches.h"
#include "examples/train/models/models.h"
#include "examples/train/trainer/checkpoint.h"
#include "examples/train/trainer/collectively.h"
#include "examples/train/trainer/trainer.h"

namespace {

namespace fs = std::filesystem;
using examples::DataError;
using Bytes = std::vector<std::uint8_t>;

/// A folder of this rank alone, gone at the end of the test.
class Folder {
 public:
  Folder() : path_(fs::temp_directory_path() / ("hvd_data_test." + std::to_string(::getpid()))) {
    fs::create_directories(path_);
  }
  ~Folder() {  // not fs::remove_all: libtorch 2.11 brings its own, which crashes
    std::vector<fs::path> entries;
    for (const auto& entry : fs::recursive_directory_iterator(path_))
      entries.push_back(entry.path());
    for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) fs::remove(*entry);
    fs::remove(path_);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::string path() const { return path_.string(); }
  void put(const std::string& name, const Bytes& bytes) const {
    std::ofstream(path_ / name, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
  }
  void put_gzipped(const std::string& name, const Bytes& bytes) const {
    gzFile out = gzopen((path_ / name).c_str(), "wb");
    gzwrite(out, bytes.data(), static_cast<unsigned>(bytes.size()));
    gzclose(out);
  }

 private:
  fs::path path_;
};

/// Records whose label is their number modulo `classes`, and whose pixels differ by record and
/// position.
Bytes cifar_records(int items, int classes, int label_bytes = 1) {
  Bytes bytes;
  for (int i = 0; i < items; ++i) {
    for (int l = 0; l < label_bytes; ++l)
      bytes.push_back(static_cast<std::uint8_t>(l + 1 == label_bytes ? i % classes : 99));
    for (int p = 0; p < 3072; ++p) bytes.push_back(static_cast<std::uint8_t>(i + 3 * p));
  }
  return bytes;
}

Bytes idx(const std::vector<std::uint32_t>& sizes, const Bytes& data) {
  Bytes bytes = {0, 0, 8, static_cast<std::uint8_t>(sizes.size())};
  for (const auto size : sizes) {
    for (int shift = 24; shift >= 0; shift -= 8)
      bytes.push_back(static_cast<std::uint8_t>(size >> shift));
  }
  bytes.insert(bytes.end(), data.begin(), data.end());
  return bytes;
}

Bytes counting(std::size_t count, int modulo = 256) {
  Bytes bytes(count);
  for (std::size_t i = 0; i < count; ++i)
    bytes[i] = static_cast<std::uint8_t>(i % static_cast<std::size_t>(modulo));
  return bytes;
}

void put_mnist(const Folder& folder, int test_labels = 10) {
  folder.put("train-images-idx3-ubyte", idx({20, 28, 28}, counting(20 * 28 * 28)));
  folder.put("train-labels-idx1-ubyte", idx({20}, counting(20, 10)));
  folder.put_gzipped("t10k-images-idx3-ubyte.gz", idx({12, 28, 28}, counting(12 * 28 * 28)));
  folder.put_gzipped("t10k-labels-idx1-ubyte.gz", idx({12}, counting(12, test_labels)));
}

/// The message of the DataError that `work` throws.
template <class Work>
std::string refusal(Work work) {
  try {
    work();
  } catch (const DataError& error) {
    return error.what();
  }
  return "not refused";
}

bool mentions(const std::string& text, const std::vector<std::string>& words) {
  return std::all_of(words.begin(), words.end(),
                     [&](const auto& word) { return text.find(word) != std::string::npos; });
}

TEST_CASE(
    "training images: what the sampler deals, in its order, whatever the number of workers, also "
    "in the rest of an epoch") {
  examples::Dataset data =
      examples::make_synthetic({.train_images = 60, .test_images = 1, .side = 8});
  data.augment = true;
  const auto per_step = 3 * static_cast<std::size_t>(hvd::size());
  for (const std::size_t workers : {0, 1, 3}) {
    CAPTURE(workers);
    hvd::ElasticSampler sampler(60, true, 5, {.shares = hvd::Shares::DropLast}),
        dealt(60, true, 5, {.shares = hvd::Shares::DropLast});
    const auto loader = torch::data::make_data_loader(
        examples::TrainingImages(data, 5, sampler), sampler,
        torch::data::DataLoaderOptions(3).workers(workers).drop_last(true));
    for (const auto& [epoch, used] : {std::pair{0U, 0U}, {1U, 0U}, {4U, 2U}}) {
      for (auto* one : {&sampler, &dealt}) {
        one->set_epoch(epoch);
        one->record_batch(3 * used);
      }
      dealt.reset();
      std::size_t steps = 0;
      for (const examples::Batch& batch : *loader) {
        const auto indices = dealt.next(3);
        REQUIRE(indices);
        const auto by_hand = examples::make_training_batch(data, *indices, 5, epoch);
        CHECK(torch::equal(batch.data, by_hand.data));
        CHECK(torch::equal(batch.target, by_hand.target));
        ++steps;
      }
      CHECK(steps == (60 - used * per_step) / per_step);
    }
  }
}

TEST_CASE("what fails in a worker is told in the words that it has without workers") {
  examples::Dataset data =
      examples::make_synthetic({.train_images = 16, .test_images = 1, .side = 8});
  data.train.images = data.train.images.to(torch::kFloat32);  // not bytes: data_ptr refuses
  std::vector<std::string> words;
  for (const std::size_t workers : {0, 2}) try {
      const hvd::ElasticSampler sampler(16);
      const auto loader =
          torch::data::make_data_loader(examples::TrainingImages(data, 0, sampler), sampler,
                                        torch::data::DataLoaderOptions(4).workers(workers));
      loader->begin() != loader->end();
    } catch (const std::exception& error) {
      words.push_back(examples::words_of(error));
    }
  REQUIRE(words.size() == 2);
  CHECK(words[0].find("expected scalar type") != std::string::npos);
  CHECK(words[1] == words[0]);
}

}  // namespace

TEST_CASE("CIFAR-10: whichever training files exist, in order") {
  const Folder folder;
  folder.put("data_batch_1.bin", cifar_records(4, 10));
  folder.put("data_batch_3.bin", cifar_records(3, 10));
  folder.put("test_batch.bin", cifar_records(5, 10));
  const auto data = examples::read_cifar10(folder.path());
  CHECK(data.train.size() == 7);
  CHECK(data.test.size() == 5);
  CHECK(data.image_shape() == std::vector<std::int64_t>{3, 32, 32});
  CHECK(data.train.labels.equal(torch::tensor({0, 1, 2, 3, 0, 1, 2}, torch::kInt64)));
  // record 1 of the second file; green, row 2, column 3
  const auto pixel = data.train.images[5][1][2][3].item<int>();
  CHECK(pixel == ((1 + 3 * (1024 + 2 * 32 + 3)) & 0xFF));
}

TEST_CASE("CIFAR-100: the fine label counts; the folder of the archive is found") {
  const Folder folder;
  fs::create_directory(folder.path() + "/cifar-100-binary");
  folder.put("cifar-100-binary/train.bin", cifar_records(30, 100, 2));
  folder.put("cifar-100-binary/test.bin", cifar_records(2, 100, 2));
  const auto data = examples::read_cifar100(folder.path());
  CHECK(data.classes == 100);
  CHECK(data.train.labels[29].item<int>() == 29);
  CHECK(data.train.images[29][0][0][0].item<int>() == 29);
}

TEST_CASE("CIFAR: bad files are refused with the reason") {
  const Folder folder;
  const auto read = [&] { examples::read_cifar10(folder.path()); };
  CHECK(mentions(refusal([] { examples::read_cifar10("/nowhere"); }),
                 {"/nowhere", "not a folder", "data_batch_1.bin"}));
  CHECK(mentions(refusal(read), {"holds none of", "data_batch_1.bin", "cifar-10-binary.tar.gz"}));
  folder.put("data_batch_1.bin", cifar_records(2, 10));
  CHECK(mentions(refusal(read), {"test_batch.bin"}));
  auto bytes = cifar_records(3, 10);
  bytes[2 * 3073] = 10;
  folder.put("test_batch.bin", bytes);
  CHECK(mentions(refusal(read), {"record 2", "test_batch.bin", "label 10", "0 to 9"}));
  bytes.resize(3 * 3073 - 1);
  folder.put("test_batch.bin", bytes);
  CHECK(mentions(refusal(read), {"test_batch.bin", "truncated", "3073"}));
  folder.put("test_batch.bin", {});
  CHECK(mentions(refusal(read), {"test_batch.bin", "empty"}));
}

TEST_CASE("MNIST: plain and gzipped files") {
  const Folder folder;
  put_mnist(folder);
  const auto data = examples::read_mnist(folder.path());
  CHECK(data.train.size() == 20);
  CHECK(data.test.size() == 12);
  CHECK(data.image_shape() == std::vector<std::int64_t>{1, 28, 28});
  CHECK(data.test.images[11][0][27][27].item<int>() == (12 * 28 * 28 - 1) % 256);
  CHECK(data.test.labels[11].item<int>() == 1);
}

TEST_CASE("MNIST: bad files are refused with the reason") {
  const Folder folder;
  const auto read = [&] { examples::read_mnist(folder.path()); };
  CHECK(mentions(refusal(read), {"train-images-idx3-ubyte"}));
  put_mnist(folder, 11);
  CHECK(mentions(refusal(read), {"item 10", "t10k-labels-idx1-ubyte.gz", "label 10"}));
  put_mnist(folder);
  folder.put("train-labels-idx1-ubyte", idx({19}, counting(19, 10)));
  CHECK(mentions(refusal(read), {"20 images", "19 labels"}));
  folder.put("train-images-idx3-ubyte", idx({20, 28, 28}, counting(20 * 28 * 28 - 5)));
  CHECK(mentions(refusal(read), {"train-images-idx3-ubyte", "truncated"}));
  folder.put("train-images-idx3-ubyte", counting(100));
  CHECK(mentions(refusal(read), {"train-images-idx3-ubyte", "no idx file"}));
  auto packed = Bytes(200, 7);
  folder.put_gzipped("t10k-images-idx3-ubyte.gz", idx({12, 28, 28}, counting(12 * 28 * 28)));
  std::error_code error;
  put_mnist(folder);
  fs::resize_file(folder.path() + "/t10k-images-idx3-ubyte.gz",
                  fs::file_size(folder.path() + "/t10k-images-idx3-ubyte.gz") / 2, error);
  CHECK(mentions(refusal(read), {"t10k-images-idx3-ubyte.gz"}));
}

TEST_CASE("synthetic images: the same for the same seed, balanced, no class has a mean image") {
  const examples::SyntheticOptions options{.train_images = 2000, .test_images = 100};
  const auto data = examples::make_synthetic(options), again = examples::make_synthetic(options);
  CHECK(data.train.images.equal(again.train.images));
  CHECK(data.test.labels.equal(again.test.labels));
  CHECK(!data.train.images.equal(
      examples::make_synthetic({.train_images = 2000, .test_images = 100, .seed = 1})
          .train.images));
  CHECK(data.train.labels.bincount().eq(200).all().item<bool>());
  for (int label = 0; label < 10; ++label) {
    const auto mean =
        data.train.images.index({data.train.labels.eq(label)}).to(torch::kFloat64).mean(0) / 255 -
        0.5;
    CHECK(mean.abs().mean().item<double>() < 0.02);  // the patterns' own mean size is about 0.06
  }
}

TEST_CASE("synthetic images: a linear model does not learn them, a small network does" *
          doctest::timeout(300)) {
  const auto data = examples::make_synthetic({.train_images = 4000, .test_images = 1000});
  std::vector<std::size_t> all(4000);
  std::iota(all.begin(), all.end(), std::size_t{0});
  const auto train = examples::make_batch(data, data.train, all);
  const auto accuracy_of = [&](torch::nn::Sequential model) {
    torch::optim::Adam optimizer(model->parameters(), 0.001);
    for (int step = 0; step < 160; ++step) {
      const auto begin = step * 128 % 3840;
      optimizer.zero_grad();
      torch::nn::functional::cross_entropy(
          model->forward(train.data.narrow(0, begin, 128).flatten(1)),
          train.target.narrow(0, begin, 128))
          .backward();
      optimizer.step();
    }
    const auto test = examples::make_batch(data, data.test, hvd::evaluation_share(1000, 0, 1));
    const torch::NoGradGuard no_grad;
    return hvd::EvaluationTally().add(model->forward(test.data.flatten(1)), test.target).top1 /
           1000;
  };
  torch::manual_seed(1);
  using torch::nn::Linear;
  const double linear = accuracy_of(torch::nn::Sequential(Linear(3072, 10)));
  const double network = accuracy_of(torch::nn::Sequential(
      Linear(3072, 128), torch::nn::ReLU(), Linear(128, 128), torch::nn::ReLU(), Linear(128, 10)));
  MESSAGE("linear " << linear << ", network " << network);
  CHECK(linear < 0.5);
  CHECK(network > 0.9);
}

TEST_CASE(
    "training batches: shifted and mirrored by image and epoch, as they are where the dataset does "
    "not want it") {
  examples::Dataset data;
  data.train = {torch::arange(2 * 64, torch::kUInt8).view({2, 1, 8, 8}),
                torch::zeros({2}, torch::kInt64)};
  data.mean = {0.5F};
  data.deviation = {0.25F};
  const auto plain = examples::make_batch(data, data.train, {0, 1});
  CHECK(plain.data[1][0][3][4].item<float>() == doctest::Approx((92 / 255.0 - 0.5) / 0.25));
  CHECK(examples::make_training_batch(data, {0, 1}, 0, 0).data.equal(plain.data));
  data.augment = true;
  const auto first = examples::make_training_batch(data, {1}, 5, 9).data,
             again = examples::make_training_batch(data, {0, 1}, 5, 9).data;
  CHECK(first[0].equal(again[1]));
  int different = 0;
  for (std::size_t epoch = 0; epoch < 20; ++epoch)
    different += !examples::make_training_batch(data, {1}, 5, epoch).data.equal(first) ? 1 : 0;
  CHECK(different >= 15);
}

TEST_CASE("evaluation: every image is counted once, whatever the number of ranks") {
  for (const int ranks : {1, 2, 3, 4, 7}) {
    std::vector<std::size_t> all;
    for (int rank = 0; rank < ranks; ++rank) {
      const auto share = hvd::evaluation_share(5, rank, ranks);
      all.insert(all.end(), share.begin(), share.end());
    }
    std::sort(all.begin(), all.end());
    CHECK(all == std::vector<std::size_t>{0, 1, 2, 3, 4});
  }
}

TEST_CASE("evaluation: loss, top-1 and top-5 by hand") {
  const auto scores = torch::tensor(
      {{9., 5., 4., 3., 2., 1., 0.}, {9., 5., 4., 3., 2., 1., 0.}, {9., 5., 4., 3., 2., 1., 0.}});
  const auto labels = torch::tensor({0, 4, 5}, torch::kInt64);
  const auto tally = hvd::EvaluationTally().add(scores, labels);
  CHECK(tally.samples == 3);
  CHECK(tally.top1 == 1);
  CHECK(tally.top5 == 2);
  const double all = std::log(std::exp(9.) + std::exp(5.) + std::exp(4.) + std::exp(3.) +
                              std::exp(2.) + std::exp(1.) + 1);
  CHECK(tally.loss == doctest::Approx(3 * all - 9 - 2 - 1));
  // fewer than five classes
  CHECK(hvd::EvaluationTally()
            .add(torch::tensor({{1., 2.}}), torch::tensor({0}, torch::kInt64))
            .top5 == 1);
}

TEST_CASE("evaluation: the ranks together find what one process finds") {
  auto data = examples::make_synthetic({.train_images = 10, .test_images = 53, .side = 8});
  torch::manual_seed(3);
  auto model = examples::make_model({.name = "mlp", .image = data.image_shape(), .classes = 10});
  const auto all = examples::make_batch(data, data.test, hvd::evaluation_share(53, 0, 1));
  const auto alone = hvd::EvaluationTally().add(model->forward(all.data), all.target);
  for (const std::size_t workers : {0, 2}) {
    const auto together = examples::evaluate_share(*model, data, 4, torch::kCPU, workers).average();
    CHECK(together.samples == 53);
    CHECK(together.top1 == doctest::Approx(alone.top1 / 53));
    CHECK(together.top5 == doctest::Approx(alone.top5 / 53));
    CHECK(together.loss == doctest::Approx(alone.loss / 53));
  }
}

TEST_CASE("ResNet-18 has torchvision's parameters") {
  const auto model =
      examples::make_model({.name = "resnet18", .image = {3, 224, 224}, .classes = 1000});
  std::int64_t numbers = 0;
  for (const auto& parameter : model->parameters()) numbers += parameter.numel();
  CHECK(model->parameters().size() == 62);
  CHECK(numbers == 11'689'512);
  const auto parameters = model->named_parameters();
  CHECK(parameters["layer2.0.downsample.0.weight"].sizes() == torch::IntArrayRef{128, 64, 1, 1});
  CHECK(parameters["conv1.weight"].sizes() == torch::IntArrayRef{64, 3, 7, 7});
  CHECK(parameters["fc.bias"].sizes() == torch::IntArrayRef{1000});
  CHECK(model->named_buffers().contains("layer4.1.bn2.running_var"));
  model->eval();
  CHECK(model->forward(torch::zeros({2, 3, 64, 64})).sizes() == torch::IntArrayRef{2, 1000});
}

TEST_CASE(
    "checkpoint: brings back model, optimizer, sampler and position; refuses another run's and a "
    "damaged one") {
  const Folder folder;
  torch::manual_seed(3);
  const auto make = [] {
    return examples::make_model({.name = "mlp", .image = {1, 4, 4}, .classes = 3});
  };
  auto model = make(), other = make();
  torch::optim::Adam adam(model->parameters(), 0.01), other_adam(other->parameters(), 0.5);
  model->forward(torch::ones({2, 16})).sum().backward();
  adam.step();
  const std::string shared = hvd::broadcast_object(folder.path(), 0);  // rank 0 writes and reads
  const examples::CheckpointFile file(shared, {{"--model", "mlp"}});
  const auto size = static_cast<std::size_t>(hvd::size());
  hvd::ElasticSampler sampler(1000), resumed(1000);
  sampler.set_epoch(2);
  sampler.record_batch(30 / size);
  std::optional<hvd::GradScaler> none;
  CHECK_THROWS_WITH(file.load(*other, other_adam, resumed, none),
                    doctest::Contains("to resume from"));
  file.save(*model, adam, sampler,
            {.epoch = 2, .images = 30, .step = 77, .loss_sums = {1.0 / 3, 0.5}});
  const auto position = file.load(*other, other_adam, resumed, none);
  CHECK(resumed.epoch() == 2);
  CHECK(resumed.processed() == 30 / size * size);
  CHECK(position.epoch == 2);
  CHECK(position.images == 30);
  CHECK(position.step == 77);
  CHECK(position.loss_sums == std::vector<double>{1.0 / 3, 0.5});
  CHECK(position.loss_sum() == 1.0 / 3 + 0.5);
  CHECK(other_adam.param_groups()[0].options().get_lr() == 0.5);  // the command line's
  for (auto* m : {model.get(), other.get()}) m->zero_grad();
  model->forward(torch::ones({2, 16})).sum().backward();
  other->forward(torch::ones({2, 16})).sum().backward();
  other_adam.param_groups()[0].options().set_lr(0.01);
  adam.step();
  other_adam.step();
  for (std::size_t i = 0; i < model->parameters().size(); ++i)
    CHECK(model->parameters()[i].equal(other->parameters()[i]));

  const examples::CheckpointFile wrong(shared, {{"--model", "resnet18"}});
  CHECK_THROWS_WITH(wrong.load(*other, other_adam, resumed, none),
                    doctest::Contains("its --model is mlp, here it is resnet18"));
  // An older program dealt the images otherwise: the epoch begins anew.
  hvd::Checkpoint(shared + "/checkpoint.pt")
      .save(*model, adam, 77,
            {.strings = {{"identity", R"({"--model":"mlp"})"},
                         {"position", R"({"epoch":5,"images":30,"step":77,"loss_sums":[1.0]})"}}});
  const auto older = file.load(*other, other_adam, resumed, none);
  CHECK(older.epoch == 5);
  CHECK(older.images == 0);
  CHECK(older.step == 77);
  CHECK(older.loss_sum() == 0);
  CHECK(resumed.epoch() == 5);
  CHECK(resumed.processed() == 0);
  hvd::barrier();  // rank 0 has read it
  folder.put("checkpoint.pt", counting(500));
  CHECK_THROWS_WITH(file.load(*other, other_adam, resumed, none), doctest::Contains("damaged"));
  CHECK(std::distance(fs::directory_iterator(folder.path()), {}) == 1);  // no temporary files stay
}
