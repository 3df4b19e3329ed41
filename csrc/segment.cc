#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <utility>

#include "error.h"
#include "process.h"

namespace gradsync {
namespace {

constexpr std::size_t kUnasked = 4 << 20;  // small enough not to ask whether there is so much
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

std::string reason(const std::string& call) { return call + ": " + std::strerror(errno); }

// Closes on the way out, unless released.
struct Descriptor {
  explicit Descriptor(int value) : value(value) {}
  ~Descriptor() {
    if (value >= 0) ::close(value);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int release() { return std::exchange(value, -1); }
  int value;
};

// What the kernel can give without taking it from others. A file in memory has no limit of its own:
// asked for more, the kernel kills processes until it has it.
std::size_t available() {
  std::ifstream file("/proc/meminfo");
  std::string name;
  std::size_t kilobytes;
  while (file >> name >> kilobytes) {
    if (name == "MemAvailable:") return kilobytes * 1024;
    file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return std::numeric_limits<std::size_t>::max();
}

}  // namespace

Segment Segment::create(std::size_t bytes) {
  if (bytes > kUnasked && bytes > available()) {
    throw SystemError("a segment of " + std::to_string(bytes) + " bytes is more than the " +
                      std::to_string(available()) + " bytes of memory that are available");
  }
  Descriptor file(::memfd_create("gradsync", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (file.value < 0) throw SystemError(reason("memfd_create"));
  if (::fchmod(file.value, S_IRUSR | S_IWUSR) != 0) throw SystemError(reason("fchmod"));
  if (::ftruncate(file.value, static_cast<off_t>(bytes)) != 0) {
    throw SystemError(reason("ftruncate to " + std::to_string(bytes) + " bytes"));
  }
  if (::fallocate(file.value, 0, 0, static_cast<off_t>(bytes)) != 0) {
    throw SystemError(reason("fallocate of " + std::to_string(bytes) + " bytes"));
  }
  if (::fcntl(file.value, F_ADD_SEALS, kSeals) != 0) throw SystemError(reason("F_ADD_SEALS"));
  Segment segment(file.value, bytes);
  file.release();
  return segment;
}

Segment Segment::open(const Ticket& ticket, std::size_t bytes) {
  if (ticket.pid <= 0 || ticket.descriptor < 0 || ticket.bytes != bytes) {
    throw InvalidError("a segment was announced with pid " + std::to_string(ticket.pid) +
                       ", descriptor " + std::to_string(ticket.descriptor) + ", " +
                       std::to_string(ticket.bytes) + " bytes, where " + std::to_string(bytes) +
                       " bytes were expected");
  }
  const std::string path =
      "/proc/" + std::to_string(ticket.pid) + "/fd/" + std::to_string(ticket.descriptor);
  // O_NONBLOCK: a pipe in its place must not keep us.
  Descriptor file(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK));
  if (file.value < 0) throw SystemError(reason("open " + path));
  struct stat facts {};
  if (::fstat(file.value, &facts) != 0) throw SystemError(reason("fstat"));
  const int seals = ::fcntl(file.value, F_GET_SEALS);
  if (!S_ISREG(facts.st_mode) || facts.st_uid != ::geteuid() ||
      static_cast<std::uint64_t>(facts.st_size) != bytes || seals < 0 || (seals & kSeals) != kSeals) {
    throw InvalidError(path + " is not a segment of ours");
  }
  Segment segment(file.value, bytes);
  ::close(file.release());
  segment.descriptor_ = kNone;
  return segment;
}

Segment::Segment(int descriptor, std::size_t bytes) : descriptor_(descriptor), size_(bytes) {
  const int flags = MAP_SHARED | (descriptor == kNone ? MAP_ANONYMOUS : 0);
  void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, descriptor, 0);
  if (address == MAP_FAILED) throw SystemError(reason("mmap of " + std::to_string(bytes) + " bytes"));
  data_ = static_cast<std::byte*>(address);
}

Segment::Segment(Segment&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, kNone)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

Segment& Segment::operator=(Segment&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

Segment::~Segment() {
  if (data_ != nullptr) ::munmap(data_, size_);
  close_descriptor();
}

Ticket Segment::ticket() const { return {own_pid(), descriptor_, size_}; }

void Segment::discard() {
  if (descriptor_ >= 0) {
    ::fallocate(descriptor_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(size_));
  }
}

void Segment::close_descriptor() {
  if (descriptor_ >= 0) ::close(std::exchange(descriptor_, kNone));
}

}  // namespace gradsync
