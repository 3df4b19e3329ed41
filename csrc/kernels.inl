// The kernels, to be included once for each instruction set, inside a namespace of its own.

constexpr std::size_t kBlock = 1024;  // elements that stay in the first-level cache meanwhile

struct BFloat16 {
  std::uint16_t bits;
};

// How an element is read, computed with, and written.
template <typename T>
struct Element {
  using Compute = T;
  static Compute load(T value) { return value; }
  static T store(Compute value) { return value; }
};

template <>
struct Element<_Float16> {
  using Compute = float;
  static float load(_Float16 value) { return static_cast<float>(value); }
  static _Float16 store(float value) { return static_cast<_Float16>(value); }
};

template <>
struct Element<BFloat16> {
  using Compute = float;
  static float load(BFloat16 value) {
    const std::uint32_t bits = static_cast<std::uint32_t>(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
  }
  static BFloat16 store(float value) {  // to the nearest, ties to even; NaN stays NaN
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const std::uint32_t nan = (bits >> 16) | 0x40u;
    return {static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded)};
  }
};

struct Sum {
  template <typename C>
  static C combine(C a, C b) {
    if constexpr (std::is_integral_v<C>) {  // wraps around, as torch's does
      using Unsigned = std::make_unsigned_t<C>;
      return static_cast<C>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
    } else {
      return a + b;
    }
  }
};
struct Product {
  template <typename C>
  static C combine(C a, C b) {
    if constexpr (std::is_integral_v<C>) {
      return static_cast<C>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
    } else {
      return a * b;
    }
  }
};
struct Min {
  template <typename C>
  static C combine(C a, C b) {
    return b < a || b != b ? b : a;
  }
};
struct Max {
  template <typename C>
  static C combine(C a, C b) {
    return a < b || b != b ? b : a;
  }
};
struct Band {
  template <typename C>
  static C combine(C a, C b) { return static_cast<C>(a & b); }
};
struct Bor {
  template <typename C>
  static C combine(C a, C b) { return static_cast<C>(a | b); }
};
struct Bxor {
  template <typename C>
  static C combine(C a, C b) { return static_cast<C>(a ^ b); }
};

template <typename T, bool kAverages>
inline T finish(typename Element<T>::Compute value, int count, typename Element<T>::Compute scale) {
  if constexpr (!kAverages) {
    return Element<T>::store(value);
  } else if constexpr (std::is_integral_v<T>) {
    using Wide = std::common_type_t<T, int>;  // which holds any count
    return static_cast<T>(static_cast<Wide>(value) / static_cast<Wide>(count));
  } else {
    return Element<T>::store(value * scale);
  }
}

// A few sources, in one pass. Sums of floats, which is what gradients are, go a cache line of every source
// at a time: that takes two thirds of the time of narrower steps.
template <typename T, typename Op, bool kAverages, int kSources, int kTargets>
void reduce_few(const Reduction& reduction, std::size_t begin, std::size_t end) {
  using E = Element<T>;
  const auto scale = static_cast<typename E::Compute>(1.0 / kSources);
  const T* sources[kSources];
  T* targets[kTargets];
  for (int i = 0; i < kSources; ++i) sources[i] = static_cast<const T*>(reduction.sources[i]);
  for (int i = 0; i < kTargets; ++i) targets[i] = static_cast<T*>(reduction.targets[i]);
  if constexpr (std::is_same_v<T, typename E::Compute> && !std::is_integral_v<T> && std::is_same_v<Op, Sum>) {
    typedef T Vector __attribute__((vector_size(kVectorBytes), aligned(alignof(T)), may_alias));
    constexpr int kVectors = 64 / kVectorBytes;
    constexpr std::size_t kAhead = 512 / sizeof(T);
    for (; end - begin >= 64 / sizeof(T); begin += 64 / sizeof(T)) {
      Vector sums[kVectors];
#pragma GCC unroll 8
      for (int i = 0; i < kSources; ++i) {
        if constexpr (kTargets == kSources) __builtin_prefetch(sources[i] + begin + kAhead, 1);  // in place
        const Vector* line = reinterpret_cast<const Vector*>(sources[i] + begin);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sums[v] = i == 0 ? line[v] : sums[v] + line[v];
      }
#pragma GCC unroll 8
      for (int i = 0; i < kTargets; ++i) {
        Vector* line = reinterpret_cast<Vector*>(targets[i] + begin);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) line[v] = kAverages ? sums[v] * scale : sums[v];
      }
    }
  }
  // Iterations do not depend on each other: a target is a source at the same element, or elsewhere.
#pragma GCC ivdep
  for (std::size_t at = begin; at < end; ++at) {
    auto value = E::load(sources[0][at]);
#pragma GCC unroll 8
    for (int i = 1; i < kSources; ++i) value = Op::combine(value, E::load(sources[i][at]));
    const T result = finish<T, kAverages>(value, kSources, scale);
#pragma GCC unroll 8
    for (int i = 0; i < kTargets; ++i) targets[i][at] = result;
  }
}

