// What can go wrong, as C++ exceptions that carry facts. Python turns them into gradsync.errors.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace gradsync {

// A system call failed: shared memory is not to be had, a process cannot be watched, …
struct SystemError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Bytes from another process, or from a caller, are not what they must be.
struct InvalidError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// It is not the time, or not the process, for that.
struct StateError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The ranks disagree on a collective. The group can be used on.
struct MismatchError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The base of what breaks a group: no collective will complete on it any more.
struct BrokenError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Who a rank is, as it told the others.
struct Peer {
  std::int64_t pid = 0;
  std::uint64_t started = 0;
  std::string label;  // for messages: "rank 3 (pid 17 on host a)"
  int rank = 0;       // in the whole group, of which this machine may have a part
  std::string host;
};

// A peer has ended, or has left the group, while others still need it.
struct PeerLostError : BrokenError {
  PeerLostError(const std::string& what, int index, Peer peer)
      : BrokenError(what), index(index), peer(std::move(peer)) {}
  int index;  // on this machine
  Peer peer;
};

// A peer has not arrived in time.
struct DeadlineError : BrokenError {
  DeadlineError(const std::string& what, std::vector<int> missing)
      : BrokenError(what), missing(std::move(missing)) {}
  std::vector<int> missing;  // ranks in the whole group
};

// Whoever waited was interrupted, by Ctrl-C for one.
struct InterruptedError : BrokenError {
  using BrokenError::BrokenError;
};

// abort() was called, here or on a peer.
struct AbortedError : BrokenError {
  using BrokenError::BrokenError;
};

}  // namespace gradsync
