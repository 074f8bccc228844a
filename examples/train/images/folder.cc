#include "examples/train/images/folder.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <set>
#include <utility>

namespace examples {
namespace {

namespace fs = std::filesystem;

bool hidden(const std::string& name) { return name.front() == '.'; }

bool has_image_name(const std::string& name) {
  const auto dot = name.rfind('.');
  if (dot == std::string::npos) return false;
  std::string ending = name.substr(dot + 1);
  std::transform(ending.begin(), ending.end(), ending.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return ending == "jpg" || ending == "jpeg" || ending == "png";
}

std::string list(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < names.size() && i < 5; ++i) text += (i > 0 ? ", " : "") + names[i];
  return names.size() > 5 ? text + " and " + std::to_string(names.size() - 5) + " more" : text;
}

fs::directory_iterator open(const fs::path& folder) {
  std::error_code error;
  fs::directory_iterator entries(folder, error);
  if (error)
    throw FolderError("cannot read the folder " + folder.string() + ": " + error.message());
  return entries;
}

/// A link that leads nowhere is no folder.
bool is_folder(const fs::directory_entry& entry) {
  std::error_code error;
  return entry.is_directory(error);
}

std::vector<std::string> find_classes(const fs::path& folder) {
  std::vector<std::string> classes;
  for (const auto& entry : open(folder)) {
    auto name = entry.path().filename().string();
    if (!hidden(name) && is_folder(entry)) classes.push_back(std::move(name));
  }
  std::sort(classes.begin(), classes.end());
  return classes;
}

/// The files below one class's folder.
struct Walk {
  std::map<std::string, std::vector<std::string>> images;  ///< by the folder they are in
  std::size_t passed_over = 0;
  std::set<fs::path>
      above;  ///< folders that are being read: a link to one of them would go round for ever

  void read(const fs::path& folder, const std::string& name) {
    const auto place = fs::canonical(folder);
    if (!above.insert(place).second) return;
    for (const auto& entry : open(folder)) {
      const auto entry_name = entry.path().filename().string();
      if (hidden(entry_name)) continue;
      if (is_folder(entry)) {
        read(entry.path(), name + "/" + entry_name);
      } else if (has_image_name(entry_name)) {
        images[name].push_back(entry_name);
      } else {
        ++passed_over;
      }
    }
    above.erase(place);
  }
};

}  // namespace

ImageFolder::ImageFolder(fs::path folder, const std::vector<std::string>& classes)
    : folder_(std::move(folder)) {
  std::error_code error;
  if (!fs::is_directory(folder_, error)) throw FolderError(folder_.string() + " is not a folder");
  auto found = find_classes(folder_);
  if (found.empty())
    throw FolderError(
        folder_.string() +
        " has no folders; it must have one for each class, with the class's images in it");
  if (!classes.empty()) {
    std::vector<std::string> unknown;
    std::set_difference(found.begin(), found.end(), classes.begin(), classes.end(),
                        std::back_inserter(unknown));
    if (!unknown.empty()) {
      throw FolderError(folder_.string() + " has classes that the training images have not: " +
                        list(unknown) + "; remove them, or add training images");
    }
    found = classes;
  }
  classes_ = std::move(found);
  for (std::size_t label = 0; label < classes_.size(); ++label) {
    if (fs::is_directory(folder_ / classes_[label], error)) add_class(static_cast<int>(label));
  }
  if (size() == 0)
    throw FolderError("the folders in " + folder_.string() +
                      " hold no images (.jpg, .jpeg or .png)");
}

void ImageFolder::add_class(int label) {
  const auto& name = classes_[static_cast<std::size_t>(label)];
  Walk walk;
  walk.read(folder_ / name, name);
  passed_over_ += walk.passed_over;
  for (auto& [folder, images] : walk.images) {
    std::sort(images.begin(), images.end());
    for (const auto& image : images) {
      names_ += folder + "/" + image;
      ends_.push_back(names_.size());
      labels_.push_back(label);
    }
  }
}

std::string ImageFolder::path(std::size_t image) const {
  const auto begin = image == 0 ? 0 : ends_[image - 1];
  return folder_.string() + "/" + names_.substr(begin, ends_[image] - begin);
}

std::vector<std::string> ImageFolder::empty_classes() const {
  std::vector<bool> used(classes_.size());
  for (const auto label : labels_) used[static_cast<std::size_t>(label)] = true;
  std::vector<std::string> unused;
  for (std::size_t i = 0; i < used.size(); ++i) {
    if (!used[i]) unused.push_back(classes_[i]);
  }
  return unused;
}

/// FNV-1a (Fowler, Noll, Vo).
std::uint64_t ImageFolder::fingerprint() const {
  std::uint64_t hash = 0xCBF29CE484222325ULL;
  const auto add = [&](std::uint64_t byte) { hash = (hash ^ byte) * 0x100000001B3ULL; };
  const auto add_text = [&](const std::string& text) {
    for (const char c : text) add(static_cast<unsigned char>(c));
    add(0);
  };
  for (const auto& name : classes_) add_text(name);
  add_text(names_);
  for (auto end : ends_) {
    for (int i = 0; i < 8; ++i, end >>= 8) add(end & 0xFF);
  }
  return hash;
}

}  // namespace examples
