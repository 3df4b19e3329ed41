// The kernels against a reference that is written differently: one element at a time, 16-bit floats
// by arithmetic and not by bits.
#include "../kernels.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "../kernels_isa.h"
#include "check.h"

using namespace gradsync;

namespace {

using Bytes = std::vector<std::uint8_t>;
using Kernel = void (*)(const Reduction&, std::size_t, std::size_t);

using Copy = void (*)(std::byte*, const std::byte*, std::size_t);
using Swap = void (*)(std::byte*, std::byte*, const std::byte*, std::size_t);

struct Variant {
  const char* name;
  Kernel reduce;
  Copy copy;
  Swap swap;
};

std::vector<Variant> variants() {
  std::vector<Variant> all{{"the chosen", reduce, copy_bytes, swap_bytes},
                           {"plain", plain::reduce, plain::copy_bytes, plain::swap_bytes}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
    all.push_back({"avx2", avx2::reduce, avx2::copy_bytes, avx2::swap_bytes});
  }
  all.push_back({"moves", reduce, moves::copy_bytes, moves::swap_bytes});
#endif
  return all;
}

// ------------------------------------------------------------------------------- 16-bit floats

struct Format {
  int fraction;      // bits
  int least;         // exponent of normal numbers
  int bias;
  int exponent_bits;
};
constexpr Format kHalf{10, -14, 15, 5};
constexpr Format kBrain{7, -126, 127, 8};

float decode(std::uint16_t bits, const Format& format) {
  const int sign = bits >> 15;
  const int exponent = (bits >> format.fraction) & ((1 << format.exponent_bits) - 1);
  const int fraction = bits & ((1 << format.fraction) - 1);
  double value;
  if (exponent == (1 << format.exponent_bits) - 1) {
    value = fraction ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
  } else if (exponent == 0) {
    value = std::ldexp(fraction, format.least - format.fraction);
  } else {
    value = std::ldexp(fraction + (1 << format.fraction), exponent - format.bias - format.fraction);
  }
  return static_cast<float>(sign ? -value : value);
}

// To the nearest, ties to even: nearbyint() does just that to multiples of the last place.
std::uint16_t encode(float value, const Format& format) {
  const int sign = std::signbit(value) ? 1 << 15 : 0;
  const int top = (1 << format.exponent_bits) - 1;
  if (std::isnan(value)) return static_cast<std::uint16_t>(sign | top << format.fraction | 1 << (format.fraction - 1));
  const double size = std::fabs(static_cast<double>(value));
  if (std::isinf(size)) return static_cast<std::uint16_t>(sign | top << format.fraction);
  const int exponent = size == 0 ? format.least : std::max(std::ilogb(size), format.least);
  const double places = std::nearbyint(std::ldexp(size, format.fraction - exponent));
  double rounded = std::ldexp(places, exponent - format.fraction);
  const double limit = std::ldexp(1.0, top - format.bias);
  if (rounded >= limit) return static_cast<std::uint16_t>(sign | top << format.fraction);
  if (rounded < std::ldexp(1.0, format.least)) {  // subnormal, or zero
    return static_cast<std::uint16_t>(sign | static_cast<int>(std::ldexp(rounded, format.fraction - format.least)));
  }
  const int e = std::ilogb(rounded);
  const int fraction = static_cast<int>(std::ldexp(rounded, format.fraction - e)) - (1 << format.fraction);
  return static_cast<std::uint16_t>(sign | (e + format.bias) << format.fraction | fraction);
}

// ------------------------------------------------------------------------------- the reference

template <typename T>
T take(const void* base, std::size_t index) {
  T value;
  std::memcpy(&value, static_cast<const std::uint8_t*>(base) + index * sizeof(T), sizeof(T));
  return value;
}

template <typename F>
F combine(ReduceOp op, F a, F b) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg: return a + b;
    case ReduceOp::kProduct: return a * b;
    case ReduceOp::kMin: return std::isnan(a) ? a : std::isnan(b) ? b : b < a ? b : a;
    default: return std::isnan(a) ? a : std::isnan(b) ? b : a < b ? b : a;
  }
}

template <typename F>
F reduced(const std::vector<F>& values, ReduceOp op) {
  F result = values[0];
  for (std::size_t i = 1; i < values.size(); ++i) result = combine(op, result, values[i]);
  // The average of two is exact; of more, the factor is rounded once.
  if (op == ReduceOp::kAvg) result = result * static_cast<F>(1.0 / static_cast<double>(values.size()));
  return result;
}

