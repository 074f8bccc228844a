#include "hvd/base/text.h"

#include <algorithm>

namespace hvd {

namespace {

/// Length of the character that `text` begins with, 0 if it is not UTF-8: no overlong forms, no
/// surrogates, nothing above U+10FFFF.
std::size_t utf8_length(std::string_view text) {
  const auto byte = [&](std::size_t i) {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U;
  };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  if (first < 0xC2 || first > 0xF4) return 0;
  const std::size_t length = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
  const unsigned least = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
  const unsigned most = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
  if (byte(1) < least || byte(1) > most) return 0;
  for (std::size_t i = 2; i < length; ++i)
    if ((byte(i) & 0xC0U) != 0x80U) return 0;
  return length;
}

}  // namespace

std::string json_string(std::string_view text, std::size_t most) {
  std::string out = "\"";
  std::size_t taken = 0;
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    const std::size_t step = std::max<std::size_t>(length, 1);
    taken += step;
    if (taken > most) {
      out += "...";
      break;
    }
    const char c = text.front();
    if (length == 0) {
      out += "\\ufffd";
    } else if (length == 1 && (static_cast<unsigned char>(c) < 0x20 || c == 0x7f)) {
      out += formatted("\\u{:04x}", static_cast<unsigned>(c));
    } else {
      if (c == '"' || c == '\\') out += '\\';
      out += text.substr(0, length);
    }
    text.remove_prefix(step);
  }
  return out + '"';
}

std::string rank_list(std::span<const int> ranks) {
  std::string text;
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    const char* separator = text.empty() ? "" : ", ";
    text += last == i ? formatted("{}{}", separator, ranks[i])
                      : formatted("{}{}-{}", separator, ranks[i], ranks[last]);
    i = last + 1;
  }
  return text;
}

}  // namespace hvd
