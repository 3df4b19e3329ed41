// The quantiser against a reference that is written differently: one block at a time, with nearbyint().
#include "../quantise.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "../error.h"
#include "../kernels_isa.h"
#include "check.h"

using namespace gradsync;

namespace {

constexpr float kTiny = std::numeric_limits<float>::min();

struct Variant {
  const char* name;
  void (*fill)(const Filling&);
  void (*mean)(const Mean&);
};

std::vector<Variant> variants() {
  std::vector<Variant> all{{"plain", plain::fill, plain::mean}};
#if defined(__x86_64__)
  if (has_avx2()) all.push_back({"avx2", avx2::fill, avx2::mean});
#endif
  return all;
}

std::mt19937& engine() {
  static std::mt19937 generator(20240607);
  return generator;
}

// Numbers of every size, zeros and denormals among them; `special` makes some infinite or undefined.
std::vector<float> numbers(std::size_t count, bool special) {
  std::uniform_int_distribution<int> kinds(0, 40);
  std::uniform_int_distribution<int> exponents(-140, 100);
  std::normal_distribution<float> normal;
  std::vector<float> result(count);
  const int exponent = exponents(engine());
  for (float& value : result) {
    const int kind = kinds(engine());
    value = kind == 0 ? 0.0f : std::ldexp(normal(engine()), exponent - kind % 8);
    if (special && kind == 1) value = INFINITY;
    if (special && kind == 2) value = NAN;
  }
  return result;
}

struct Quantised {
  float scale;
  std::vector<std::int8_t> integers;
  std::vector<float> left;
};

Quantised reference(const std::vector<float>& block) {
  float largest = 0;
  bool finite = true;
  for (const float value : block) {
    largest = std::fmax(largest, std::fabs(value));
    finite &= std::isfinite(value);
  }
  Quantised result{NAN, std::vector<std::int8_t>(block.size()), std::vector<float>(block.size())};
  if (!finite) return result;
  result.scale = std::fmax(largest / 127.0f, kTiny);
  for (std::size_t i = 0; i < block.size(); ++i) {
    const float integer = std::nearbyint(block[i] * (1.0f / result.scale));
    result.integers[i] = static_cast<std::int8_t>(integer);
    result.left[i] = block[i] - integer * result.scale;
  }
  return result;
}

bool same(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](float x, float y) { return same(x, y); });
}

TEST(every_variant_quantises_as_the_reference_does) {
  for (const std::size_t block : {8, 24, 256, 1000}) {
    for (int round = 0; round < 40; ++round) {
      const std::vector<float> values = numbers(block, round % 4 == 3);
      const Quantised right = reference(values);
      for (const Variant& variant : variants()) {
        Quantised found{0, std::vector<std::int8_t>(block), values};
        variant.fill({DType::kFloat32, nullptr, 0, found.left.data(), block, 1, &found.scale,
                      found.integers.data()});
        CHECK(same(found.scale, right.scale));
        CHECK(found.integers == right.integers);
        CHECK(same(found.left, right.left));
      }
    }
  }
}

TEST(half_a_step_is_rounded_to_the_even_integer) {
  for (const Variant& variant : variants()) {
    std::vector<float> values{127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -126.5};
    std::vector<std::int8_t> integers(8);
    float scale = 0;
    variant.fill({DType::kFloat32, nullptr, 0, values.data(), 8, 1, &scale, integers.data()});
    CHECK_EQUAL(scale, 1.0f);
    CHECK((integers == std::vector<std::int8_t>{127, 0, 2, 2, 0, -2, -2, -126}));
    CHECK((values == std::vector<float>{0, 0.5, -0.5, 0.5, -0.5, 0.5, -0.5, -0.5}));
  }
}

TEST(a_mean_is_added_in_the_order_of_the_parts_with_the_same_bits_in_every_variant) {
  constexpr std::size_t kBlock = 520, kBlocks = 3;
  std::uniform_int_distribution<int> integer(-127, 127);
  for (const std::size_t count : {1, 2, 3, 5}) {
    std::vector<std::vector<float>> scales;
    std::vector<std::vector<std::int8_t>> integers;
    for (std::size_t p = 0; p < count; ++p) {
      scales.push_back(numbers(kBlocks, false));
      integers.emplace_back(kBlock * kBlocks);
      for (auto& each : integers.back()) each = static_cast<std::int8_t>(integer(engine()));
    }
    if (count > 1) scales[1][2] = NAN;
    std::vector<Part> parts;
    for (std::size_t p = 0; p < count; ++p) parts.push_back({scales[p].data(), integers[p].data()});
    for (const std::size_t size : {std::size_t{1}, kBlock - 1, kBlock + 5, kBlock * kBlocks}) {
      std::vector<std::vector<float>> results;
      for (const Variant& variant : variants()) {
        std::vector<float> found(kBlock * kBlocks, 7.0f), right = found;
        for (std::size_t i = 0; i < size; ++i) {
          right[i] = integers[0][i] * (scales[0][i / kBlock] / count);
          for (std::size_t p = 1; p < count; ++p) right[i] += integers[p][i] * (scales[p][i / kBlock] / count);
        }
        variant.mean({parts.data(), count, kBlock, DType::kFloat32, found.data(), size});
        CHECK(same(found, right));
        results.push_back(std::move(found));
      }
      for (const auto& result : results) {
        CHECK(std::memcmp(result.data(), results[0].data(), result.size() * sizeof(float)) == 0);
      }
    }
  }
}