// Integers: in 128 bits, cut at the end of each step.
template <typename T>
T reduced_integer(const std::vector<T>& values, ReduceOp op) {
  __int128 result = values[0];
  for (std::size_t i = 1; i < values.size(); ++i) {
    const __int128 next = values[i];
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAvg: result += next; break;
      case ReduceOp::kProduct: result *= next; break;
      case ReduceOp::kMin: result = next < result ? next : result; break;
      case ReduceOp::kMax: result = next > result ? next : result; break;
      case ReduceOp::kBand: result &= next; break;
      case ReduceOp::kBor: result |= next; break;
      default: result ^= next; break;
    }
    result = static_cast<T>(result);
  }
  if (op == ReduceOp::kAvg) result /= static_cast<__int128>(values.size());
  return static_cast<T>(result);
}

template <typename T, typename Value>
void put(Bytes& out, std::size_t index, Value value) {
  const T stored = static_cast<T>(value);
  std::memcpy(out.data() + index * sizeof(T), &stored, sizeof(T));
}

template <typename T>
std::vector<T> column(const std::vector<Bytes>& sources, int count, std::size_t i) {
  std::vector<T> values;
  for (int s = 0; s < count; ++s) values.push_back(take<T>(sources[static_cast<std::size_t>(s)].data(), i));
  return values;
}

template <typename T>
void expect_integers(const std::vector<Bytes>& sources, int count, ReduceOp op, std::size_t n, Bytes& out) {
  for (std::size_t i = 0; i < n; ++i) put<T>(out, i, reduced_integer(column<T>(sources, count, i), op));
}

void expect_halves(const std::vector<Bytes>& sources, int count, ReduceOp op, std::size_t n, Bytes& out,
                   const Format& format) {
  for (std::size_t i = 0; i < n; ++i) {
    std::vector<float> values;
    for (const std::uint16_t bits : column<std::uint16_t>(sources, count, i)) values.push_back(decode(bits, format));
    put<std::uint16_t>(out, i, encode(reduced(values, op), format));
  }
}

template <typename F>
void expect_floats(const std::vector<Bytes>& sources, int count, ReduceOp op, std::size_t n, Bytes& out) {
  for (std::size_t i = 0; i < n; ++i) put<F>(out, i, reduced(column<F>(sources, count, i), op));
}

Bytes expected(DType dtype, ReduceOp op, const std::vector<Bytes>& sources, int count, std::size_t n) {
  Bytes out(n * size_of(dtype));
  switch (dtype) {
    case DType::kUInt8: expect_integers<std::uint8_t>(sources, count, op, n, out); break;
    case DType::kInt8: expect_integers<std::int8_t>(sources, count, op, n, out); break;
    case DType::kInt16: expect_integers<std::int16_t>(sources, count, op, n, out); break;
    case DType::kInt32: expect_integers<std::int32_t>(sources, count, op, n, out); break;
    case DType::kInt64: expect_integers<std::int64_t>(sources, count, op, n, out); break;
    case DType::kFloat16: expect_halves(sources, count, op, n, out, kHalf); break;
    case DType::kBFloat16: expect_halves(sources, count, op, n, out, kBrain); break;
    case DType::kFloat32: expect_floats<float>(sources, count, op, n, out); break;
    default: expect_floats<double>(sources, count, op, n, out); break;
  }
  return out;
}

bool is_nan(DType dtype, const std::uint8_t* at) {
  switch (dtype) {
    case DType::kFloat16: return std::isnan(decode(take<std::uint16_t>(at, 0), kHalf));
    case DType::kBFloat16: return std::isnan(decode(take<std::uint16_t>(at, 0), kBrain));
    case DType::kFloat32: return std::isnan(take<float>(at, 0));
    case DType::kFloat64: return std::isnan(take<double>(at, 0));
    default: return false;
  }
}

// Equal bits, or both not a number.
bool same(DType dtype, const std::uint8_t* a, const std::uint8_t* b) {
  return std::memcmp(a, b, size_of(dtype)) == 0 || (is_nan(dtype, a) && is_nan(dtype, b));
}

// ------------------------------------------------------------------------------- the data

std::mt19937_64& engine() {
  static std::mt19937_64 generator(20240607);
  return generator;
}

