// Gradients as 8-bit integers with a scale for each block: no ranks, no synchronisation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels.h"

namespace gradsync {

// Elements that are neighbours both among the gradients and among the blocks.
struct Stretch {
  std::size_t start;  // among the gradients
  std::size_t at;     // among the blocks, where a block begins
  std::size_t size;
};

// Where the gradients of one bucket lie among blocks, which are divided into equal shares.
struct Division {
  DType dtype;            // of the gradients: float32 or 16 bits. All else is float32.
  std::size_t gradients;  // elements
  std::size_t length;     // of the blocks, in elements
  std::size_t block;
  std::size_t shares;
};

// Quantises the blocks of one bucket. A message holds, for each share, the scales of its blocks and
// then their integers. Nothing is remembered from call to call, so threads can share it.
class Quantiser {
 public:
  // The stretches come in the order of their blocks, none of which has two. InvalidError if anything
  // lies outside of the division.
  Quantiser(const Division& division, const std::vector<Stretch>& stretches);

  // Adds the gradients to the residual, quantises that into the message, and leaves what it has lost.
  // The scale of a block that is infinite or undefined is NaN, and nothing is left of it.
  void fill(const void* gradients, float* residual, std::byte* message) const;

  // Makes the mean of the messages, added in their order, the gradients.
  void mean(const std::vector<const std::byte*>& messages, void* gradients) const;

  // The mean of parts, of which each is one share in a message, quantised again into the answer. What
  // this loses is added to the share's residual, times the number of parts.
  void requantise(const std::vector<const std::byte*>& parts, std::size_t share, float* residual,
                  std::byte* answer) const;

  std::size_t length() const { return division_.length; }

 private:
  // Blocks of one share that follow each other, and the gradients at their beginning.
  struct Run {
    std::size_t start;
    std::size_t at;
    std::size_t size;
    std::size_t blocks;
    std::size_t scales;    // bytes, in a message
    std::size_t integers;
  };

  void check(const Stretch& stretch, std::size_t begin) const;
  void add_runs(const Stretch& stretch, std::size_t end);

  Division division_;
  std::size_t share_ = 0;        // elements
  std::size_t share_scales_ = 0;  // bytes
  std::vector<Run> runs_;
};

}  // namespace gradsync
