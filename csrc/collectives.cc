#include "collectives.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "probe.h"

namespace gradsync {
namespace {

constexpr std::size_t kPieceBytes = 32 * 1024;  // of a reduction in place, at a time
// Of one through slots, at a time: with two in-slots and two out-slots it stays in the second-level cache.
constexpr std::size_t kChunkBytes = 128 * 1024;

bool gives_pieces(Kind kind) {
  return kind == Kind::kReduceScatter || kind == Kind::kAllToAll || kind == Kind::kScatter;
}

std::size_t bytes_of(const Op& op) {
  return op.announcement.count * size_of(op.announcement.dtype);
}

// The part of `count` elements that a rank reduces, cut at cache lines; in place it is done by pieces.
struct Share {
  Share(std::size_t count, std::size_t element, int rank, int world) : piece(kPieceBytes / element) {
    const std::size_t line = 128 / element;
    const std::size_t lines = (count + line - 1) / line;
    const auto at = [&](int r) {
      const std::size_t cut = lines * static_cast<std::size_t>(r) / static_cast<std::size_t>(world);
      return std::min(count, cut * line);
    };
    begin = at(rank);
    end = at(rank + 1);
  }
  std::size_t pieces() const { return (end - begin + piece - 1) / piece; }
  std::size_t piece;  // elements
  std::size_t begin;
  std::size_t end;
};

// Takes the next piece of a share, each once whoever asks; false if none is left. The word has the
// number of the collective in front, so that it needs no one to set it back. What is read was there before
// the tick, what is written is read when all pieces are counted; all that it has to order is that who
// finds a piece taken knows who has begun.
bool take_piece(std::atomic<std::uint64_t>& taken, std::uint64_t sequence, std::size_t pieces,
                std::size_t& piece) {
  constexpr int kCountBits = 24;  // 512 GiB in pieces, and 2^40 collectives
  const std::uint64_t none = sequence << kCountBits;
  std::uint64_t seen = taken.load(std::memory_order_acquire);
  do {
    piece = seen > none ? seen - none : 0;
    if (piece >= pieces) return false;
  } while (!taken.compare_exchange_weak(seen, none + piece + 1, std::memory_order_acq_rel,
                                        std::memory_order_acquire));
  return true;
}

}  // namespace

bool Collectives::is_small(const Op& op) const {
  const std::size_t pieces =
      gives_pieces(op.announcement.kind) ? static_cast<std::size_t>(members_.world()) : 1;
  return op.announcement.kind != Kind::kAllToAll && bytes_of(op) * pieces <= kSmallBytes;
}

void Collectives::post(Op& op) {
  probe(Phase::kPost);
  op.turn = turn_++;
  members_.announcement(members_.rank(), op.announcement.sequence) = op.announcement;
  members_.line(members_.rank()).last.store(op.announcement.sequence, std::memory_order_relaxed);
  if (is_small(op)) write(op, 0, op.turn);
  if (op.announcement.kind == Kind::kAllToAll) announce_pieces(op);
  op.first_tick = members_.clock() + 1;
  op.is_posted = true;
  members_.tick();
  probe(Phase::kPosted);
}

// [Note: ranks agree] Whatever the ranks asked for, each has made one tick and taken one turn when it
// comes here, and each sees all announcements. So either all of them throw, or none does.
void Collectives::finish(Op& op, const Patience& patience) {
  patience_ = patience;
  members_.await(op.first_tick, {&op.announcement, op.deadline}, patience_);
  probe(Phase::kArrived);
  check(op);
  if (is_small(op)) {
    read(op, 0, op.turn);
  } else if (op.announcement.kind != Kind::kAllReduce) {
    exchange(op);
  } else if (is_symmetric(op)) {
    reduce_in_place(op);
  } else {
    reduce_through_slots(op);
  }
  probe(Phase::kFinished);
}

void Collectives::check(const Op& op) const {
  const Announcement& own = op.announcement;
  const auto agrees = [&](const Announcement& other) {
    return other.sequence == own.sequence && other.kind == own.kind && other.dtype == own.dtype &&
           other.op == own.op && other.root == own.root && other.count == own.count;
  };
  bool all_agree = true;
  for (int rank = 0; rank < members_.world(); ++rank) {
    all_agree &= agrees(members_.announcement(rank, own.sequence));
  }
  if (all_agree) return own.kind == Kind::kAllToAll ? check_pieces(op) : void();
  std::string text = "collective " + std::to_string(own.sequence) + " is not the same on all ranks:";
  for (int rank = 0; rank < members_.world(); ++rank) {
    const Announcement& other = members_.announcement(rank, own.sequence);
    text += (rank ? "; " : " ") + members_.label(rank) + ": " + describe(other);
  }
  throw MismatchError(text + '.');
}

// All-to-all: what this rank sends to each, then what it expects from each, in bytes.
void Collectives::announce_pieces(const Op& op) {
  const std::size_t row = op.source_bytes.size() * sizeof(std::uint64_t);
  std::byte* slot = members_.in(members_.rank(), op.turn);
  std::memcpy(slot, op.source_bytes.data(), row);
  std::memcpy(slot + row, op.target_bytes.data(), row);
}

void Collectives::check_pieces(const Op& op) const {
  const int world = members_.world();
  const auto row = [&](int rank) {
    return reinterpret_cast<const std::uint64_t*>(members_.in(rank, op.turn));
  };
  for (int from = 0; from < world; ++from) {
    for (int to = 0; to < world; ++to) {
      const std::uint64_t sent = row(from)[to];
      const std::uint64_t expected = row(to)[world + from];
      if (sent == expected) continue;
      throw MismatchError("collective " + std::to_string(op.announcement.sequence) +
                          ", all_to_all, is not the same on all ranks: " + members_.label(from) +
                          " sends " + std::to_string(sent) + " bytes to " + members_.label(to) +
                          ", which expects " + std::to_string(expected) + '.');
    }
  }
}

std::size_t Collectives::largest_piece(const Op& op) const {
  if (op.announcement.kind != Kind::kAllToAll) return bytes_of(op);
  const int world = members_.world();
  std::uint64_t largest = 0;
  for (int rank = 0; rank < world; ++rank) {
    const auto* row = reinterpret_cast<const std::uint64_t*>(members_.in(rank, op.turn));
    largest = std::max(largest, *std::max_element(row, row + world));
  }
  return largest;
}

void Collectives::tick_and_await(const Op& op) {
  members_.tick();
  probe(Phase::kTicked);
  members_.await(members_.clock(), {&op.announcement, op.deadline}, patience_);
}

// ------------------------------------------------------------------------------- moving bytes

void Collectives::exchange(Op& op) {
  const std::size_t capacity = piece_capacity(op);
  const std::size_t rounds = (largest_piece(op) + capacity - 1) / capacity;
  for (std::size_t round = 0; round < rounds; ++round) {
    const unsigned turn = turn_++;
    write(op, round, turn);
    tick_and_await(op);
    read(op, round, turn);
  }
}

std::size_t Collectives::piece_capacity(const Op& op) const {
  if (!gives_pieces(op.announcement.kind)) return members_.slot_bytes();
  return members_.slot_bytes() / static_cast<std::size_t>(members_.world()) / kAlignment * kAlignment;
}

void Collectives::write(const Op& op, std::size_t round, unsigned turn) {
  const Kind kind = op.announcement.kind;
  const int own = members_.rank();
  const bool only_root_gives = kind == Kind::kBroadcast || kind == Kind::kScatter;
  const bool root_does_not = kind == Kind::kGather || kind == Kind::kReduce;
  if ((only_root_gives && op.announcement.root != own) ||
      (root_does_not && op.announcement.root == own) || kind == Kind::kBarrier) {
    return;
  }
  std::byte* slot = members_.in(own, turn);
  const std::size_t capacity = piece_capacity(op);
  const std::size_t begin = round * capacity;
  const int pieces = gives_pieces(kind) ? members_.world() : 1;
  for (int piece = 0; piece < pieces; ++piece) {
    const std::size_t all = op.source_bytes.empty() ? bytes_of(op) : op.source_bytes[piece];
    if ((pieces > 1 && piece == own) || begin >= all) continue;
    const std::size_t bytes = std::min(capacity, all - begin);
    copy_bytes(slot + static_cast<std::size_t>(piece) * capacity, op.sources[piece] + begin, bytes);
    counters_.copied_bytes.fetch_add(bytes, std::memory_order_relaxed);
  }
}

void Collectives::read(Op& op, std::size_t round, unsigned turn) {
  const Announcement& a = op.announcement;
  const int own = members_.rank();
  const int world = members_.world();
  const std::size_t capacity = piece_capacity(op);
  const std::size_t begin = round * capacity;
  const std::size_t all = bytes_of(op);
  const std::size_t bytes = begin < all ? std::min(capacity, all - begin) : 0;
  if (bytes == 0 && a.kind != Kind::kAllToAll) return;  // an empty tensor may have no address
  switch (a.kind) {
    case Kind::kBroadcast:
      if (own != a.root) copy_bytes(op.targets[0] + begin, members_.in(a.root, turn), bytes);
      return;
    case Kind::kScatter:
      if (own == a.root) {
        copy_bytes(op.targets[0] + begin, op.sources[own] + begin, bytes);
      } else {
        const std::byte* slot = members_.in(a.root, turn);
        copy_bytes(op.targets[0] + begin, slot + static_cast<std::size_t>(own) * capacity, bytes);
      }
      return;
    case Kind::kGather:
      if (own != a.root) return;
      [[fallthrough]];
    case Kind::kAllGather:
      for (int rank = 0; rank < world; ++rank) {
        if (rank != own) copy_bytes(op.targets[rank] + begin, members_.in(rank, turn), bytes);
        if (rank == own) std::memmove(op.targets[rank] + begin, op.sources[0] + begin, bytes);  // maybe in place
      }
      return;
    case Kind::kAllToAll:
      for (int rank = 0; rank < world; ++rank) {
        if (begin >= op.target_bytes[rank]) continue;
        const std::byte* source =
            rank == own ? op.sources[own] + begin
                        : members_.in(rank, turn) + static_cast<std::size_t>(own) * capacity;
        copy_bytes(op.targets[rank] + begin, source,
             std::min(capacity, static_cast<std::size_t>(op.target_bytes[rank]) - begin));
      }
      return;
    case Kind::kReduce:
      if (own != a.root) return;
      break;
    case Kind::kAllReduce:
    case Kind::kReduceScatter: break;
    default: return;
  }
  // What is left are reductions, by whoever wants the result.
  std::array<const void*, kMaxRanks> sources;
  const std::byte* mine = a.kind == Kind::kReduceScatter ? op.sources[own] : op.sources[0];
  const std::size_t piece =
      a.kind == Kind::kReduceScatter ? static_cast<std::size_t>(own) * capacity : 0;
  for (int rank = 0; rank < world; ++rank) {
    sources[rank] = rank == own ? mine + begin : members_.in(rank, turn) + piece;
  }
  void* target = op.targets[0] + begin;
  reduce({a.dtype, a.op, sources.data(), world, &target, 1}, 0, bytes / size_of(a.dtype));
}

// ------------------------------------------------------------------------------- all-reduce

// [Note: new memory] All ranks see all announcements, so all know which allocations were never seen before.
// For those there is a round in which every rank tells whether it could map them: either all
// ranks reduce in place, or none does.
bool Collectives::is_symmetric(Op& op) {
  const std::uint64_t sequence = op.announcement.sequence;
  bool has_new = false;
  for (int rank = 0; rank < members_.world(); ++rank) {
    const Announcement& other = members_.announcement(rank, sequence);
    const std::uint64_t size = other.ticket.bytes;
    if (other.symmetric == 0 || other.offset > size || bytes_of(op) > size - other.offset) return false;
    has_new |= !mappings_[static_cast<std::size_t>(rank)].knows(other.symmetric);
  }
  if (has_new) map_new(op);
  for (int rank = 0; rank < members_.world(); ++rank) {
    const std::uint64_t id = members_.announcement(rank, sequence).symmetric;
    if (mappings_[static_cast<std::size_t>(rank)].find(id) == nullptr) return false;
  }
  return true;
}

void Collectives::map_new(Op& op) {
  const int world = members_.world();
  const unsigned turn = turn_++;
  std::vector<std::shared_ptr<Segment>> segments(static_cast<std::size_t>(world));
  std::byte* mine = members_.in(members_.rank(), turn);
  for (int rank = 0; rank < world; ++rank) {
    const Announcement& other = members_.announcement(rank, op.announcement.sequence);
    mine[rank] = std::byte{1};
    if (mappings_[static_cast<std::size_t>(rank)].knows(other.symmetric)) continue;
    try {
      segments[static_cast<std::size_t>(rank)] =
          rank == members_.rank() ? std::make_shared<Segment>()
                                  : std::make_shared<Segment>(Segment::open(other.ticket, other.ticket.bytes));
    } catch (const std::exception&) {
      mine[rank] = std::byte{0};
    }
  }
  tick_and_await(op);
  for (int rank = 0; rank < world; ++rank) {
    const std::uint64_t id = members_.announcement(rank, op.announcement.sequence).symmetric;
    if (mappings_[static_cast<std::size_t>(rank)].knows(id)) continue;
    bool all_mapped = true;
    for (int each = 0; each < world; ++each) all_mapped &= members_.in(each, turn)[rank] == std::byte{1};
    auto& segment = segments[static_cast<std::size_t>(rank)];
    mappings_[static_cast<std::size_t>(rank)].remember(id, all_mapped ? std::move(segment) : nullptr);
  }
}

// Every rank reduces its share of the elements, from all ranks' memory into all ranks' memory.
//
// [Note: helping] A rank that is done with its share goes on with what others have not yet begun of
// theirs: with more ranks than cores some do not run at all just now. It goes on as soon as all pieces
// are done, and leaves behind who had none: those come, find nothing left to do, and go on as well.
// Nobody gets further ahead than to the next announcement, where all wait for all. A rank that has given
// up on this collective may use its memory for something else: who sees that does not begin.
void Collectives::reduce_in_place(Op& op) {
  const Announcement& a = op.announcement;
  const Errand errand{&a, op.deadline};
  for (int rank = 0; rank < members_.world(); ++rank) {
    const Share share(a.count, size_of(a.dtype), rank, members_.world());
    pieces_ += static_cast<std::uint32_t>(share.pieces());
  }
  if (!members_.all_done(pieces_) && members_.all_present(errand, pieces_)) reduce_pieces(op);
  probe(Phase::kTicked);
  members_.await_pieces(a.sequence, pieces_, errand, patience_);
  counters_.symmetric.fetch_add(1, std::memory_order_relaxed);
}

// Takes pieces as long as there are any, of its own share first, and tells how many it has done.
void Collectives::reduce_pieces(const Op& op) {
  const Announcement& a = op.announcement;
  const int world = members_.world();
  std::array<void*, kMaxRanks> parts;
  for (int rank = 0; rank < world; ++rank) {
    const Announcement& other = members_.announcement(rank, a.sequence);
    parts[rank] = rank == members_.rank()
                      ? op.targets[0]
                      : mappings_[static_cast<std::size_t>(rank)].find(other.symmetric)->data() + other.offset;
  }
  const Reduction reduction{a.dtype, a.op, parts.data(), world, parts.data(), world};
  std::uint32_t done = 0;
  members_.begin_pieces(a.sequence);
  for (int i = 0; i < world; ++i) {
    const int rank = (members_.rank() + i) % world;
    const Share share(a.count, size_of(a.dtype), rank, world);
    std::size_t piece;
    while (take_piece(members_.line(rank).taken, a.sequence, share.pieces(), piece)) {
      probe(Phase::kTaken);
      const std::size_t begin = share.begin + piece * share.piece;
      reduce(reduction, begin, std::min(share.end, begin + share.piece));
      ++done;
    }
  }
  members_.add_pieces(a.sequence, done, pieces_);
}

// [Note: one tick a chunk] A rank gives the others, chunk by chunk, what they are to reduce, reduces its
// own share, and takes what the others have reduced of the chunk before. When all have ticked for
// chunk i, all have put chunk i into their in-slots, and have reduced chunk i-1 into their out-slots;
// so nobody still reads in-slot i-1 or out-slot i-2, which are filled next.
void Collectives::reduce_through_slots(Op& op) {
  const Announcement& a = op.announcement;
  const int own = members_.rank();
  const int world = members_.world();
  const std::size_t element = size_of(a.dtype);
  const std::size_t capacity = std::min(kChunkBytes, members_.slot_bytes()) / element;
  const std::size_t chunks = (a.count + capacity - 1) / capacity;
  std::byte* data = op.targets[0];
  std::array<const void*, kMaxRanks> sources;
  const auto length = [&](std::size_t chunk) { return std::min(capacity, a.count - chunk * capacity); };

  for (std::size_t chunk = 0; chunk <= chunks; ++chunk) {
    const unsigned turn = turn_++;
    std::byte* here = data + chunk * capacity * element;
    if (chunk < chunks) {
      const Share share(length(chunk), element, own, world);
      const std::size_t begin = share.begin * element;
      const std::size_t end = share.end * element;
      std::byte* slot = members_.in(own, turn);
      copy_bytes(slot, here, begin);
      copy_bytes(slot + end, here + end, length(chunk) * element - end);
    }
    tick_and_await(op);
    if (chunk > 0) {
      std::byte* before = data + (chunk - 1) * capacity * element;
      for (int rank = 0; rank < world; ++rank) {
        if (rank == own) continue;
        const Share share(length(chunk - 1), element, rank, world);
        copy_bytes(before + share.begin * element, members_.out(rank, turn - 1) + share.begin * element,
             (share.end - share.begin) * element);
      }
    }
    if (chunk < chunks) {
      const Share share(length(chunk), element, own, world);
      for (int rank = 0; rank < world; ++rank) {
        sources[rank] = rank == own ? here : members_.in(rank, turn);
      }
      void* targets[] = {here, members_.out(own, turn)};
      reduce({a.dtype, a.op, sources.data(), world, targets, 2}, share.begin, share.end);
    }
  }
  counters_.copied.fetch_add(1, std::memory_order_relaxed);
  counters_.copied_bytes.fetch_add(bytes_of(op), std::memory_order_relaxed);
}

}  // namespace gradsync
