#pragma once
/// The ways in which one and the same operation can be asked for, and memory for its tensors.

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "tests/contract/case.h"

namespace hvd::contract {

enum class Scales : std::uint8_t { None, Pre, Post, Both };
inline constexpr double kPrescale = 1.5;
inline constexpr double kPostscale = 0.75;

struct Form {
  bool in_place = false;
  bool arena = false;  ///< the memory
  bool burst = false;  ///< asynchronous, four in flight, in another order on odd ranks if named;
                       ///< otherwise waited for at once
  bool named = true;
  Scales scales = Scales::None;
  SetKind set = SetKind::Global;
  [[nodiscard]] double prescale() const {
    return scales == Scales::Pre || scales == Scales::Both ? kPrescale : 1;
  }
  [[nodiscard]] double postscale() const {
    return scales == Scales::Post || scales == Scales::Both ? kPostscale : 1;
  }
};
std::string text_of(const Form& form);

/// Rows in which any two values of any two columns meet at least once: what is left of the cross
/// product of all forms. Columns that do not apply (`scaled`, `placed`) and memory that there is
/// not keep their first value.
struct Columns {
  bool arena = true, scaled = true, placed = true;
};
std::vector<Form> pairwise_forms(const Columns& columns);

/// 0 elements, a scalar, 1, odd, one less and one more than the widest vectors have, 64 Ki + 1,
/// several dimensions.
const std::vector<Shape>& all_shapes();
inline constexpr std::int64_t kLarge = (std::int64_t{64} << 10) + 1;

/// Memory of a tensor, with a margin behind it that nobody may write to. Null where there are no
/// bytes.
class Memory {
 public:
  Memory() = default;
  Memory(Context& context, bool arena, const Block& content);
  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] bool margin_is_intact() const;

 private:
  std::shared_ptr<void> owner_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace hvd::contract
