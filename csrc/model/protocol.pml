/* The protocol of csrc as a model for spin: see protocol.py, which has the same without spin, and
 * docs/shared-memory.md. spin.py runs it:
 *
 *   -DN=3         ranks
 *   -DSCENARIO=1  what they run, see the end
 *   -DVICTIM=0    a rank that may be killed at any step
 *   -DSTAYS       ranks do nothing more at the end, instead of leaving
 *   -DONE_SLOT -DNO_WAKE -DNO_RECHECK -DNO_LOOK -DCLOCK_FIRST -DTAKEN_TWICE:
 *                 mistakes that have to be found
 */
#ifndef N
#define N 2
#endif
#ifndef SCENARIO
#define SCENARIO 1
#endif
#ifdef ONE_SLOT
#define SLOT(turn) 0
#else
#define SLOT(turn) ((turn) % 2)
#endif
#define WRITING 255
#define TAG(round) (sequence * 8 + (round))

byte clock[N], sleepers[N];
byte asleep[N];                      /* on the clock of rank asleep - 1, or 0 */
bool gone[N], dead[N];               /* left, lost a peer, or died: others see it */
byte announcement[2 * N], in[2 * N], out[2 * N], memory[N];
byte taken[N], share[N];             /* of a reduction in place: its number */

inline wake() {
  for (q : 0 .. N - 1) {
    if
    :: asleep[q] == r + 1 -> asleep[q] = 0
    :: else
    fi
  }
  q = 0
}

inline tick() {
  now++;
  clock[r] = now;
  if
#ifndef NO_WAKE
  :: sleepers[r] > 0 -> d_step { wake() }
#endif
  :: else
  fi
}

/* Is there a reason to wake after a while, though nobody rang? Only if a rank is gone. */
#define USEFUL(q) (gone[q] && (clock[q] < now || (q == p && clock[q] != seen)))
#if N == 2
#define ANY_USEFUL (USEFUL(0) || USEFUL(1))
#else
#define ANY_USEFUL (USEFUL(0) || USEFUL(1) || USEFUL(2))
#endif

inline look() {
#ifndef NO_LOOK
  d_step {  /* who is gone ... */
    looked = 0;
    for (q : 0 .. N - 1) {
#ifdef CLOCK_FIRST
      if :: clock[q] < now -> looked = looked | (1 << q) :: else fi
#else
      if :: gone[q] -> looked = looked | (1 << q) :: else fi
#endif
    }
    q = 0
  };
  d_step {  /* ... and only then how far it came */
    for (q : 0 .. N - 1) {
#ifdef CLOCK_FIRST
      if :: !gone[q] -> looked = looked & ~(1 << q) :: else fi;
#else
      if :: clock[q] >= now -> looked = looked & ~(1 << q) :: else fi;
#endif
      assert(!(looked >> q & 1) || !gone[q] || clock[q] < now)  /* nobody is missed who had come */
    }
    q = 0
  };
  if
  :: looked != 0 -> looked = 0; goto lost
  :: else
  fi
#else
  skip
#endif
}

inline await() {
  p = 0;
  do
  :: p == N -> break
  :: p < N && p == r -> p++
  :: p < N && p != r ->
    seen = clock[p];
    if
    :: seen >= now -> p++
    :: else ->
      look();
      sleepers[p]++;
      atomic {  /* the kernel's comparison */
        if
#ifdef NO_RECHECK
        :: true -> asleep[r] = p + 1
#else
        :: clock[p] == seen -> asleep[r] = p + 1
        :: else
#endif
        fi
      };
      if
      :: asleep[r] == 0
      :: asleep[r] != 0 && ANY_USEFUL -> asleep[r] = 0
      fi;
      sleepers[p]--
    fi;
    seen = 0
  od;
  p = 0
}

/* As reading begins, and as it ends, the data is there and nobody writes it. Macros, since spin takes no
 * arrays for arguments. */
