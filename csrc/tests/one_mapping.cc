// In the place of segment.cc under ThreadSanitizer. There ranks are threads of one process, and the sanitizer
// knows memory by its address: with a mapping for each rank it would see neither what they share nor
// how they take turns. So all who open a segment get the one mapping there is.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "../error.h"
#include "../segment.h"

namespace gradsync {
namespace {

struct Mapping {
  std::byte* data;
  std::size_t bytes;
  int users;
};

std::mutex mutex;
std::map<int, Mapping> mappings;  // by a number in the place of the descriptor
std::map<std::byte*, int> numbers;
int last = 0;

}  // namespace

Segment Segment::create(std::size_t bytes) {
  void* address =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) throw SystemError("mmap");
  std::lock_guard<std::mutex> lock(mutex);
  mappings[++last] = {static_cast<std::byte*>(address), bytes, 0};
  numbers[static_cast<std::byte*>(address)] = last;
  return Segment(last, bytes);
}

Segment Segment::open(const Ticket& ticket, std::size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = mappings.find(static_cast<int>(ticket.descriptor));
  if (found == mappings.end() || found->second.bytes != bytes) throw InvalidError("no segment of ours");
  Segment segment(found->first, bytes);
  segment.descriptor_ = -1;
  return segment;
}

Segment::Segment(int descriptor, std::size_t bytes) : descriptor_(descriptor), size_(bytes) {
  Mapping& mapping = mappings.at(descriptor);
  ++mapping.users;
  data_ = mapping.data;
}

Segment::Segment(Segment&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

Segment& Segment::operator=(Segment&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

Segment::~Segment() {
  if (data_ == nullptr) return;
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = mappings.find(numbers.at(data_));
  if (--found->second.users > 0) return;
  ::munmap(data_, size_);
  numbers.erase(data_);
  mappings.erase(found);
}

Ticket Segment::ticket() const { return {::getpid(), descriptor_, size_}; }

void Segment::discard() {
  // Others may read it still, as they may with the real one; what they read is up to them.
}

void Segment::close_descriptor() { descriptor_ = -1; }

}  // namespace gradsync
