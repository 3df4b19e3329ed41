/* The protocol of csrc as a model for spin: see protocol.py, which has the same without spin, and
 * docs/shared-memory.md. spin.py runs it:
 *
 *   -DN=3         ranks
 *   -DSCENARIO=1  what they run, see the end
 *   -DVICTIM=0    a rank that may be killed at any step
 *   -DABORTER=0   a rank that may abort at any step
 *   -DABSENT=1    a rank that does not come to the last, and computes instead
 *   -DSTAYS       ranks do nothing more at the end, instead of leaving
 *   -DONE_SLOT -DONE_TURN_MORE -DNO_WAKE -DNO_RECHECK -DNO_LOOK -DCLOCK_FIRST -DTAKEN_TWICE -DCOUNT_TAKEN
 *   -DNO_BEGIN -DNO_SECOND_LOOK -DDEAF:
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
#define TAG(round, is_reduced) (sequence * 8 + (round) * 2 + (is_reduced))
#define PART(owner, turn, part) slot[(2 * (owner) + SLOT(turn)) * N + (part)]

#define TICKS 0
#define PIECES 1

byte word[2], sleepers[2];           /* what all count up and wait on */
byte asleep[N];                      /* on a word: that + 1, or 0 */
byte clock[N], begun[N], reduced[N]; /* how far a rank has come */
bool gone[N], dead[N], said[N];      /* left, lost a peer, or died: others see it; all but the last say so */
bool aborted;                        /* by one, for all; never with -DDEAF, but the rank is gone */
byte announcement[2 * N], memory[N];
byte slot[2 * N * N];                /* of a rank's two: a part for each rank */
byte taken[N], share[N];             /* of a reduction in place: its number */

inline wake(which) {
  for (q : 0 .. N - 1) {
    if
    :: asleep[q] == which + 1 -> asleep[q] = 0
    :: else
    fi
  }
  q = 0
}

inline ring(which) {
  if
#ifndef NO_WAKE
  :: last && sleepers[which] > 0 -> d_step { wake(which) }
#endif
  :: else
  fi;
  last = false
}

inline tick() {
  now++;
#ifdef CLOCK_FIRST
  clock[r] = now;
#endif
  d_step { word[TICKS]++; last = word[TICKS] == N * now };
#ifndef CLOCK_FIRST
  clock[r] = now;
#endif
  ring(TICKS)
}

#define COME(q, which) ((which == TICKS && clock[q] >= now) || \
  (which == PIECES && (begun[q] < sequence || reduced[q] >= sequence)))

/* Is there a reason to wake after a while, though nobody rang? Only if a rank is gone: one that has not
 * come, or one that died before it rang; or if all are to end and one has not come. */
#define USEFUL(q, which, goal) \
  ((gone[q] && (!COME(q, which) || word[which] >= goal)) || (aborted && !COME(q, which)))
#if N == 2
#define ANY_USEFUL(which, goal) (USEFUL(0, which, goal) || USEFUL(1, which, goal))
#else
#define ANY_USEFUL(which, goal) (USEFUL(0, which, goal) || USEFUL(1, which, goal) || USEFUL(2, which, goal))
#endif

inline look(which, goal) {
#ifndef NO_LOOK
  d_step {  /* who is gone ... */
    looked = (aborted -> 1 << N : 0);
    for (q : 0 .. N - 1) {
      if :: gone[q] -> looked = looked | (1 << q) :: else fi
    }
    q = 0
  };
  d_step {  /* ... and only then how far it came */
    all_came = true;
    for (q : 0 .. N - 1) {
      if :: COME(q, which) -> looked = looked & ~(1 << q) :: else -> all_came = false fi;
      assert(!(looked >> q & 1) || !gone[q] || !COME(q, which))  /* nobody is missed who had come */
    }
    if :: all_came -> looked = 0 :: else fi;
    all_came = false;
    q = 0
  };
  if
  :: looked != 0 ->
    looked = 0;
    if
    :: word[which] >= goal  /* all is done without it */
    :: else -> goto lost
    fi
  :: else
  fi
#else
  skip
#endif
}

