#include "ops/mpi/api.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

#include "hvd/base/text.h"
#include "ops/mpi/library.h"

// In Open MPI a handle is the address of a library's object, elsewhere a number of the header's.
#ifdef OPEN_MPI
#define HVD_MPI_NAME "Open MPI"
#define HVD_MPI_HANDLE(constant, object) static_cast<decltype(constant)>(find(object))
#else
#define HVD_MPI_NAME "an MPI with the ABI of MPICH"
#define HVD_MPI_HANDLE(constant, object) constant
#endif

namespace hvd {

MpiApi detail::mpi_api{};

namespace {

constexpr const char* kMpiLibrary = HVD_MPI_LIBRARY;
constexpr bool kIsOpenMpi = std::string_view(HVD_MPI_NAME) == "Open MPI";

/// Finds symbols as the linker would, so that tools that stand in front of MPI are called, and
/// objects that a program has a copy of are its copies.
class MpiSymbols {
 public:
  void* find(const char* name) {
    void* const found = ::dlsym(RTLD_DEFAULT, name);
    if (found == nullptr && missing_.empty()) missing_ = name;
    return found;
  }
  template <class Function>
  void get(const char* name, Function& function) {
    function = reinterpret_cast<Function>(find(name));
  }
  /// Returns the first that was not found; empty if all were.
  [[nodiscard]] const std::string& missing() const { return missing_; }

 private:
  std::string missing_;
};

/// The names with P are MPI's own: those without may be a tool's that calls them.
template <class Function>
Function own_function(const char* name, void* library = RTLD_DEFAULT) {
  return reinterpret_cast<Function>(::dlsym(library, name));
}
bool has_mpi() { return ::dlsym(RTLD_DEFAULT, "PMPI_Initialized") != nullptr; }
/// Returns whether the MPI that this process has is of the kind that this library was compiled for.
bool is_right_kind() {
  return (::dlsym(RTLD_DEFAULT, "ompi_mpi_comm_world") != nullptr) == kIsOpenMpi;
}

}  // namespace

std::string mpi_library() {
  const auto ask = own_function<decltype(&::MPI_Get_library_version)>("PMPI_Get_library_version");
  std::array<char, 8192> text{};  // MPI_MAX_LIBRARY_VERSION_STRING of any MPI
  int length = 0;
  if (ask == nullptr || ask(text.data(), &length) != MPI_SUCCESS) return "its version is unknown";
  std::string all(text.data(), static_cast<std::size_t>(length));
  all.resize(std::min(all.size(), all.find_first_of(",\n")));
  for (char& letter : all)
    if (letter == '\t') letter = ' ';
  return all;
}

namespace {

void fill(MpiApi& api, MpiSymbols& symbols) {
#define HVD_GET(name, function) symbols.get(#function, api.name);
  HVD_MPI_FUNCTIONS(HVD_GET)
#undef HVD_GET
  [[maybe_unused]] const auto find = [&](const char* name) { return symbols.find(name); };
  api.comm_world = HVD_MPI_HANDLE(MPI_COMM_WORLD, "ompi_mpi_comm_world");
  api.comm_self = HVD_MPI_HANDLE(MPI_COMM_SELF, "ompi_mpi_comm_self");
  api.request_null = HVD_MPI_HANDLE(MPI_REQUEST_NULL, "ompi_request_null");
  api.info_null = HVD_MPI_HANDLE(MPI_INFO_NULL, "ompi_mpi_info_null");
  api.byte_type = HVD_MPI_HANDLE(MPI_BYTE, "ompi_mpi_byte");
  api.int_type = HVD_MPI_HANDLE(MPI_INT, "ompi_mpi_int");
  api.errors_return = HVD_MPI_HANDLE(MPI_ERRORS_RETURN, "ompi_mpi_errors_return");
}

}  // namespace

std::string open_mpi() {
  static bool is_open = false;
  if (is_open) return {};
  if (!has_mpi()) {
    // For all to see: Open MPI's plugins look there for the functions that they call.
    if (::dlopen(kMpiLibrary, RTLD_NOW | RTLD_GLOBAL) == nullptr) {
      const char* const words = ::dlerror();
      return formatted("{}, with which hvd was built, cannot be opened: {}", HVD_MPI_NAME,
                       words != nullptr ? words : kMpiLibrary);
    }
    if (!is_right_kind())
      return formatted("{} is not {}, with which hvd was built, but {}", kMpiLibrary, HVD_MPI_NAME,
                       mpi_library());
  } else if (!is_right_kind()) {
    return formatted("the program is linked with another MPI ({}) than hvd was built with ({})",
                     mpi_library(), HVD_MPI_NAME);
  }
  MpiSymbols symbols;
  fill(detail::mpi_api, symbols);
  if (!symbols.missing().empty())
    return formatted("the MPI of this process ({}) has no {}", mpi_library(), symbols.missing());
  is_open = true;
  return {};
}

bool is_mpi_started() {
  using Initialized = decltype(&::MPI_Initialized);
  auto ask = own_function<Initialized>("PMPI_Initialized");
  if (ask == nullptr)  // a plugin of the program may have brought it for itself
    if (void* const library = ::dlopen(kMpiLibrary, RTLD_LAZY | RTLD_NOLOAD); library != nullptr)
      ask = own_function<Initialized>("PMPI_Initialized", library);
  int initialized = 0;
  return ask != nullptr && ask(&initialized) == MPI_SUCCESS && initialized != 0;
}

}  // namespace hvd
