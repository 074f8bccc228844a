#include "tests/gpu/mutations.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <string_view>
#include <utility>

namespace hvd::gpu::test {

namespace {

/// This program's functions by their addresses in it, as nm has them.
std::map<std::uintptr_t, std::string> functions() {
  std::ifstream file("/proc/self/exe", std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  const auto at = [&]<class T>(std::size_t offset, T* to) {
    std::copy_n(bytes.data() + offset, sizeof *to, reinterpret_cast<char*>(to));
  };
  std::map<std::uintptr_t, std::string> found;
  Elf64_Ehdr header{};
  at(0, &header);
  for (std::size_t i = 0; i < header.e_shnum; ++i) {
    Elf64_Shdr table{}, text{};
    at(header.e_shoff + i * sizeof table, &table);
    if (table.sh_type != SHT_SYMTAB) continue;
    at(header.e_shoff + table.sh_link * sizeof text, &text);
    for (std::size_t place = 0; place < table.sh_size; place += sizeof(Elf64_Sym)) {
      Elf64_Sym symbol{};
      at(table.sh_offset + place, &symbol);
      if (ELF64_ST_TYPE(symbol.st_info) != STT_FUNC || symbol.st_value == 0) continue;
      found[symbol.st_value] = bytes.c_str() + text.sh_offset + symbol.st_name;
    }
  }
  return found;
}

/// The function that an address is in, and how far.
std::string place_of(std::uintptr_t address, bool with_offset) {
  static const auto known = functions();
  const auto next = known.lower_bound(address);
  if (next == known.begin()) return {};
  const auto& [begin, mangled] = *std::prev(next);
  int status = 0;
  char* const text = abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status);
  std::string name = text == nullptr ? mangled : text;
  std::free(static_cast<void*>(text));
  if (!with_offset) return name;
  std::ostringstream place;
  place << name << " +" << std::hex << address - begin;
  return place.str();
}

/// What stands between a call and whoever counts on it: the table of CUDA's functions, the owners
/// of handles, LibTorch's guards and events.
bool is_between(const std::string& function) {
  constexpr std::array<std::string_view, 9> kParts{"_Function_handler<hvd::gpu::CudaCode",
                                                   "hvd::gpu::(anonymous namespace)::push_device",
                                                   "hvd::gpu::DeviceGuard::",
                                                   "hvd::gpu::Event::record",
                                                   "hvd::gpu::Stream::wait_for(",
                                                   "hvd::gpu::wait_for_inputs(",
                                                   "hvd::detail::(anonymous namespace)::wait(",
                                                   "CudaPoint::record",
                                                   "::record_stream"};
  return function.starts_with("c10::") || function.starts_with("at::Tensor::") ||
         std::any_of(kParts.begin(), kParts.end(), [&](std::string_view part) {
           return function.find(part) != std::string::npos;
         });
}

/// The first for all; the others for what it does not find. What a case shows depends on when hvd's
/// own threads come, and on a busy machine they come late; and once found is found.
constexpr std::array<const char*, 9> kSchedules{"late:1",   "random:1",  "starved:1",
                                                "late:2",   "random:2",  "starved:2",
                                                "random:3", "starved:3", "random:4"};

struct Mutation {
  std::string kind, place;
  std::set<std::string> callers;       ///< as HVD_TEST_GPU_OMIT wants them
  std::vector<std::size_t> scenarios;  ///< that have made such calls
  std::size_t tries = 0;
  std::string found;  ///< by which scenario
  std::string said;
  bool running = false;
};

/// Adds a line "site wait 2995c1 1c0", which the double has said. A guard is two calls or three: a
/// function's are left out together.
void add_site(const std::string& line, std::size_t scenario, std::vector<Mutation>& to) {
  std::istringstream words(line);
  std::string word, kind, callers;
  words >> word >> kind;
  callers = kind;
  bool is_librarys = false;
  while (words >> word) {
    callers += " " + word;
    if (word == "-" && !is_librarys) return;
    if (word == "-") continue;
    const std::uintptr_t address = std::stoull(word, nullptr, 16);
    const std::string function = place_of(address - 1, false);
    is_librarys =
        is_librarys || function.find("::record_stream(") != std::string::npos;  // by the dispatcher
    if (is_between(function)) continue;
    if (function.find("hvd::") == std::string::npos ||
        function.find("hvd::gpu::test") != std::string::npos)
      return;
    const std::string place = kind == "device" ? function : place_of(address - 1, true);
    auto known = std::find_if(to.begin(), to.end(), [&](const Mutation& mutation) {
      return mutation.kind == kind && mutation.place == place;
    });
    if (known == to.end()) known = to.insert(to.end(), Mutation{.kind = kind, .place = place});
    known->callers.insert(callers);
    if (std::find(known->scenarios.begin(), known->scenarios.end(), scenario) ==
        known->scenarios.end())
      known->scenarios.push_back(scenario);
    return;
  }
}

/// A job that runs, and the file that its ranks write to.
struct Job {
  pid_t process = -1;
  int output = -1;
};

Job start(const Scenario& scenario, const std::function<bool()>& cases, const std::string& schedule,
          const std::string& omitted) {
  static int jobs = 0;
  const int port = 16000 + static_cast<int>((::getpid() * 61 + ++jobs * 7) % 13000);
  const int output = memfd_create("output", MFD_CLOEXEC);
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child != 0) return {child, output};
  ::dup2(output, STDERR_FILENO);
  ::dup2(output, STDOUT_FILENO);
  for (const auto& [name, value] : scenario.environment) ::setenv(name.c_str(), value.c_str(), 1);
  ::setenv("HVD_TEST_GPU_SCHEDULE", schedule.c_str(), 1);
  ::setenv(omitted.empty() ? "HVD_TEST_GPU_COUNT" : "HVD_TEST_GPU_OMIT", omitted.c_str(), 1);
  reinterpret_cast<void (*)()>(dlsym(RTLD_DEFAULT, "hvd_double_begin_anew"))();
  if (scenario.ranks == 1) std::exit(cases() ? 0 : 1);
  ::setenv("WORLD_SIZE", std::to_string(scenario.ranks).c_str(), 1);
  ::setenv("LOCAL_WORLD_SIZE", std::to_string(scenario.ranks).c_str(), 1);
  ::setenv("MASTER_ADDR", "127.0.0.1", 1);
  ::setenv("MASTER_PORT", std::to_string(port).c_str(), 1);
  for (int rank = 0; rank < scenario.ranks; ++rank) {
    if (::fork() != 0) continue;
    ::setenv("RANK", std::to_string(rank).c_str(), 1);
    ::setenv("LOCAL_RANK", std::to_string(rank).c_str(), 1);
    std::exit(cases() ? 0 : 1);
  }
  int status = 0;
  bool well = true;
  while (::wait(&status) > 0) well = well && WIFEXITED(status) && WEXITSTATUS(status) == 0;
  ::_exit(well ? 0 : 1);
}

std::string said_by(const Job& job) {
  std::string text(static_cast<std::size_t>(::lseek(job.output, 0, SEEK_END)), '\0');
  const ssize_t got = ::pread(job.output, text.data(), text.size(), 0);
  text.resize(static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
  ::close(job.output);
  return text;
}

/// The first line that says what is wrong.
std::string reason_in(const std::string& said) {
  std::istringstream lines(said);
  std::string line, last;
  while (std::getline(lines, line)) {
    if (line.starts_with("virtual GPU") || line.starts_with("FAILED")) return line;
    last = line;
  }
  return last;
}

std::vector<Mutation> mutations_of(const std::vector<Scenario>& scenarios,
                                   const std::function<bool()>& cases) {
  std::vector<Mutation> all;
  for (std::size_t i = 0; i < scenarios.size(); ++i) {
    const Job job = start(scenarios[i], cases, kSchedules.front(), "");
    int status = 0;
    ::waitpid(job.process, &status, 0);
    const std::string said = said_by(job);
    if (status != 0) {
      std::printf("%s fails by itself:\n%s\n", scenarios[i].name.c_str(), said.c_str());
      return {};
    }
    std::istringstream lines(said);
    for (std::string line; std::getline(lines, line);)
      if (line.starts_with("site ")) add_site(line, i, all);
  }
  std::sort(all.begin(), all.end(), [](const Mutation& one, const Mutation& other) {
    return std::pair(one.kind, one.place) < std::pair(other.kind, other.place);
  });
  return all;
}

/// Tries them, several at a time.
void try_out(std::vector<Mutation>& all, const std::vector<Scenario>& scenarios,
             const std::function<bool()>& cases) {
  constexpr std::size_t kAtOnce = 3;
  std::map<pid_t, std::pair<Job, Mutation*>> running;
  const auto next = [&] {
    return std::find_if(all.begin(), all.end(), [](const Mutation& mutation) {
      return mutation.found.empty() && !mutation.running &&
             mutation.tries < mutation.scenarios.size() * kSchedules.size();
    });
  };
  for (;;) {
    const auto chosen = next();
    if (running.size() < kAtOnce && chosen != all.end()) {
      std::string omitted;
      for (const std::string& callers : chosen->callers) omitted += callers + "\n";
      const std::size_t next_try = chosen->tries++;
      const Job job = start(scenarios[chosen->scenarios[next_try % chosen->scenarios.size()]],
                            cases, kSchedules.at(next_try / chosen->scenarios.size()), omitted);
      chosen->running = true;
      running[job.process] = {job, &*chosen};
      continue;
    }
    if (running.empty()) return;
    int status = 0;
    const auto ended = running.find(::waitpid(-1, &status, 0));
    if (ended == running.end()) continue;
    auto& [job, mutation] = ended->second;
    const std::string said = said_by(job);
    const std::size_t tried = (mutation->tries - 1) % mutation->scenarios.size();
    if (status != 0) mutation->found = scenarios[mutation->scenarios[tried]].name;
    if (status != 0) mutation->said = said;
    mutation->running = false;
    running.erase(ended);
  }
}

}  // namespace

bool finds_mutations(const std::vector<Scenario>& scenarios, const std::function<bool()>& cases,
                     const std::string& only) {
  std::vector<Mutation> all = mutations_of(scenarios, cases);
  std::erase_if(all, [&](const Mutation& mutation) {
    return (mutation.kind + " " + mutation.place).find(only) == std::string::npos;
  });
  if (all.empty()) return false;
  try_out(all, scenarios, cases);
  std::map<std::string, std::pair<int, int>> counts;  // found, of all
  std::string unknown;
  for (const Mutation& mutation : all) {
    auto& [found, places] = counts[mutation.kind];
    ++places;
    found += mutation.found.empty() ? 0 : 1;
    if (mutation.found.empty())
      unknown += "NOT FOUND: " + mutation.kind + " in " + mutation.place + "\n";
    std::printf("%s in %s: %s\n", mutation.kind.c_str(), mutation.place.c_str(),
                mutation.found.empty()
                    ? "NOT FOUND"
                    : ("found by " + mutation.found + ": " + reason_in(mutation.said)).c_str());
    if (!only.empty()) std::printf("%s\n", mutation.said.c_str());
  }
  for (const auto& [kind, count] : counts)
    std::printf("%s: %d of %d places found\n", kind.c_str(), count.first, count.second);
  std::printf("%s", unknown.c_str());
  return unknown.empty();
}

}  // namespace hvd::gpu::test
