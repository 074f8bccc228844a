// The suite: its chapters, in their order.

#include "tests/contract/cell.h"

namespace hvd::contract {

Cells all_cells(const Setting& setting) {
  Cells cells;
  if (setting.fuses) {
    add_allreduce_cells(cells, setting);
    add_grouped_allreduce_cells(cells, setting);
    add_gather_cells(cells, setting);
    add_broadcast_cells(cells, setting);
    add_alltoall_cells(cells, setting);
    add_reducescatter_cells(cells, setting);
    add_set_cells(cells, setting);
    add_join_cells(cells, setting);
    add_mismatch_cells(cells, setting);
    add_local_error_cells(cells, setting);
  }
  add_fusion_cells(cells, setting);
  return cells;
}

}  // namespace hvd::contract