// Any bits at all for integers; for floats numbers of every size, and now and then a special one.
void fill(Bytes& bytes, DType dtype, std::size_t n) {
  static const double kSpecial[] = {0.0, -0.0, INFINITY, -INFINITY, NAN, 1.0, -1.0, 65504.0, 65519.0, 1e-7, 6e-8};
  std::uniform_int_distribution<int> kinds(0, 15);
  std::uniform_int_distribution<int> special(0, 10);
  std::uniform_int_distribution<int> exponents(-10, 6);
  std::normal_distribution<double> normal;
  for (std::size_t i = 0; i < n; ++i) {
    const double value = kinds(engine()) == 0 ? kSpecial[special(engine())]
                                              : std::ldexp(normal(engine()), exponents(engine()));
    switch (dtype) {
      case DType::kFloat16: put<std::uint16_t>(bytes, i, encode(static_cast<float>(value), kHalf)); break;
      case DType::kBFloat16: put<std::uint16_t>(bytes, i, encode(static_cast<float>(value), kBrain)); break;
      case DType::kFloat32: put<float>(bytes, i, value); break;
      case DType::kFloat64: put<double>(bytes, i, value); break;
      default: {
        const std::uint64_t bits = engine()();
        std::memcpy(bytes.data() + i * size_of(dtype), &bits, size_of(dtype));
      }
    }
  }
}

constexpr std::uint8_t kUntouched = 0xa5;

// Where the targets are: apart from the sources, or the sources themselves.
enum class Where { kApart, kInPlace };

struct Case {
  DType dtype;
  ReduceOp op;
  int sources;
  int targets;
  Where where;
  std::size_t begin;
  std::size_t end;
};

void run(const Case& c, const std::vector<Bytes>& data, const Bytes& right, std::size_t n) {
  const std::size_t element = size_of(c.dtype);
  std::vector<Bytes> first;
  for (const Variant& variant : variants()) {
    std::vector<Bytes> sources(data.begin(), data.begin() + c.sources);
    std::vector<Bytes> apart(static_cast<std::size_t>(c.targets), Bytes(n * element, kUntouched));
    std::vector<const void*> from;
    std::vector<void*> to;
    for (const Bytes& source : sources) from.push_back(source.data());
    for (int t = 0; t < c.targets; ++t) {
      const bool in_place = c.where == Where::kInPlace;
      to.push_back(in_place ? sources[static_cast<std::size_t>(t)].data() : apart[static_cast<std::size_t>(t)].data());
    }
    variant.reduce({c.dtype, c.op, from.data(), c.sources, to.data(), c.targets}, c.begin, c.end);
    bool good = true;
    for (int t = 0; t < c.targets; ++t) {
      const auto* got = static_cast<const std::uint8_t*>(to[static_cast<std::size_t>(t)]);
      const bool in_place = got == sources[static_cast<std::size_t>(std::min(t, c.sources - 1))].data();
      const Bytes& original = data[static_cast<std::size_t>(t)];
      for (std::size_t i = 0; i < n; ++i) {
        if (i >= c.begin && i < c.end) {
          good &= same(c.dtype, got + i * element, right.data() + i * element);
        } else {  // outside of the range nothing is touched
          for (std::size_t b = i * element; b < (i + 1) * element; ++b) {
            good &= got[b] == (in_place ? original[b] : kUntouched);
          }
        }
      }
      // All targets, and all variants, have the same bits; also those of a NaN.
      if (t > 0) good &= std::memcmp(got + c.begin * element, static_cast<std::uint8_t*>(to[0]) + c.begin * element,
                                     (c.end - c.begin) * element) == 0;
      if (first.empty()) first.emplace_back(got, got + n * element);
      good &= std::memcmp(got + c.begin * element, first[0].data() + c.begin * element,
                          (c.end - c.begin) * element) == 0;
    }
    check::checks.fetch_add(1);
    if (!good) {
      check::report(__FILE__, __LINE__,
                    std::string(variant.name) + ": " + name_of(c.op) + " of " + name_of(c.dtype) + ", " +
                        std::to_string(c.sources) + " sources, " + std::to_string(c.targets) + " targets, where " +
                        std::to_string(static_cast<int>(c.where)) + ", [" + std::to_string(c.begin) + ", " +
                        std::to_string(c.end) + ")");
    }
  }
}

