// Copies by the processor's own instruction for that, `rep movsb`.
//
// A line that it overwrites as a whole is taken over from the core that has it, but not fetched. A loop of
// stores fetches it first, for nothing: what goes into a slot or ring has mostly been read by another core just
// before, and then a copy takes two to four times as long. (The loop asks for lines ahead, which helps against
// the way there and back, and not against what has to be carried.)
#if defined(__x86_64__)
#include <cpuid.h>

#include <cstring>

#include "kernels_isa.h"

namespace gradsync {

// AMD's since Zen 5, on which it has been measured, with all kinds of alignment. Zen 3, which calls it quick too, is
// said to be twenty times slower where the addresses are not to its taste.
bool has_quick_moves() {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  return false;  // they do not see what it does
#else
  constexpr unsigned kZen5 = 0x1a, kFastShortMoves = 1u << 4;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(0, &a, &b, &c, &d) == 0) return false;
  const bool is_amd = b == signature_AMD_ebx && c == signature_AMD_ecx && d == signature_AMD_edx;
  if (!is_amd || __get_cpuid(1, &a, &b, &c, &d) == 0) return false;
  const unsigned family = ((a >> 8) & 0xf) + ((a >> 20) & 0xff);
  return family >= kZen5 && __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kFastShortMoves) != 0;
#endif
}

namespace moves {

void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  constexpr std::size_t kFew = 4096;
  if (bytes > kFew) {
    asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes) : : "memory");
  } else if (bytes > 0) {
    std::memcpy(to, from, bytes);
  }
}

void swap_bytes(std::byte* taken, std::byte* slot, const std::byte* next, std::size_t bytes) {
  copy_bytes(taken, slot, bytes);
  copy_bytes(slot, next, bytes);
}

}  // namespace moves
}  // namespace gradsync
#endif
