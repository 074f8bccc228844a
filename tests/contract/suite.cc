// The suite: its chapters, in their order.

#include "tests/contract/case.h"

namespace hvd::contract {

Cases all_cases(const Setting& setting) {
  Cases cases;
  if (setting.fuses) {
    add_allreduce_cases(cases, setting);
    add_grouped_allreduce_cases(cases, setting);
    add_gather_cases(cases, setting);
    add_broadcast_cases(cases, setting);
    add_alltoall_cases(cases, setting);
    add_reducescatter_cases(cases, setting);
    add_into_cases(cases, setting);
    add_set_cases(cases, setting);
    add_join_cases(cases, setting);
    add_mismatch_cases(cases, setting);
    add_local_error_cases(cases, setting);
  }
  add_fusion_cases(cases, setting);
  return cases;
}

}  // namespace hvd::contract
