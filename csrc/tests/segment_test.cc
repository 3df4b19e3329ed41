// The real segments: the build for ThreadSanitizer has others, see one_mapping.cc.
#include "../segment.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "../error.h"
#include "check.h"

using namespace gradsync;

namespace {

constexpr std::size_t kBytes = 3 * 4096;

int open_descriptors() {
  DIR* directory = ::opendir("/proc/self/fd");
  int count = 0;
  while (::readdir(directory) != nullptr) ++count;
  ::closedir(directory);
  return count;
}

// A file that is not a segment of ours.
struct File {
  explicit File(int descriptor) : descriptor(descriptor) {}
  ~File() { ::close(descriptor); }
  Ticket ticket(std::size_t bytes) const { return {::getpid(), descriptor, bytes}; }
  int descriptor;
};

TEST(who_opens_a_segment_sees_what_its_maker_writes_and_back) {
  Segment made = Segment::create(kBytes);
  CHECK_EQUAL(made.size(), kBytes);
  for (std::size_t i = 0; i < kBytes; ++i) CHECK(made.data()[i] == std::byte{0});
  Segment opened = Segment::open(made.ticket(), kBytes);
  CHECK(opened.data() != made.data());
  made.data()[kBytes - 1] = std::byte{42};
  opened.data()[0] = std::byte{17};
  CHECK(opened.data()[kBytes - 1] == std::byte{42});
  CHECK(made.data()[0] == std::byte{17});
}

TEST(a_segment_of_one_rank_alone_needs_no_file_and_cannot_be_opened) {
  const int before = open_descriptors();
  Segment made = Segment::alone(kBytes);
  CHECK_EQUAL(open_descriptors(), before);
  CHECK_EQUAL(made.size(), kBytes);
  for (std::size_t i = 0; i < kBytes; ++i) CHECK(made.data()[i] == std::byte{0});
  made.data()[kBytes - 1] = std::byte{42};
  CHECK_THROWS(InvalidError, Segment::open(made.ticket(), kBytes));
  made.close_descriptor();
  Segment moved(std::move(made));
  CHECK(moved.data()[kBytes - 1] == std::byte{42});
}

TEST(the_ticket_of_a_child_after_fork_names_the_child) {
  Segment made = Segment::create(kBytes);
  CHECK_EQUAL(made.ticket().pid, static_cast<std::int64_t>(::getpid()));
  const pid_t child = ::fork();
  if (child == 0) ::_exit(made.ticket().pid == ::getpid() ? 0 : 1);
  int status = -1;
  CHECK_EQUAL(::waitpid(child, &status, 0), child);
  CHECK_EQUAL(status, 0);
  CHECK_EQUAL(made.ticket().pid, static_cast<std::int64_t>(::getpid()));
}

TEST(a_segment_lives_as_long_as_somebody_maps_it_and_leaves_no_descriptor) {
  const int before = open_descriptors();
  {
    Segment opened;
    {
      Segment made = Segment::create(kBytes);
      opened = Segment::open(made.ticket(), kBytes);
      CHECK_EQUAL(open_descriptors(), before + 1);  // the maker's alone
      made.data()[5] = std::byte{5};
      made.close_descriptor();
      CHECK_EQUAL(open_descriptors(), before);
      CHECK_THROWS(InvalidError, Segment::open(made.ticket(), kBytes));  // nobody can come later
    }
    CHECK(opened.data()[5] == std::byte{5});
  }
  CHECK_EQUAL(open_descriptors(), before);
}

TEST(a_segment_moves) {
  Segment made = Segment::create(kBytes);
  std::byte* data = made.data();
  Segment moved(std::move(made));
  CHECK(moved.data() == data && made.data() == nullptr && made.size() == 0);
  Segment assigned;
  assigned = std::move(moved);
  CHECK(assigned.data() == data && moved.data() == nullptr);
}

TEST(a_segment_cannot_change_its_size) {
  Segment made = Segment::create(kBytes);
  const int descriptor = static_cast<int>(made.ticket().descriptor);
  CHECK(::ftruncate(descriptor, 0) != 0);
  CHECK(::ftruncate(descriptor, 2 * kBytes) != 0);
  CHECK(::fcntl(descriptor, F_ADD_SEALS, F_SEAL_WRITE) != 0);
  struct stat facts {};
  CHECK(::fstat(descriptor, &facts) == 0 && (facts.st_mode & 0777) == 0600);
}

TEST(what_was_announced_wrongly_is_refused) {
  Segment made = Segment::create(kBytes);
  const Ticket ticket = made.ticket();
  CHECK_THROWS(InvalidError, Segment::open({0, ticket.descriptor, kBytes}, kBytes));
  CHECK_THROWS(InvalidError, Segment::open({-1, ticket.descriptor, kBytes}, kBytes));
  CHECK_THROWS(InvalidError, Segment::open({ticket.pid, -1, kBytes}, kBytes));
  CHECK_THROWS(InvalidError, Segment::open(ticket, kBytes + 4096));
  CHECK_THROWS(InvalidError, Segment::open({ticket.pid, ticket.descriptor, kBytes + 4096}, kBytes + 4096));
  CHECK_THROWS(SystemError, Segment::open({ticket.pid, 1000000, kBytes}, kBytes));
  CHECK_THROWS(SystemError, Segment::open({std::int64_t{1} << 40, 3, kBytes}, kBytes));
}

TEST(what_is_no_segment_of_ours_is_refused) {
  const int before = open_descriptors();
  {
    const File unsealed(::memfd_create("other", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    CHECK(::ftruncate(unsealed.descriptor, kBytes) == 0);
    CHECK_THROWS(InvalidError, Segment::open(unsealed.ticket(kBytes), kBytes));
    CHECK(::fcntl(unsealed.descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
    CHECK_THROWS(InvalidError, Segment::open(unsealed.ticket(kBytes), kBytes));  // could be sealed further

    const File null(::open("/dev/null", O_RDWR | O_CLOEXEC));
    CHECK_THROWS(InvalidError, Segment::open(null.ticket(kBytes), kBytes));

    int ends[2];
    CHECK(::pipe2(ends, O_CLOEXEC) == 0);
    const File reader(ends[0]), writer(ends[1]);
    CHECK_THROWS(InvalidError, Segment::open(reader.ticket(kBytes), kBytes));  // and does not block

    char name[] = "/tmp/gradsync-test-XXXXXX";
    const File plain(::mkostemp(name, O_CLOEXEC));
    ::unlink(name);
    CHECK(::ftruncate(plain.descriptor, kBytes) == 0);
    CHECK_THROWS(InvalidError, Segment::open(plain.ticket(kBytes), kBytes));
  }
  CHECK_EQUAL(open_descriptors(), before);
}

TEST(more_memory_than_there_is_is_an_error_at_once) {
  const int before = open_descriptors();
  const std::string text = CHECK_THROWS(SystemError, Segment::create(std::size_t{1} << 60));
  CHECK(check::contains(text, "available"));
  CHECK_EQUAL(open_descriptors(), before);
}

TEST(what_is_discarded_reads_as_zeros_also_for_others) {
  Segment made = Segment::create(kBytes);
  Segment opened = Segment::open(made.ticket(), kBytes);
  opened.data()[4096] = std::byte{1};
  made.discard();
  CHECK(made.data()[4096] == std::byte{0} && opened.data()[4096] == std::byte{0});
}

}  // namespace