inline await(which, goal) {
  do
  :: word[which] >= goal -> break
  :: else ->
    seen = word[which];
    if
    :: seen >= goal
    :: else ->
      look(which, goal);
      sleepers[which]++;
      atomic {  /* the kernel's comparison */
        if
#ifdef NO_RECHECK
        :: true -> asleep[r] = which + 1
#else
        :: word[which] == seen -> asleep[r] = which + 1
        :: else
#endif
        fi
      };
      if
      :: asleep[r] == 0
      :: asleep[r] != 0 && ANY_USEFUL(which, goal) -> asleep[r] = 0
      fi;
      sleepers[which]--
    fi;
    seen = 0
  od;
  skip
}

/* As reading begins, and as it ends, the data is there and nobody writes it. Macros, since spin takes no
 * arrays for arguments. */
#define ALL(condition) d_step { for (q : 0 .. N - 1) { assert(q == r || (condition)) } q = 0 }
#define check_pair(what, which, tag) \
  ALL(what[2 * q + (which)] == (tag)); ALL(what[2 * q + (which)] == (tag))
#define check(what, tag) ALL(what[q] == (tag)); ALL(what[q] == (tag))
#define check_given(turn, tag) ALL(PART(q, turn, r) == (tag)); ALL(PART(q, turn, r) == (tag))
#define take(turn, tag) ALL(PART(r, turn, q) == (tag)); ALL(PART(r, turn, q) == (tag))

/* Who gives what: nothing, its own slot, or those of all others. */
#define NOTHING 0
#define OWN 1
#define OTHERS 2

inline put(who, turn, tag) {
  for (q : 0 .. N - 1) {
    for (p : 0 .. N - 1) {
      if
      :: (who == OWN && q == r) || (who == OTHERS && q != r) -> PART(q, turn, p) = tag
      :: else
      fi
    }
  }
  q = 0;
  p = 0
}

inline give(who, turn, tag) {
  d_step { put(who, turn, WRITING) };
  d_step { put(who, turn, tag) }
}

/* One tick and one turn for everybody, whatever it asks for; `who`: with the first data. */
inline post(who) {
  sequence++;
  d_step { announcement[2 * r + sequence % 2] = WRITING; put(who, turn, WRITING) };
  d_step { announcement[2 * r + sequence % 2] = sequence; put(who, turn, TAG(0, 0)) };
  turn++;
  tick();
  await(TICKS, N * now);
  check_pair(announcement, sequence % 2, sequence)
}

inline exchange(rounds) {
  post(OWN);
  check_given(turn - 1, TAG(0, 0));
  for (round : 1 .. rounds - 1) {
    give(OWN, turn, TAG(round, 0));
    turn++;
    tick();
    await(TICKS, N * now);
    check_given(turn - 1, TAG(round, 0))
  }
  round = 0
}

inline small() { exchange(1) }

/* Rank 0 alone gives, into the slots of the others. */
#define GIVER (r == 0 -> OTHERS : NOTHING)
#define HAS(turn, tag) assert(r == 0 || PART(r, turn, r) == (tag))
inline scatter(rounds) {
  post(GIVER);
  HAS(turn - 1, TAG(0, 0)); HAS(turn - 1, TAG(0, 0));
  for (round : 1 .. rounds - 1) {
    give(GIVER, turn, TAG(round, 0));
    turn++;
    tick();
    await(TICKS, N * now);
    HAS(turn - 1, TAG(round, 0)); HAS(turn - 1, TAG(round, 0))
  }
  round = 0
}

/* Reduces its share of chunk `round` in all slots of the turn, where it finds it. */
#define mine_of_all(turn, tag) d_step { for (q : 0 .. N - 1) { if :: q != r -> PART(q, turn, r) = tag :: else fi } q = 0 }
inline reduce_chunk() {
  ALL(PART(q, turn - 1, r) == TAG(round, 0));
  mine_of_all(turn - 1, WRITING);
  mine_of_all(turn - 1, TAG(round, 1));
  ALL(PART(q, turn - 1, r) == TAG(round, 1))
}

