#pragma once
/// A folder of the first rank for the tests of files, whose name all ranks know.

#include <doctest/doctest.h>
#include <hvd/torch.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

namespace hvd::test {

/// Made and removed by all ranks together.
class SharedFolder {
 public:
  SharedFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "hvd_test_XXXXXX").string();
    if (rank() == 0) REQUIRE(::mkdtemp(name.data()) != nullptr);
    name_ = broadcast_object(name, 0);
  }
  ~SharedFolder() {
    barrier();
    std::error_code ignored;
    if (rank() == 0) std::filesystem::remove_all(name_, ignored);
  }
  SharedFolder(const SharedFolder&) = delete;
  SharedFolder& operator=(const SharedFolder&) = delete;
  [[nodiscard]] std::string file(const std::string& name = "run.pt") const {
    return name_ + "/" + name;
  }

 private:
  std::string name_;
};

}  // namespace hvd::test