// Vectors of exactly the right sizes: under the sanitizer a step beyond them is an error.
TEST(messages_go_there_and_back_whatever_the_stretches_and_shares) {
  const Stretch kStretches[] = {{0, 0, 40}, {41, 40, 3}, {44, 48, 1}, {45, 64, 19}};
  for (const std::size_t shares : {1, 2, 3, 5}) {
    const std::size_t length = (88 + 8 * shares - 1) / (8 * shares) * 8 * shares;
    const Quantiser quantiser({DType::kFloat32, 64, length, 8, shares},
                              {std::begin(kStretches), std::end(kStretches)});
    const std::vector<float> gradients = numbers(64, false);
    std::vector<float> residual(length), found = gradients;
    std::vector<std::byte> message(length / 8 * 12);
    quantiser.fill(gradients.data(), residual.data(), message.data());
    quantiser.mean({message.data(), message.data()}, found.data());
    CHECK_EQUAL(found[40], gradients[40]);  // belongs to no stretch
    for (const auto& [start, at, size] : kStretches) {
      for (std::size_t i = 0; i < size; ++i) {
        const float whole = found[start + i] + residual[at + i];
        CHECK(std::fabs(whole - gradients[start + i]) <= 1e-6f * std::fabs(gradients[start + i]) + kTiny);
      }
    }
  }
}

TEST(what_quantising_again_loses_stays_in_the_residual_of_the_share) {
  constexpr std::size_t kLength = 48, kShares = 3;
  const Quantiser quantiser({DType::kFloat32, kLength, kLength, 8, kShares}, {{0, 0, kLength}});
  const std::size_t part_bytes = kLength / kShares / 8 * 12;
  std::vector<std::vector<std::byte>> messages(kShares, std::vector<std::byte>(kLength / 8 * 12));
  std::vector<std::byte> answers(kLength / 8 * 12);
  std::vector<float> residual(kLength), exact(kLength), once(kLength), mean(kLength);
  for (auto& message : messages) {
    std::vector<float> lost(kLength);
    quantiser.fill(numbers(kLength, false).data(), lost.data(), message.data());
  }
  quantiser.mean({messages[0].data(), messages[1].data(), messages[2].data()}, exact.data());
  for (std::size_t share = 0; share < kShares; ++share) {
    std::vector<const std::byte*> parts;
    for (const auto& message : messages) parts.push_back(message.data() + share * part_bytes);
    quantiser.requantise(parts, share, residual.data(), answers.data() + share * part_bytes);
  }
  quantiser.mean({answers.data()}, mean.data());
  for (std::size_t i = 0; i < kLength; ++i) {
    CHECK(std::fabs(mean[i] + residual[i] / kShares - exact[i]) <= 1e-6f * std::fabs(exact[i]) + kTiny);
  }
}

TEST(a_division_that_does_not_fit_is_refused) {
  const Division good{DType::kFloat32, 20, 24, 8, 1};
  const auto make = [](Division division, std::vector<Stretch> stretches) { Quantiser(division, stretches); };
  make(good, {{0, 0, 8}, {8, 8, 12}});
  CHECK_THROWS(InvalidError, make(good, {{0, 4, 8}}));
  CHECK_THROWS(InvalidError, make(good, {{0, 8, 8}, {8, 0, 8}}));
  CHECK_THROWS(InvalidError, make(good, {{0, 0, 9}, {9, 8, 8}}));
  CHECK_THROWS(InvalidError, make(good, {{13, 0, 8}}));
  CHECK_THROWS(InvalidError, make(good, {{0, 16, 9}}));
  CHECK_THROWS(InvalidError, make(good, {{SIZE_MAX, 0, 8}}));
  CHECK_THROWS(InvalidError, make(good, {{0, SIZE_MAX - 7, 8}}));
  CHECK_THROWS(InvalidError, make(good, {{0, 0, SIZE_MAX}}));
  CHECK_THROWS(InvalidError, make({DType::kFloat32, 20, 25, 8, 1}, {}));
  CHECK_THROWS(InvalidError, make({DType::kFloat32, 20, 24, 8, 2}, {}));
  CHECK_THROWS(InvalidError, make({DType::kFloat32, 20, 24, 0, 1}, {}));
  CHECK_THROWS(InvalidError, make({DType::kFloat32, 20, 24, 8, 0}, {}));
  CHECK_THROWS(InvalidError, make({DType::kFloat32, 20, 24, 6, 1}, {}));
  CHECK_THROWS(InvalidError, make({DType::kFloat64, 20, 24, 8, 1}, {}));
  std::vector<std::byte> message(36);
  std::vector<float> values(24);
  const Quantiser quantiser(good, {});
  CHECK_THROWS(InvalidError, quantiser.mean({}, values.data()));
  CHECK_THROWS(InvalidError, quantiser.requantise({message.data()}, 1, values.data(), message.data()));
}

}  // namespace