TEST(every_kernel_agrees_with_the_reference) {
  struct Range { std::size_t begin, end; };
  std::vector<Range> ranges = {{0, 0}, {0, 1}, {1, 2}, {3, 7}, {0, 31}, {5, 133}, {1, 1023},
                               {0, 1024}, {7, 1032}, {1023, 2050}, {0, 2051}};
  if (kSanitized) ranges = {{0, 0}, {1, 2}, {3, 36}, {0, 133}, {1, 134}};
  const std::size_t n = ranges.back().end;
  for (int d = static_cast<int>(DType::kUInt8); d < static_cast<int>(DType::kCount); ++d) {
    const auto dtype = static_cast<DType>(d);
    std::vector<Bytes> data(9, Bytes(n * size_of(dtype)));
    for (Bytes& bytes : data) fill(bytes, dtype, n);
    for (int o = static_cast<int>(ReduceOp::kSum); o < static_cast<int>(ReduceOp::kCount); ++o) {
      const auto op = static_cast<ReduceOp>(o);
      if (!can_reduce(dtype, op)) continue;
      for (int sources = 1; sources <= 9; ++sources) {  // 2 to 8 may have a pass of their own
        const Bytes right = expected(dtype, op, data, sources, n);
        for (int targets = 1; targets <= std::max(2, sources); ++targets) {
          if (sources > 5 && targets > 2 && targets < sources) continue;
          for (const Range& range : ranges) {
            const Case c{dtype, op, sources, targets, Where::kApart, range.begin, range.end};
            run(c, data, right, n);
            if (targets <= sources) run({dtype, op, sources, targets, Where::kInPlace, range.begin, range.end}, data, right, n);
          }
        }
      }
    }
  }
}

TEST(a_copy_is_whole_and_touches_nothing_beside_it) {
  constexpr std::size_t kMost = 10000, kMargin = 300;
  std::vector<std::byte> from(kMost + 2 * kMargin);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 31 + i / 256);
  for (const Variant& variant : variants()) {
    for (const std::size_t bytes : {0, 1, 63, 64, 4095, 4096, 4097, 4160, 4161, 9999, 10000}) {
      for (const std::size_t shift : {0, 1, 7, 33}) {
        std::vector<std::byte> to(from.size(), std::byte{0x5a}), right = to;
        std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(shift), bytes, right.begin() + kMargin);
        variant.copy(to.data() + kMargin, from.data() + shift, bytes);
        CHECK(to == right);
      }
    }
  }
  copy_bytes(nullptr, nullptr, 0);
}

TEST(a_swap_takes_what_was_there_and_puts_what_comes) {
  constexpr std::size_t kMost = 10000, kMargin = 300;
  std::vector<std::byte> was(kMost + 2 * kMargin), comes(was.size());
  for (std::size_t i = 0; i < was.size(); ++i) was[i] = static_cast<std::byte>(i * 31), comes[i] = static_cast<std::byte>(i * 7 + 1);
  for (const Variant& variant : variants()) {
    for (const std::size_t bytes : {0, 1, 63, 64, 65, 128, 999, 4097, 10000}) {
      for (const std::size_t shift : {0, 1, 33}) {
        std::vector<std::byte> taken(was.size(), std::byte{0x5a}), slot = was, right_taken = taken, right_slot = was;
        std::copy_n(was.begin() + kMargin, bytes, right_taken.begin() + static_cast<std::ptrdiff_t>(shift));
        std::copy_n(comes.begin() + static_cast<std::ptrdiff_t>(shift), bytes, right_slot.begin() + kMargin);
        variant.swap(taken.data() + shift, slot.data() + kMargin, comes.data() + shift, bytes);
        CHECK(taken == right_taken);
        CHECK(slot == right_slot);
      }
    }
  }
}

TEST(bitwise_operations_are_for_integers_and_nothing_reduces_bytes) {
  for (int d = 0; d <= static_cast<int>(DType::kCount); ++d) {
    for (int o = 0; o <= static_cast<int>(ReduceOp::kCount); ++o) {
      const bool is_integer = d >= 1 && d <= 5;
      const bool is_float = d >= 6 && d <= 9;
      const bool right = (is_integer && o >= 1 && o <= 8) || (is_float && o >= 1 && o <= 5);
      CHECK_EQUAL(can_reduce(static_cast<DType>(d), static_cast<ReduceOp>(o)), right);
    }
  }
}