#define ALL(condition) d_step { for (q : 0 .. N - 1) { assert(q == r || (condition)) } q = 0 }
#define check_pair(what, slot, tag) \
  ALL(what[2 * q + (slot)] == (tag)); ALL(what[2 * q + (slot)] == (tag))
#define check(what, tag) ALL(what[q] == (tag)); ALL(what[q] == (tag))

/* One tick and one turn for everybody, whatever it asks for; `with_data`: also fills its slot. */
inline post(with_data) {
  sequence++;
  d_step {
    announcement[2 * r + sequence % 2] = WRITING;
    if :: with_data -> in[2 * r + SLOT(turn)] = WRITING :: else fi
  };
  d_step {
    announcement[2 * r + sequence % 2] = sequence;
    if :: with_data -> in[2 * r + SLOT(turn)] = TAG(0) :: else fi
  };
  turn++;
  tick();
  await();
  check_pair(announcement, sequence % 2, sequence)
}

inline small() {
  post(true);
  check_pair(in, SLOT(turn - 1), TAG(0))
}

inline exchange(rounds) {
  post(false);
  for (round : 1 .. rounds) {
    in[2 * r + SLOT(turn)] = WRITING;
    in[2 * r + SLOT(turn)] = TAG(round);
    turn++;
    tick();
    await();
    check_pair(in, SLOT(turn - 1), TAG(round))
  }
  round = 0
}

inline through_slots(chunks) {
  post(false);
  for (round : 1 .. chunks + 1) {
    if
    :: round <= chunks ->
      in[2 * r + SLOT(turn)] = WRITING;
      in[2 * r + SLOT(turn)] = TAG(round)
    :: else
    fi;
    turn++;
    tick();
    await();
    if
    :: round > 1 -> check_pair(out, SLOT(turn), TAG(round - 1))
    :: else
    fi;
    if
    :: round <= chunks ->
      check_pair(in, SLOT(turn - 1), TAG(round));
      out[2 * r + SLOT(turn - 1)] = WRITING;
      out[2 * r + SLOT(turn - 1)] = TAG(round)
    :: else
    fi
  }
  round = 0
}

/* One compare-exchange: a share, which is one piece here, is taken once. */
inline take() {
#ifndef TAKEN_TWICE
  atomic
#endif
  {
    if
    :: taken[s] != sequence -> taken[s] = sequence; mine = true
    :: else -> mine = false
    fi
  }
}

inline in_place() {
  memory[r] = WRITING;
  memory[r] = sequence + 1;
  post(false);
  for (round : 0 .. N - 1) {  /* its own share first, then what is left of the others' */
    s = (r + round) % N;
    take();
    if
    :: mine ->
      assert(share[s] != WRITING && share[s] != sequence);
      share[s] = WRITING;
      check(memory, sequence);  /* reads and writes it */
      share[s] = sequence
    :: else
    fi
  }
  round = 0;
  s = 0;
  mine = false;
  tick();
  await();
  check(share, sequence);
  assert(share[r] == sequence)
}

/* Rank 0 asks for something large, the others for something small: all hear of it. */
inline mismatch() { post(r != 0) }

proctype Rank(byte r) {
  byte now, sequence, turn, round, p, q, s, seen, looked;
  bool mine;
  {
#if SCENARIO == 1
    small(); small(); small()
#elif SCENARIO == 2
    small(); through_slots(2); small()
#elif SCENARIO == 3
    exchange(2); small(); exchange(1)
#elif SCENARIO == 4
    in_place(); in_place(); small()
#elif SCENARIO == 5
    mismatch(); small(); through_slots(1)
#endif
    ;
#ifdef STAYS
    goto finished;
#endif
lost: skip;
    d_step { gone[r] = true; wake() };
finished: skip
  } unless { dead[r] }
}

#ifdef VICTIM
proctype Death() {
  if
  :: d_step { dead[VICTIM] = true; gone[VICTIM] = true }
  :: skip
  fi
}
#endif

init {
  atomic {
    run Rank(0);
    run Rank(1);
#if N == 3
    run Rank(2);
#endif
#ifdef VICTIM
    run Death();
#endif
  }
}
