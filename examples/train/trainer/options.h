#pragma once
/// Options is the command line of the trainer as a value. It is read once, before the world starts,
/// and knows nothing of ranks or tensors.

/// Reading fails by throwing UsageError, whose text names the option, what was given and what is
/// allowed.

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace examples {

class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Options {
  std::string model = "resnet18";
  std::string weights;  ///< file of a state_dict to begin with; empty: random ones
  std::string stem = "auto";
  std::string dataset = "synthetic";
  std::string data;               ///< folder of the dataset's files
  std::int64_t image_size = 224;  ///< folder: pixels of a side of what the network is given
  std::int64_t resize = 0;        ///< folder: pixels of the shorter side, of which the middle is
                                  ///< evaluated; 0: image_size * 256 / 224
  bool jpeg_scaling =
      true;  ///< folder: large JPEG files may be decoded to a half, quarter or eighth
  std::string bad_images = "refuse";  ///< folder: what to do with files that cannot be used
  std::int64_t classes = 0;           ///< scores of the network; 0: the dataset's classes
  std::int64_t workers = 1;           ///< threads of each rank that make batches ahead; 0: none
  bool pin_memory = true;  ///< batches for a GPU go through page-locked memory, ahead of time
  std::int64_t epochs = 3;
  std::int64_t batch_size = 32;  ///< images per rank and backward pass
  std::string optimizer = "sgd";
  double learning_rate = 0;  ///< used as it is given, whatever the number of ranks; 0: the default
                             ///< of optimizer and model
  double momentum = 0.9;     ///< sgd only
  double weight_decay = 0;
  bool decay_all = true;  ///< false: norms and biases, parameters of one dimension, are left out
  std::string schedule = "none";                   ///< of the learning rate: none, step, cosine
  std::vector<std::int64_t> lr_steps{30, 60, 80};  ///< step: the epochs after which the rate falls
  double lr_gamma = 0.1;                           ///< step: what it is multiplied by
  double warmup_epochs = 0;                        ///< in which the rate grows
  bool scale_lr = false;                           ///< the rate is multiplied by ranks * accumulate
  double label_smoothing = 0;
  double clip_norm = 0;  ///< of all gradients together; 0: they are not clipped
  double ema = 0;        ///< decay of the average of the parameters that is evaluated; 0: none
  std::string strategy =
      "hvd";  ///< hvd, ddp: ranks; data-parallel: replicas in one process; single: one process
  std::int64_t replicas = 0;         ///< data-parallel only; 0: as many as there are GPUs, or cores
  std::string opt_level;             ///< O0 to O3: which weights and products are in 16 bits
  std::string amp = "none";          ///< the 16-bit type; none with O0
  bool sync_bn = false;              ///< batch norm over the batches of all ranks
  bool shard_optimizer = false;      ///< each rank keeps its share of the optimizer's state
  bool shard_gradients = false;      ///< and of the gradients
  bool share_parameters = false;     ///< the ranks of a host have one copy of the parameters
  std::string compression = "none";  ///< of gradients on their way
  std::int64_t powersgd_rank = 2;
  double topk_ratio = 0.01;
  std::int64_t accumulate = 1;  ///< backward passes per step; the gradient is their mean
  std::string checkpoint;       ///< folder; empty: none is written
  std::int64_t checkpoint_steps =
      0;  ///< steps between checkpoints besides the one at the end of each epoch; 0: only that
  bool resume = false;
  std::int64_t max_steps =
      0;  ///< steps after which training ends, counted from the first epoch; 0: no limit
  std::uint64_t seed = 0;
  std::string device = "auto";
  std::int64_t threads = 0;  ///< of LibTorch in each rank; 0: as hvd::init() shares the cores out
  std::int64_t processes =
      0;                  ///< ranks that the program starts by itself; 0: a launcher starts them
  bool evaluate = false;  ///< evaluate only
  std::int64_t print_frequency = 0;  ///< steps between lines; 0: by time
  std::string csv;                   ///< file of the records; empty: none is written
  std::string tensorboard;           ///< folder of event files; empty: none is written
  std::string profile;               ///< file of a profile; empty: none is written
  std::int64_t profile_steps = 5;
  std::int64_t untimed_steps = 0;  ///< first steps that seconds and images per second leave out
  std::string json;                ///< file of the records; empty: none is written
};

/// What --help prints is in `help`, and nothing else is to be done, if that is not empty.
struct CommandLine {
  Options options;
  std::string help;
};
CommandLine parse_command_line(int argc, char** argv);

/// Reads "30,60,80": whole numbers above 0 that rise. Throws std::invalid_argument with what is
/// wrong.
std::vector<std::int64_t> parse_steps(const std::string& text);

}  // namespace examples
