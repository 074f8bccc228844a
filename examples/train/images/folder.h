#pragma once
/// An ImageFolder is the list of the images below a folder with a folder per class, as
/// torchvision's ImageFolder makes it: classes are numbered in the order of their names, images are
/// in the order of class, folder and name. Links are followed. Files and folders whose names begin
/// with a dot are passed over, and files other than .jpg, .jpeg and .png (in any case). It owns the
/// names, in one piece of

/// memory, and no images. Making one throws FolderError that says what to do; afterwards it is
/// constant, and any thread may read it.

#include <cstdint>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

namespace examples {

class FolderError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class ImageFolder {
 public:
  /// `classes`: empty for a folder per class that is found; otherwise only these may be there, and
  /// they have these numbers.
  explicit ImageFolder(std::filesystem::path folder, const std::vector<std::string>& classes = {});

  [[nodiscard]] std::size_t size() const { return labels_.size(); }
  [[nodiscard]] const std::vector<std::string>& classes() const { return classes_; }
  [[nodiscard]] int label(std::size_t image) const { return labels_[image]; }
  /// Where the image is.
  [[nodiscard]] std::string path(std::size_t image) const;

  /// Classes without an image.
  [[nodiscard]] std::vector<std::string> empty_classes() const;
  /// Files in folders of classes that are no images by their names.
  [[nodiscard]] std::size_t passed_over() const { return passed_over_; }
  /// Equal for equal lists of classes and names, wherever the folder is.
  [[nodiscard]] std::uint64_t fingerprint() const;

 private:
  void add_class(int label);

  std::filesystem::path folder_;
  std::vector<std::string> classes_;
  std::string names_;                ///< of all images, below the folder, one after another
  std::vector<std::uint64_t> ends_;  ///< of each name
  std::vector<std::int32_t> labels_;
  std::size_t passed_over_ = 0;
};

}  // namespace examples