// One source: what is loaded is stored. Every number of 16 bits stays as it is.
TEST(every_number_of_16_bits_survives_and_a_nan_stays_one) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    std::vector<std::uint16_t> all(65536);
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
    std::vector<std::vector<std::uint16_t>> results;
    for (const Variant& variant : variants()) {
      std::vector<std::uint16_t> result(65536);
      const void* source = all.data();
      void* target = result.data();
      variant.reduce({dtype, ReduceOp::kSum, &source, 1, &target, 1}, 0, all.size());
      bool good = true;
      for (std::size_t i = 0; i < all.size(); ++i) {
        good &= same(dtype, reinterpret_cast<std::uint8_t*>(&result[i]), reinterpret_cast<std::uint8_t*>(&all[i]));
      }
      CHECK(good);
      results.push_back(std::move(result));
    }
    for (const auto& result : results) CHECK(result == results[0]);
  }
}

// Two numbers whose sum lies between two others: at the middle the even one wins.
TEST(sums_of_16_bits_round_to_the_nearest_and_ties_to_even) {
  struct Sum { float a, b, right; };
  const auto check_sums = [](DType dtype, const Format& format, const std::vector<Sum>& sums) {
    for (const Sum& sum : sums) {
      for (const Variant& variant : variants()) {
        const std::uint16_t a = encode(sum.a, format), b = encode(sum.b, format);
        std::uint16_t result = 0;
        const void* sources[] = {&a, &b};
        void* target = &result;
        variant.reduce({dtype, ReduceOp::kSum, sources, 2, &target, 1}, 0, 1);
        CHECK_EQUAL(decode(result, format), sum.right);
      }
    }
  };
  check_sums(DType::kFloat16, kHalf,
             {{2048, 1, 2048}, {2050, 1, 2052}, {2048, 1.5f, 2050}, {65504, 15, 65504},
              {65504, 16, INFINITY}, {-65504, -16, -INFINITY}});
  check_sums(DType::kBFloat16, kBrain, {{256, 1, 256}, {258, 1, 260}, {256, 1.5f, 258}, {-256, -1, -256}});
}

TEST(sums_of_16_bits_are_added_up_in_float32) {
  // In float16 every step would round 2048 + 1 back to 2048.
  const std::uint16_t large = encode(2048, kHalf), one = encode(1, kHalf);
  const void* sources[] = {&large, &one, &one, &one, &one};
  for (const Variant& variant : variants()) {
    std::uint16_t result = 0;
    void* target = &result;
    variant.reduce({DType::kFloat16, ReduceOp::kSum, sources, 5, &target, 1}, 0, 1);
    CHECK_EQUAL(decode(result, kHalf), 2052.0f);
  }
}

TEST(a_nan_of_any_source_wins_in_min_and_max) {
  for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    for (int nan_at = 0; nan_at < 3; ++nan_at) {
      float values[] = {1, -2, 3};
      values[nan_at] = NAN;
      const void* sources[] = {&values[0], &values[1], &values[2]};
      for (const Variant& variant : variants()) {
        float result = 0;
        void* target = &result;
        variant.reduce({DType::kFloat32, op, sources, 3, &target, 1}, 0, 1);
        CHECK(std::isnan(result));
      }
    }
  }
}

// The largest group there may be: its size does not fit into the smallest integers.
template <typename T>
void average_of_many(DType dtype, int count, T value, T right) {
  std::vector<T> values(static_cast<std::size_t>(count), T(0));
  values[0] = value;
  std::vector<const void*> sources;
  for (const T& each : values) sources.push_back(&each);
  for (const Variant& variant : variants()) {
    T result{};
    void* target = &result;
    variant.reduce({dtype, ReduceOp::kAvg, sources.data(), count, &target, 1}, 0, 1);
    CHECK_EQUAL(static_cast<long>(result), static_cast<long>(right));
  }
}

TEST(averages_of_integers_are_cut_to_zero_in_groups_of_any_size) {
  average_of_many<std::int8_t>(DType::kInt8, 2, -7, -3);
  average_of_many<std::int8_t>(DType::kInt8, 200, 100, 0);
  average_of_many<std::int8_t>(DType::kInt8, 256, -128, 0);
  average_of_many<std::uint8_t>(DType::kUInt8, 255, 255, 1);
  average_of_many<std::uint8_t>(DType::kUInt8, 256, 255, 0);
  average_of_many<std::int16_t>(DType::kInt16, 256, -512, -2);
  average_of_many<std::int64_t>(DType::kInt64, 3, std::int64_t{1} << 62, (std::int64_t{1} << 62) / 3);
}

}  // namespace
