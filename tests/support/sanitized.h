#pragma once

#ifndef __has_feature
#define __has_feature(feature) 0
#endif

namespace hvd::test {

/// The build has ThreadSanitizer: everything takes 5 to 15 times as long, so tests take fewer
/// cases.
#if defined(__SANITIZE_THREAD__) || __has_feature(thread_sanitizer)
inline constexpr bool kThreadSanitizer = true;
#else
inline constexpr bool kThreadSanitizer = false;
#endif

/// The build has ThreadSanitizer or AddressSanitizer.
#if defined(__SANITIZE_ADDRESS__) || __has_feature(address_sanitizer)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = kThreadSanitizer;
#endif

}  // namespace hvd::test
