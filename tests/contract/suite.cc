// The suite: its chapters, in their order.

#include "hvd/errors.h"
#include "tests/contract/reduction.h"

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
  }
  return cells;
}

void run_shutdown_cell(Context& context) { context.door.shutdown(); }

}  // namespace hvd::contract
