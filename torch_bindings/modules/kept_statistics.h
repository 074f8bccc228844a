#pragma once
/// Running statistics of batch norm while a part of the model is computed again (torch_bindings/modules/activation_checkpoint.h): they have
/// had this batch already. What LibTorch's operations make of them meanwhile is undone at the end; SyncBatchNorm asks. Thread: a scope
/// belongs to the thread that made it. Owns copies of the statistics. Throws nothing.

namespace hvd::detail {

/// While one lives, batch_norm and instance_norm change their running statistics, and modules their counters of batches, for that time
/// only.
class [[nodiscard]] KeptStatistics {
 public:
  KeptStatistics();
  ~KeptStatistics();
  KeptStatistics(const KeptStatistics&) = delete;
  KeptStatistics& operator=(const KeptStatistics&) = delete;
  /// Returns whether one lives in this thread.
  [[nodiscard]] static bool are_kept();
};

}  // namespace hvd::detail
