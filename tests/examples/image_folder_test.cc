// The list of a folder's images: order, classes, links, names.
#include "examples/train/images/folder.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include <fstream>

namespace {

namespace fs = std::filesystem;
using examples::FolderError;
using examples::ImageFolder;

class Tree {
 public:
  Tree() : path_(fs::temp_directory_path() / ("hvd_folder_test." + std::to_string(::getpid()))) {
    fs::create_directories(path_);
  }
  ~Tree() { fs::remove_all(path_); }
  Tree(const Tree&) = delete;
  Tree& operator=(const Tree&) = delete;

  void put(const std::string& file) const {
    fs::create_directories((path_ / file).parent_path());
    std::ofstream(path_ / file) << file;
  }
  fs::path operator/(const std::string& name) const { return path_ / name; }

 private:
  fs::path path_;
};

std::vector<std::string> names(const ImageFolder& folder, const fs::path& root) {
  std::vector<std::string> all;
  for (std::size_t i = 0; i < folder.size(); ++i)
    all.push_back(std::to_string(folder.label(i)) + " " +
                  folder.path(i).substr(root.string().size() + 1));
  return all;
}

std::string refusal(const fs::path& folder, const std::vector<std::string>& classes = {}) {
  try {
    const ImageFolder images(folder, classes);
    return "";
  } catch (const FolderError& error) {
    return error.what();
  }
}

TEST_CASE("images are in the order of class, folder and name, as torchvision has them") {
  const Tree tree;
  for (const char* file :
       {"train/dog/b.jpg", "train/dog/a.PNG", "train/cat/10.JPEG", "train/cat/9.jpeg",
        "train/cat/sub/1.jpg", "train/cat/sub-b/1.jpg", "train/cat/readme.txt", "train/cat/jpg",
        "train/cat/.hidden.jpg", "train/.git/x.jpg", "train/stray.jpg"}) {
    tree.put(file);
  }
  const auto root = tree / "train";
  const ImageFolder images(root);
  CHECK(images.classes() == std::vector<std::string>{"cat", "dog"});
  CHECK(names(images, root) == std::vector<std::string>{"0 cat/10.JPEG", "0 cat/9.jpeg",
                                                        "0 cat/sub/1.jpg", "0 cat/sub-b/1.jpg",
                                                        "1 dog/a.PNG", "1 dog/b.jpg"});
  CHECK(images.passed_over() == 2);
  CHECK(images.empty_classes().empty());
}

TEST_CASE("links are followed, also where they lead round, and not where they lead nowhere") {
  const Tree tree;
  tree.put("elsewhere/real/1.jpg");
  tree.put("train/a/0.jpg");
  fs::create_directory_symlink(tree / "elsewhere/real", tree / "train/b");
  fs::create_directory_symlink(tree / "train/a", tree / "train/a/again");
  fs::create_symlink(tree / "elsewhere/real/1.jpg", tree / "train/a/linked.jpg");
  fs::create_symlink(tree / "nowhere", tree / "train/c");
  fs::create_symlink(tree / "nowhere", tree / "train/a/broken.jpg");
  const auto root = tree / "train";
  // A broken link counts as a file: that it cannot be read is found out when it is, and said.
  CHECK(names(ImageFolder(root), root) ==
        std::vector<std::string>{"0 a/0.jpg", "0 a/broken.jpg", "0 a/linked.jpg", "1 b/1.jpg"});
}

TEST_CASE("validation has the numbers of the training classes, and no others") {
  const Tree tree;
  for (const char* file : {"train/a/1.jpg", "train/b/1.jpg", "train/c/1.jpg", "val/c/1.jpg",
                           "val/a/1.jpg", "more/c/1.jpg", "more/d/1.jpg"})
    tree.put(file);
  fs::create_directories(tree / "train/empty");
  const ImageFolder train(tree / "train");
  CHECK(train.classes() == std::vector<std::string>{"a", "b", "c", "empty"});
  CHECK(train.empty_classes() == std::vector<std::string>{"empty"});
  const ImageFolder val(tree / "val", train.classes());
  CHECK(names(val, tree / "val") == std::vector<std::string>{"0 a/1.jpg", "2 c/1.jpg"});
  CHECK(refusal(tree / "more", train.classes()).find("training images have not: d;") !=
        std::string::npos);
}

TEST_CASE("what is no such folder is refused with words") {
  const Tree tree;
  CHECK(refusal(tree / "nowhere").find("is not a folder") != std::string::npos);
  tree.put("flat/1.jpg");
  CHECK(refusal(tree / "flat").find("one for each class") != std::string::npos);
  tree.put("texts/a/1.txt");
  CHECK(refusal(tree / "texts").find("hold no images") != std::string::npos);
}

TEST_CASE("the fingerprint tells lists apart, and not places") {
  const Tree tree;
  for (const char* file : {"1/a/x.jpg", "1/b/y.jpg", "2/a/x.jpg", "2/b/y.jpg", "3/a/x.jpg",
                           "3/b/z.jpg", "4/a/x.jpg", "4/a/y.jpg", "4/b/y.jpg"})
    tree.put(file);
  const auto of = [&](const char* name) { return ImageFolder(tree / name).fingerprint(); };
  CHECK(of("1") == of("2"));
  CHECK(of("1") != of("3"));
  CHECK(of("1") != of("4"));
}

}  // namespace
