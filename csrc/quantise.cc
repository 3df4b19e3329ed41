#include "quantise.h"

#include <algorithm>
#include <string>

#include "error.h"
#include "kernels_isa.h"

namespace gradsync {
namespace {

struct Kernels {
  void (*fill)(const Filling&);
  void (*mean)(const Mean&);
};

const Kernels& kernels() {
  static const Kernels best = [] {
#if defined(__x86_64__)
    if (has_avx2()) return Kernels{avx2::fill, avx2::mean};
#endif
    return Kernels{plain::fill, plain::mean};
  }();
  return best;
}

Part part_of(const std::byte* message, std::size_t scales, std::size_t integers) {
  return {reinterpret_cast<const float*>(message + scales),
          reinterpret_cast<const std::int8_t*>(message + integers)};
}

void place_parts(std::vector<Part>& places, const std::vector<const std::byte*>& messages,
                 std::size_t scales, std::size_t integers) {
  std::transform(messages.begin(), messages.end(), places.begin(),
                 [&](const std::byte* message) { return part_of(message, scales, integers); });
}

void check(const Division& division) {
  if (division.dtype != DType::kFloat32 && division.dtype != DType::kFloat16 &&
      division.dtype != DType::kBFloat16) {
    throw InvalidError(std::string("gradients of ") + name_of(division.dtype) + " cannot be quantised here");
  }
  constexpr std::size_t kMost = std::size_t{1} << 48;  // no product below ends beyond std::size_t
  if (division.block == 0 || division.block % sizeof(float) != 0 || division.shares == 0 ||
      division.block > kMost || division.shares > kMost / division.block || division.length > kMost ||
      division.length % (division.block * division.shares) != 0) {
    throw InvalidError(std::to_string(division.length) + " elements are not " +
                       std::to_string(division.shares) + " equal shares of blocks of " +
                       std::to_string(division.block));
  }
}

}  // namespace

Quantiser::Quantiser(const Division& division, const std::vector<Stretch>& stretches) : division_(division) {
  gradsync::check(division);
  share_ = division.length / division.shares;
  share_scales_ = share_ / division.block * sizeof(float);
  std::size_t end = 0;
  for (const Stretch& stretch : stretches) {
    check(stretch, end);
    add_runs({0, end, 0}, stretch.at);
    end = stretch.at + (stretch.size + division.block - 1) / division.block * division.block;
    add_runs(stretch, end);
  }
  add_runs({0, end, 0}, division.length);
}

void Quantiser::fill(const void* gradients, float* residual, std::byte* message) const {
  const auto* first = static_cast<const std::byte*>(gradients);
  for (const Run& run : runs_) {
    kernels().fill({division_.dtype, first + run.start * size_of(division_.dtype), run.size,
                    residual + run.at, division_.block, run.blocks,
                    reinterpret_cast<float*>(message + run.scales),
                    reinterpret_cast<std::int8_t*>(message + run.integers)});
  }
}

void Quantiser::mean(const std::vector<const std::byte*>& messages, void* gradients) const {
  if (messages.empty()) throw InvalidError("there is no mean of nothing");
  auto* first = static_cast<std::byte*>(gradients);
  std::vector<Part> places(messages.size());
  for (const Run& run : runs_) {
    place_parts(places, messages, run.scales, run.integers);
    kernels().mean({places.data(), places.size(), division_.block, division_.dtype,
                    first + run.start * size_of(division_.dtype), run.size});
  }
}

void Quantiser::requantise(const std::vector<const std::byte*>& parts, std::size_t share, float* residual,
                           std::byte* answer) const {
  if (parts.empty() || share >= division_.shares) {
    throw InvalidError("there is no mean of " + std::to_string(parts.size()) + " parts of share " +
                       std::to_string(share) + " of " + std::to_string(division_.shares));
  }
  const std::size_t block = division_.block;
  const auto world = static_cast<float>(parts.size());
  std::vector<Part> places(parts.size());
  std::vector<float> mean(block);
  for (std::size_t b = 0; b < share_ / block; ++b) {
    const std::size_t scales = b * sizeof(float);
    const std::size_t integers = share_scales_ + b * block;
    place_parts(places, parts, scales, integers);
    kernels().mean({places.data(), places.size(), block, DType::kFloat32, mean.data(), block});
    kernels().fill({DType::kFloat32, nullptr, 0, mean.data(), block, 1,
                    reinterpret_cast<float*>(answer + scales),
                    reinterpret_cast<std::int8_t*>(answer + integers)});
    float* own = residual + share * share_ + b * block;
    for (std::size_t i = 0; i < block; ++i) own[i] += mean[i] * world;
  }
}

void Quantiser::check(const Stretch& stretch, std::size_t begin) const {
  const auto fits = [](std::size_t start, std::size_t size, std::size_t whole) {
    return size <= whole && start <= whole - size;
  };
  if (stretch.at % division_.block != 0 || stretch.at < begin ||
      !fits(stretch.start, stretch.size, division_.gradients) ||
      !fits(stretch.at, stretch.size, division_.length)) {
    throw InvalidError("the gradients [" + std::to_string(stretch.start) + ", +" +
                       std::to_string(stretch.size) + ") cannot lie at " + std::to_string(stretch.at) +
                       " of the blocks");
  }
}

// Cuts the blocks up to `end`, which begin with a stretch, where shares do.
void Quantiser::add_runs(const Stretch& stretch, std::size_t end) {
  auto [start, at, size] = stretch;
  while (at < end) {
    const std::size_t share = at / share_;
    const std::size_t length = std::min(end, (share + 1) * share_) - at;
    const std::size_t own = std::min(size, length);
    const std::size_t parcel = share * (share_ + share_scales_);
    const std::size_t within = at - share * share_;
    runs_.push_back({start, at, own, length / division_.block,
                     parcel + within / division_.block * sizeof(float), parcel + share_scales_ + within});
    start += own;
    size -= own;
    at += length;
  }
}

}  // namespace gradsync