inline through_slots(chunks) {
  post(OWN);
  for (round : 0 .. chunks - 1) {
    reduce_chunk();
    if
    :: round > 0 -> take(turn, TAG(round - 1, 1))
    :: else
    fi;
    if
    :: round + 1 < chunks -> give(OWN, turn, TAG(round + 1, 0))
    :: else
    fi;
    tick();
    await(TICKS, N * now);
    if
    :: round + 1 < chunks -> turn++
    :: else
    fi
  }
  round = 0;
#ifdef ONE_TURN_MORE
  turn++;
  take(turn - 2, TAG(chunks - 1, 1))
#else
  take(turn - 1, TAG(chunks - 1, 1))
#endif
}

/* One compare-exchange: a share, which is one piece here, is taken once. */
inline take_share() {
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

/* Does a rank say that it is gone? Only if not all is done, then, this one gives up. */
inline ask_who_is_present() {
  d_step {
    for (q : 0 .. N - 1) {
      if :: said[q] -> looked = 1 :: else fi
    }
    q = 0
  };
  if
  :: looked != 0 ->
    looked = 0;
#ifdef NO_SECOND_LOOK
    assert(word[PIECES] < pieces); goto lost
#else
    if
    :: word[PIECES] >= pieces -> late = true
    :: else -> goto lost
    fi
#endif
  :: else
  fi
}

inline reduce_pieces() {
#ifndef NO_BEGIN
  begun[r] = sequence;
#endif
  for (round : 0 .. N - 1) {  /* its own share first, then what is left of the others' */
    s = (r + round) % N;
    take_share();
    if
    :: mine ->
      assert(share[s] != WRITING && share[s] != sequence);
#ifdef COUNT_TAKEN
      d_step { word[PIECES]++; last = last || word[PIECES] == pieces };
#else
      count++;
#endif
      share[s] = WRITING;
      check(memory, sequence);  /* reads and writes it */
      share[s] = sequence
    :: else
    fi
  }
  round = 0;
  s = 0;
  mine = false;
  d_step { word[PIECES] = word[PIECES] + count; last = last || (count > 0 && word[PIECES] == pieces); count = 0 };
  reduced[r] = sequence;
  ring(PIECES)
}

inline in_place() {
  memory[r] = WRITING;
  memory[r] = sequence + 1;
  post(NOTHING);
  pieces = pieces + N;
  late = word[PIECES] >= pieces;
  if
  :: !late -> ask_who_is_present()
  :: else
  fi;
  if
  :: !late -> reduce_pieces(); await(PIECES, pieces)
  :: else
  fi;
  late = false;
  check(share, sequence);
  assert(share[r] == sequence)
}

/* Rank 0 asks for a scatter, the others for something else: all hear of it. */
inline mismatch() { post((r == 0 -> OTHERS : OWN)) }

inline stay_out() {
#ifdef ABSENT
  if
  :: r == ABSENT -> goto finished
  :: else
  fi
#else
  skip
#endif
}

proctype Rank(byte r) {
  byte now, sequence, turn, round, p, q, s, seen, looked, pieces, count;
  bool mine, last, late, all_came;
  {
#if SCENARIO == 1
    small(); small(); stay_out(); small()
#elif SCENARIO == 2
    small(); through_slots(3); stay_out(); scatter(1)
#elif SCENARIO == 3
    exchange(2); scatter(2); stay_out(); small()
#elif SCENARIO == 4
    in_place(); stay_out(); in_place()
#elif SCENARIO == 5
    mismatch(); small(); through_slots(1); stay_out(); scatter(1)
#elif SCENARIO == 6
    in_place(); stay_out(); small()
#endif
    ;
#ifdef STAYS
    goto finished;
#endif
lost: skip;
    d_step { said[r] = true; gone[r] = true; wake(TICKS); wake(PIECES) };
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

#ifdef ABORTER
/* Later or sooner, or there would be ranks that wait for ever, and rightly. */
proctype Abort() {
  byte q;
  d_step {
    dead[ABORTER] = true;
    said[ABORTER] = true;
    gone[ABORTER] = true;
#ifndef DEAF
    aborted = true;
#endif
    for (q : 0 .. N - 1) { asleep[q] = 0 }
    q = 0
  }
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
#ifdef ABORTER
    run Abort();
#endif
  }
}