template <typename T, typename Op, bool kAverages>
void reduce_many(const Reduction& reduction, std::size_t begin, std::size_t end) {
  using E = Element<T>;
  using C = typename E::Compute;
  const int count = reduction.source_count;
  const C scale = std::is_integral_v<T> ? C(1) : static_cast<C>(1.0 / count);
  C block[kBlock];
  T result[kBlock];
  for (std::size_t at = begin; at < end; at += kBlock) {
    const std::size_t length = std::min(kBlock, end - at);
    const T* source = static_cast<const T*>(reduction.sources[0]) + at;
    for (std::size_t i = 0; i < length; ++i) block[i] = E::load(source[i]);
    for (int rank = 1; rank < count; ++rank) {
      source = static_cast<const T*>(reduction.sources[rank]) + at;
      for (std::size_t i = 0; i < length; ++i) block[i] = Op::combine(block[i], E::load(source[i]));
    }
    for (std::size_t i = 0; i < length; ++i) {
      result[i] = finish<T, kAverages>(block[i], count, scale);
    }
    for (int target = 0; target < reduction.target_count; ++target) {
      std::memcpy(static_cast<T*>(reduction.targets[target]) + at, result, length * sizeof(T));
    }
  }
}

// Into one tensor, or in place.
template <typename T, typename Op, bool kAverages, int kSources>
void reduce_few(const Reduction& reduction, std::size_t begin, std::size_t end) {
  if (reduction.target_count == kSources) {
    return reduce_few<T, Op, kAverages, kSources, kSources>(reduction, begin, end);
  }
  if (reduction.target_count == 1) return reduce_few<T, Op, kAverages, kSources, 1>(reduction, begin, end);
  reduce_many<T, Op, kAverages>(reduction, begin, end);
}

template <typename T, typename Op, bool kAverages = false>
void reduce_as(const Reduction& reduction, std::size_t begin, std::size_t end) {
  if (reduction.source_count == 2) return reduce_few<T, Op, kAverages, 2>(reduction, begin, end);
  if constexpr (!std::is_integral_v<T> && std::is_same_v<Op, Sum>) {
    switch (reduction.source_count) {
      case 3: return reduce_few<T, Op, kAverages, 3>(reduction, begin, end);
      case 4: return reduce_few<T, Op, kAverages, 4>(reduction, begin, end);
      case 5: return reduce_few<T, Op, kAverages, 5>(reduction, begin, end);
      case 6: return reduce_few<T, Op, kAverages, 6>(reduction, begin, end);
      case 7: return reduce_few<T, Op, kAverages, 7>(reduction, begin, end);
      case 8: return reduce_few<T, Op, kAverages, 8>(reduction, begin, end);
      default: break;
    }
  }
  reduce_many<T, Op, kAverages>(reduction, begin, end);
}

template <typename T>
void reduce_numbers(const Reduction& reduction, std::size_t begin, std::size_t end) {
  switch (reduction.op) {
    case ReduceOp::kSum: return reduce_as<T, Sum>(reduction, begin, end);
    case ReduceOp::kAvg: return reduce_as<T, Sum, true>(reduction, begin, end);
    case ReduceOp::kProduct: return reduce_as<T, Product>(reduction, begin, end);
    case ReduceOp::kMin: return reduce_as<T, Min>(reduction, begin, end);
    case ReduceOp::kMax: return reduce_as<T, Max>(reduction, begin, end);
    case ReduceOp::kBand:
      if constexpr (std::is_integral_v<T>) return reduce_as<T, Band>(reduction, begin, end);
      break;
    case ReduceOp::kBor:
      if constexpr (std::is_integral_v<T>) return reduce_as<T, Bor>(reduction, begin, end);
      break;
    case ReduceOp::kBxor:
      if constexpr (std::is_integral_v<T>) return reduce_as<T, Bxor>(reduction, begin, end);
      break;
    default: break;
  }
}

inline void reduce_any(const Reduction& reduction, std::size_t begin, std::size_t end) {
  switch (reduction.dtype) {
    case DType::kUInt8: return reduce_numbers<std::uint8_t>(reduction, begin, end);
    case DType::kInt8: return reduce_numbers<std::int8_t>(reduction, begin, end);
    case DType::kInt16: return reduce_numbers<std::int16_t>(reduction, begin, end);
    case DType::kInt32: return reduce_numbers<std::int32_t>(reduction, begin, end);
    case DType::kInt64: return reduce_numbers<std::int64_t>(reduction, begin, end);
    case DType::kFloat16: return reduce_numbers<_Float16>(reduction, begin, end);
    case DType::kBFloat16: return reduce_numbers<BFloat16>(reduction, begin, end);
    case DType::kFloat32: return reduce_numbers<float>(reduction, begin, end);
    case DType::kFloat64: return reduce_numbers<double>(reduction, begin, end);
    default: break;
  }
}
