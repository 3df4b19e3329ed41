#include "../layout.h"

#include <algorithm>
#include <cstdint>

#include "check.h"

using namespace gradsync;

namespace {

struct Extent {
  std::uintptr_t begin;
  std::uintptr_t end;
};

// All places in a segment of this many ranks, as if it were mapped at a page.
std::vector<Extent> extents(int world) {
  const Layout layout(world);
  auto* base = reinterpret_cast<std::byte*>(std::uintptr_t{1} << 30);
  std::vector<Extent> all;
  const auto add = [&](const void* at, std::size_t bytes) {
    const auto begin = reinterpret_cast<std::uintptr_t>(at) - reinterpret_cast<std::uintptr_t>(base);
    all.push_back({begin, begin + bytes});
  };
  add(layout.header(base), sizeof(Header));
  for (int rank = 0; rank < world; ++rank) {
    add(layout.line(base, rank), sizeof(Line));
    for (unsigned turn = 0; turn < 2; ++turn) add(layout.slot(base, rank, turn), layout.slot_bytes());
    for (int to = 0; to < world; ++to) add(layout.channel(base, rank, to), sizeof(Channel) + layout.channel_bytes());
  }
  return all;
}

TEST(nothing_in_a_segment_overlaps_for_any_number_of_ranks) {
  for (int world = 1; world <= kMaxRanks; ++world) {
    if (kSanitized && world > 16 && world % 37 != 0 && world != kMaxRanks) continue;
    std::vector<Extent> all = extents(world);
    std::sort(all.begin(), all.end(), [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
    bool good = true;
    for (std::size_t i = 0; i + 1 < all.size(); ++i) good &= all[i].end <= all[i + 1].begin;
    CHECK(good);
    CHECK(all.back().end <= Layout(world).bytes());
  }
}

TEST(what_ranks_write_is_on_cache_lines_of_its_own) {
  for (int world : {1, 2, 3, 7, 64, 255, 256}) {
    for (const Extent& extent : extents(world)) CHECK_EQUAL(extent.begin % kAlignment, 0u);
  }
  CHECK_EQUAL(sizeof(Line) % kAlignment, 0u);
}

TEST(the_slots_of_a_rank_alternate) {
  const Layout layout(3);
  auto* base = reinterpret_cast<std::byte*>(std::uintptr_t{1} << 30);
  for (unsigned turn = 0; turn < 5; ++turn) {
    CHECK(layout.slot(base, 1, turn) == layout.slot(base, 1, turn + 2));
    CHECK(layout.slot(base, 1, turn) != layout.slot(base, 1, turn + 1));
  }
  CHECK(layout.slot(base, 1, ~0u) == layout.slot(base, 1, 1));  // the number of a turn may run round
}

TEST(a_segment_stays_small_and_a_channel_holds_a_header) {
  CHECK(Layout(2).bytes() < 10u << 20);
  CHECK(Layout(kMaxRanks).bytes() < 100u << 20);
  for (int world = 1; world <= kMaxRanks; ++world) {
    const std::size_t bytes = Layout(world).channel_bytes();
    CHECK(bytes >= 256 && bytes <= kMaxChannelBytes);
    CHECK((bytes & (bytes - 1)) == 0);  // so that a position that runs round stays in step
    CHECK(Layout(world).slot_bytes() / static_cast<std::size_t>(world) / kAlignment * kAlignment * static_cast<std::size_t>(world) >= kSmallBytes);
  }
}

}  // namespace
