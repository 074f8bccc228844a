#pragma once
/// This is what libjpeg does on errors: it jumps back to where setjmp() was called. The frames that are jumped over have no destructors.

#include <csetjmp>
#include <cstdio>  // libjpeg needs it

#include <jpeglib.h>

namespace examples {

struct JpegErrors {
  jpeg_error_mgr base;
  std::jmp_buf back;
  char words[JMSG_LENGTH_MAX];

  /// Returns what `err` of libjpeg's structures is to be. The caller then calls setjmp(back) wherever it calls libjpeg.
  jpeg_error_mgr* install() {
    jpeg_std_error(&base);
    base.error_exit = [](j_common_ptr info) {
      auto* errors = reinterpret_cast<JpegErrors*>(info->err);
      errors->base.format_message(info, errors->words);
      std::longjmp(errors->back, 1);
    };
    base.emit_message = [](j_common_ptr, int) {};
    return &base;
  }
};

}  // namespace examples
