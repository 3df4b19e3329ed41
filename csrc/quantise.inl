// Quantising, to be included behind kernels.inl.

constexpr float kLargestInteger = 127;
// 1.5 * 2^23. A number added to it is rounded to an integer, ties to even, in the last bits of the sum.
constexpr float kRounder = 12582912;
constexpr std::size_t kPiece = 256;

inline std::int32_t bits_of(float value) {
  std::int32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// The largest size of a block's elements; NaN if one is not finite.
inline float largest_of(const float* values, std::size_t block) {
  std::int32_t largest = 0;  // as bits sizes have the same order, and NaN is the largest
  for (std::size_t i = 0; i < block; ++i) largest = std::max(largest, bits_of(values[i]) & 0x7fffffff);
  if (largest >= 0x7f800000) return std::numeric_limits<float>::quiet_NaN();
  float result;
  std::memcpy(&result, &largest, sizeof result);
  return result;
}

// Returns the scale, and leaves in the values what is lost.
inline float quantise_block(float* __restrict values, std::size_t block, std::int8_t* __restrict integers) {
  const float largest = largest_of(values, block);
  if (largest != largest) {
    std::fill_n(values, block, 0.0f);
    std::fill_n(integers, block, std::int8_t{0});
    return largest;
  }
  // A scale is never 0, nor so small that its reciprocal is infinite.
  const float scale = std::max(largest / kLargestInteger, std::numeric_limits<float>::min());
  const float inverse = 1.0f / scale;
  for (std::size_t i = 0; i < block; ++i) {
    const float sum = values[i] * inverse + kRounder;
    integers[i] = static_cast<std::int8_t>(bits_of(sum));
    values[i] -= (sum - kRounder) * scale;
  }
  return scale;
}

template <typename T>
void fill_as(const Filling& filling) {
  const T* gradients = static_cast<const T*>(filling.gradients);
  std::size_t left = filling.size;
  float* values = filling.values;
  for (std::size_t b = 0; b < filling.blocks; ++b, values += filling.block) {
    const std::size_t size = std::min(left, filling.block);
    for (std::size_t i = 0; i < size; ++i) values[i] += Element<T>::load(gradients[i]);
    filling.scales[b] = quantise_block(values, filling.block, filling.integers + b * filling.block);
    gradients += size;
    left -= size;
  }
}

inline void fill_any(const Filling& filling) {
  switch (filling.dtype) {
    case DType::kFloat16: return fill_as<_Float16>(filling);
    case DType::kBFloat16: return fill_as<BFloat16>(filling);
    default: return fill_as<float>(filling);
  }
}

// Up to kPiece elements from `at` on, all of them in the block b.
template <typename T>
inline void mean_piece(const Mean& mean, std::size_t b, std::size_t at, std::size_t size, T* __restrict out) {
  const float count = static_cast<float>(mean.count);
  const float scale = mean.parts[0].scales[b] / count;
  const std::int8_t* integers = mean.parts[0].integers + at;
  float sum[kPiece];
  for (std::size_t i = 0; i < size; ++i) sum[i] = static_cast<float>(integers[i]) * scale;
  for (std::size_t rank = 1; rank < mean.count; ++rank) {
    const float its_scale = mean.parts[rank].scales[b] / count;
    const std::int8_t* its_integers = mean.parts[rank].integers + at;
    for (std::size_t i = 0; i < size; ++i) sum[i] += static_cast<float>(its_integers[i]) * its_scale;
  }
  for (std::size_t i = 0; i < size; ++i) out[i] = Element<T>::store(sum[i]);
}

template <typename T>
void mean_as(const Mean& mean) {
  T* out = static_cast<T*>(mean.out);
  for (std::size_t b = 0, begin = 0; begin < mean.size; ++b, begin += mean.block) {
    const std::size_t end = std::min(begin + mean.block, mean.size);
    for (std::size_t at = begin; at < end; at += kPiece) {
      mean_piece(mean, b, at, std::min(kPiece, end - at), out + at);
    }
  }
}

inline void mean_any(const Mean& mean) {
  switch (mean.dtype) {
    case DType::kFloat16: return mean_as<_Float16>(mean);
    case DType::kBFloat16: return mean_as<BFloat16>(mean);
    default: return mean_as<float>(mean);
  }
}
