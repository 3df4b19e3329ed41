#include "collectives.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "probe.h"

namespace gradsync {
namespace {

constexpr std::size_t kCacheBytes = 4 * 1024 * 1024;  // of a tensor that a core may have in its caches

bool gives_pieces(Kind kind) {
  return kind == Kind::kReduceScatter || kind == Kind::kAllToAll || kind == Kind::kScatter;
}

std::size_t bytes_of(const Op& op) {
  return op.announcement.count * size_of(op.announcement.dtype);
}

// What is taken of a share: the number of the collective, and behind it how many pieces. So it needs no one
// to set it back. What is read was there before the tick, what is written is read when all pieces are counted;
// all that it has to order is that who finds a piece taken knows who has begun.
constexpr int kCountBits = 24;  // 512 GiB in pieces, and 2^40 collectives

std::size_t count_taken(std::uint64_t taken, std::uint64_t sequence) {
  const std::uint64_t none = sequence << kCountBits;
  return taken > none ? taken - none : 0;
}

// Takes the next piece of a share, each once whoever asks; false if none is left.
bool take_piece(std::atomic<std::uint64_t>& taken, std::uint64_t sequence, std::size_t pieces,
                std::size_t& piece) {
  std::uint64_t seen = taken.load(std::memory_order_acquire);
  do {
    piece = count_taken(seen, sequence);
    if (piece >= pieces) return false;
  } while (!taken.compare_exchange_weak(seen, (sequence << kCountBits) + piece + 1,
                                        std::memory_order_acq_rel, std::memory_order_acquire));
  return true;
}

}  // namespace

std::shared_ptr<Op> make_agreement(const std::string& text, Deadline deadline) {
  auto op = std::make_shared<Op>();
  op->announcement.kind = Kind::kElsewhere;
  op->announcement.count = kTextBytes;
  op->text = text.substr(0, kTextBytes - 1);
  op->text.resize(kTextBytes);
  op->sources = {reinterpret_cast<const std::byte*>(op->text.data())};
  op->deadline = deadline;
  return op;
}

bool Collectives::is_small(const Op& op) const {
  const std::size_t pieces =
      gives_pieces(op.announcement.kind) ? static_cast<std::size_t>(members_.world()) : 1;
  return op.announcement.kind != Kind::kAllToAll && bytes_of(op) * pieces <= kSmallBytes;
}

bool Collectives::is_light(const Op& op) const { return is_small(op) || op.announcement.symmetric != 0; }

// [Note: turns] Whatever goes through slots takes a turn, and each turn has the other of a rank's two slots.
// Who takes a turn finds that all ranks are done with the slots of that turn, whoever's they are: they were
// used in the turn before the last, and all have made a tick of the last turn since, which it has awaited.
void Collectives::post(Op& op) {
  probe(Phase::kPost);
  const int own = members_.rank();
  op.turn = turn_++;
  members_.announcement(own, op.announcement.sequence) = op.announcement;
  members_.line(own).last.store(op.announcement.sequence, std::memory_order_relaxed);
  if (is_small(op) || op.announcement.kind != Kind::kAllReduce) {
    write(op, 0, op.turn);
  } else if (op.announcement.symmetric == 0) {
    chunks_of(op).trade(members_.slot(own, op.turn), kNoChunk, 0);
  }
  op.first_tick = members_.clock() + 1;
  op.is_posted = true;
  members_.tick();
  probe(Phase::kPosted);
}

// [Note: ranks agree] Whatever the ranks asked for, each has made one tick and taken one turn when it
// comes here, and each sees all announcements. So either all of them throw, or none does.
void Collectives::finish(Op& op, const Patience& patience) {
  patience_ = patience;
  members_.await(op.first_tick, {&op.announcement, op.deadline, op.text.c_str()}, patience_);
  probe(Phase::kArrived);
  check(op);
  if (is_small(op) || op.announcement.kind != Kind::kAllReduce) {
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
  const auto text_of = [&](int rank) { return reinterpret_cast<const char*>(members_.slot(rank, op.turn)); };
  const auto agrees = [&](int rank) {
    const Announcement& other = members_.announcement(rank, own.sequence);
    return other.sequence == own.sequence && other.kind == own.kind && other.dtype == own.dtype &&
           other.op == own.op && other.root == own.root && other.count == own.count &&
           std::memcmp(&other.element, &own.element, sizeof(Element)) == 0 &&
           (own.kind != Kind::kElsewhere || std::strncmp(text_of(rank), op.text.c_str(), kTextBytes) == 0);
  };
  bool all_agree = true;
  for (int rank = 0; rank < members_.world(); ++rank) {
    all_agree &= agrees(rank);
  }
  if (all_agree) return own.kind == Kind::kAllToAll ? check_pieces(op) : void();
  std::string text = "collective " + std::to_string(own.sequence) + " is not the same on all ranks:";
  for (int rank = 0; rank < members_.world(); ++rank) {
    const Announcement& other = members_.announcement(rank, own.sequence);
    text += (rank ? "; " : " ") + members_.label(rank) + ": " + describe(other, text_of(rank));
  }
  throw MismatchError(text + '.');
}

// All-to-all: what this rank sends to each, then what it expects from each, in bytes.
void Collectives::announce_pieces(const Op& op) {
  const std::size_t row = op.source_bytes.size() * sizeof(std::uint64_t);
  std::byte* slot = members_.slot(members_.rank(), op.turn);
  std::memcpy(slot, op.source_bytes.data(), row);
  std::memcpy(slot + row, op.target_bytes.data(), row);
}

void Collectives::check_pieces(const Op& op) const {
  const int world = members_.world();
  const auto row = [&](int rank) {
    return reinterpret_cast<const std::uint64_t*>(members_.slot(rank, op.turn));
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
    const auto* row = reinterpret_cast<const std::uint64_t*>(members_.slot(rank, op.turn));
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

// In rounds of what fits into the slots. The first was written when it was posted.
void Collectives::exchange(Op& op) {
  const std::size_t capacity = piece_capacity(op);
  const std::size_t rounds = (largest_piece(op) + capacity - 1) / capacity;
  read(op, 0, op.turn);
  for (std::size_t round = 1; round < rounds; ++round) {
    const unsigned turn = turn_++;
    write(op, round, turn);
    tick_and_await(op);
    read(op, round, turn);
  }
  if (op.announcement.kind == Kind::kAllReduce) counters_.copied.fetch_add(1, std::memory_order_relaxed);
}

// Where rank `from` puts what it gives to rank `to`, which is its own slot, or a part of that for each. The
// root of a scatter, who alone gives, has everybody's slots for it: then there are fewer rounds.
std::byte* Collectives::place(const Op& op, int from, int to, unsigned turn) {
  const Kind kind = op.announcement.kind;
  if (!gives_pieces(kind)) return members_.slot(from, turn);
  if (kind == Kind::kScatter) return members_.slot(to, turn);
  return members_.slot(from, turn) + head_bytes(op) + static_cast<std::size_t>(to) * piece_capacity(op);
}

// All-to-all tells the sizes of the pieces in front of them.
std::size_t Collectives::head_bytes(const Op& op) const {
  if (op.announcement.kind != Kind::kAllToAll) return 0;
  const std::size_t rows = 2 * static_cast<std::size_t>(members_.world()) * sizeof(std::uint64_t);
  return (rows + kAlignment - 1) / kAlignment * kAlignment;
}

std::size_t Collectives::piece_capacity(const Op& op) const {
  const Kind kind = op.announcement.kind;
  const std::size_t pieces = gives_pieces(kind) && kind != Kind::kScatter ? members_.world() : 1;
  return (members_.slot_bytes() - head_bytes(op)) / pieces / kAlignment * kAlignment;
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
  if (kind == Kind::kAllToAll && round == 0) announce_pieces(op);
  const std::size_t capacity = piece_capacity(op);
  const std::size_t begin = round * capacity;
  const int pieces = gives_pieces(kind) ? members_.world() : 1;
  for (int piece = 0; piece < pieces; ++piece) {
    const std::size_t all = op.source_bytes.empty() ? bytes_of(op) : op.source_bytes[piece];
    if ((pieces > 1 && piece == own) || begin >= all) continue;
    const std::size_t bytes = std::min(capacity, all - begin);
    copy_bytes(place(op, own, piece, turn), op.sources[piece] + begin, bytes);
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
      if (own != a.root) copy_bytes(op.targets[0] + begin, place(op, a.root, own, turn), bytes);
      return;
    case Kind::kScatter:
      copy_bytes(op.targets[0] + begin,
                 own == a.root ? op.sources[own] + begin : place(op, a.root, own, turn), bytes);
      return;
    case Kind::kGather:
      if (own != a.root) return;
      [[fallthrough]];
    case Kind::kAllGather:
      for (int rank = 0; rank < world; ++rank) {
        if (rank != own) copy_bytes(op.targets[rank] + begin, place(op, rank, own, turn), bytes);
        if (rank == own) std::memmove(op.targets[rank] + begin, op.sources[0] + begin, bytes);  // maybe in place
      }
      return;
    case Kind::kAllToAll:
      for (int rank = 0; rank < world; ++rank) {
        if (begin >= op.target_bytes[rank]) continue;
        copy_bytes(op.targets[rank] + begin,
                   rank == own ? op.sources[own] + begin : place(op, rank, own, turn),
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
  for (int rank = 0; rank < world; ++rank) {
    sources[rank] = rank == own ? mine + begin : place(op, rank, own, turn);
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

// Does any rank reduce in symmetric memory, and has not given its first chunk when it posted?
bool Collectives::any_symmetric(const Op& op) {
  for (int rank = 0; rank < members_.world(); ++rank) {
    if (members_.announcement(rank, op.announcement.sequence).symmetric != 0) return true;
  }
  return false;
}

void Collectives::map_new(Op& op) {
  const int world = members_.world();
  const unsigned turn = turn_++;
  std::vector<std::shared_ptr<Segment>> segments(static_cast<std::size_t>(world));
  std::byte* mine = members_.slot(members_.rank(), turn);
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
    for (int each = 0; each < world; ++each) all_mapped &= members_.slot(each, turn)[rank] == std::byte{1};
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
//
// [Note: at home] A rank's share is still in the caches of its core, if it is not much. A piece that another
// takes has to come from there and goes back the next time, which takes longer than to wait for it; both ranks
// are late then, by turns, and so it goes on. So who is done waits first, for as long as its own share has
// taken: who runs is done by then. Where there are more ranks than cores, or more bytes than a cache holds,
// nothing is lost by helping, and nobody waits.
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
  std::uint32_t done = 0, own = 0;
  members_.begin_pieces(a.sequence);
  const auto start = Clock::now();
  for (int i = 0; i < world; ++i) {
    if (i == 1) leave_to_owners(op, Clock::now() - start);
    const int rank = (members_.rank() + i) % world;
    const Share share(a.count, size_of(a.dtype), rank, world);
    std::size_t piece;
    while (take_piece(members_.line(rank).taken, a.sequence, share.pieces(), piece)) {
      probe(Phase::kTaken);
      const std::size_t begin = share.begin + piece * share.piece;
      reduce(reduction, begin, std::min(share.end, begin + share.piece));
      ++done;
    }
    if (i == 0) own = done;
  }
  if (done > own) counters_.helped.fetch_add(done - own, std::memory_order_relaxed);
  members_.add_pieces(a.sequence, done, pieces_);
}

// [Note: at home]: waits until the others have taken all pieces of their shares, or `own_time` is over.
void Collectives::leave_to_owners(const Op& op, Clock::duration own_time) {
  const Announcement& a = op.announcement;
  if (patience_.yields || bytes_of(op) > kCacheBytes) return;
  const auto all_taken = [&] {
    for (int rank = 0; rank < members_.world(); ++rank) {
      const Share share(a.count, size_of(a.dtype), rank, members_.world());
      const std::uint64_t taken = members_.line(rank).taken.load(std::memory_order_acquire);
      if (count_taken(taken, a.sequence) < share.pieces()) return false;
    }
    return true;
  };
  Spin spinning(std::min(std::chrono::ceil<std::chrono::microseconds>(own_time), patience_.spin));
  while (!all_taken() && spinning.again()) continue;
}

Chunks Collectives::chunks_of(const Op& op) const {
  return Chunks(op.targets[0], bytes_of(op), size_of(op.announcement.dtype), members_.slot_bytes(), members_.rank(),
                members_.world());
}

// [Note: one tick a chunk] A rank puts into its slot, chunk by chunk, what the others are to reduce, and they
// put the result there, in place of what they have read: so a cache line goes from one core to the other
// and back, and each writes a line that it has. When all have ticked for chunk i, all have given chunk i, and
// have reduced chunk i-1. So what a rank then finds of chunk i-1 in its slot it takes, and gives i+1.
void Collectives::reduce_through_slots(Op& op) {
  const Announcement& a = op.announcement;
  const int own = members_.rank();
  const int world = members_.world();
  const Chunks chunks = chunks_of(op);
  unsigned turn = op.turn;
  if (any_symmetric(op)) {
    turn = turn_++;
    chunks.trade(members_.slot(own, turn), kNoChunk, 0);
    tick_and_await(op);
  }
  std::array<void*, kMaxRanks> parts;
  for (std::size_t chunk = 0; chunk < chunks.count; ++chunk) {
    for (int rank = 0; rank < world; ++rank) {
      parts[rank] = rank == own ? chunks.at(chunk) : members_.slot(rank, turn);
    }
    const std::size_t end = std::min(chunks.share.end, chunks.bytes(chunk) / chunks.element);
    reduce({a.dtype, a.op, parts.data(), world, parts.data(), world}, std::min(chunks.share.begin, end), end);
    chunks.trade(members_.slot(own, turn + 1), chunk - 1, chunk + 1);  // it has awaited this turn: that is free
    tick_and_await(op);
    if (chunk + 1 < chunks.count) turn = turn_++;
  }
  chunks.trade(members_.slot(own, turn), chunks.count - 1, kNoChunk);
  counters_.copied.fetch_add(1, std::memory_order_relaxed);
  counters_.copied_bytes.fetch_add(bytes_of(op), std::memory_order_relaxed);
}

}  // namespace gradsync
