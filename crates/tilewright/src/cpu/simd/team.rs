//! A team of threads that executes one job at a time: fork-join without a system call while its members are awake.
//!
//! 1. The calling thread publishes a job by opening a new generation of the state word, then takes part in it.
//! 2. A member that sees an open generation joins by incrementing the word's count, executes, and decrements the count.
//! 3. When the caller has no work left, it closes the generation and waits for the members that joined, no others.
//!
//! Each thread that has a core owns a contiguous range of task indices, which it takes in ascending order, so that a task can prefetch
//! for the next one. A thread whose range is empty takes the last index of the longest range.
//!
//! Members are therefore optional: a member that sleeps or is descheduled delays no job. A member spins for [`SPIN`] after its
//! last job, then parks. The caller wakes parked members only for jobs that last longer than a wake-up, and members beyond the
//! number of cores, which never spin, only for long jobs.

use std::{
    any::Any,
    fmt,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, Thread},
    time::{Duration, Instant},
};

/// How long an idle member spins: longer than the work between two steps of an engine on one thread.
const SPIN: Duration = Duration::from_micros(200);
/// Age of a job at which parked members are woken; a wake-up takes about as long.
const WAKE: Duration = Duration::from_micros(20);
/// Age of a job at which members beyond the number of cores are woken, too.
const WAKE_ALL: Duration = Duration::from_millis(2);
/// Polls between two readings of the clock.
const POLLS: usize = 64;

/// Bits of the state word: the number of joined members, whether the job is open, and the generation.
const JOINED: u64 = OPEN - 1;
const OPEN: u64 = 1 << 32;
const GENERATION: u64 = 1 << 33;

/// The part of a job that one thread executes: it takes task indices until there are none.
type TeamWork<'a> = dyn Fn(&mut TaskIndices<'_>) + Sync + 'a;

/// A job, with its lifetime erased; valid while its generation is open or a member has joined it.
type Job = &'static TeamWork<'static>;

/// The threads of a team. Dropping it ends them.
pub(crate) struct Team {
    shared: Arc<TeamState>,
    members: Vec<Thread>,
    /// Members that spin; the others exceed the cores of the machine.
    num_spinning: usize,
    /// Held by the thread whose job is executed.
    busy: Mutex<()>,
}

struct TeamState {
    state: CacheLine<AtomicU64>,
    /// The tasks of the job that no thread has taken: one range for the caller, then one per spinning member.
    ranges: Vec<IndexRange>,
    job: Mutex<Option<Job>>,
    parked: Vec<AtomicBool>,
    stopped: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// A value with a cache line of its own, because other threads poll it.
#[repr(align(128))]
struct CacheLine<T>(T);

/// Task indices that no thread has taken: the first in the low 32 bits, the end in the high ones.
struct IndexRange(CacheLine<AtomicU64>);

/// The task indices of a job, as one thread takes them.
pub(crate) struct TaskIndices<'a> {
    ranges: &'a [IndexRange],
    /// The range of this thread; a member beyond the number of cores has none.
    own: usize,
    /// Wakes parked members; only in the calling thread.
    recruiter: Option<Recruiter<'a>>,
}

struct Recruiter<'a> {
    team: &'a Team,
    start: Instant,
    /// Members that need no wake-up anymore.
    awake: usize,
}

impl Team {
    /// A team of `threads` threads, the calling one included.
    pub(crate) fn new(threads: usize) -> std::io::Result<Self> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let num_spinning = threads.min(cores) - 1;
        let shared = Arc::new(TeamState {
            state: CacheLine(AtomicU64::new(0)),
            ranges: (0..=num_spinning).map(|_| IndexRange::new(0..0)).collect(),
            job: Mutex::new(None),
            parked: (1..threads).map(|_| AtomicBool::new(false)).collect(),
            stopped: AtomicBool::new(false),
            panic: Mutex::new(None),
        });
        let mut team = Self { shared, members: Vec::new(), num_spinning, busy: Mutex::new(()) };
        for index in 0..threads - 1 {
            let shared = team.shared.clone();
            let spin = if index < num_spinning { SPIN } else { Duration::ZERO };
            let named = thread::Builder::new().name(format!("tilewright-{}", index + 1));
            team.members.push(named.spawn(move || shared.serve(index, spin))?.thread().clone());
        }
        Ok(team)
    }

    /// The number of threads, the calling one included.
    pub(crate) fn threads(&self) -> usize {
        self.members.len() + 1
    }

    /// Calls `work` on the calling thread and on members that are awake or woken, and returns when all calls have returned. The
    /// calls share the indices `0..count`, at most 2³² - 1. A call from a task, or while another thread uses the team, has no
    /// members.
    pub(crate) fn run(&self, count: usize, work: &TeamWork<'_>) {
        assert!(u32::try_from(count).is_ok(), "a job has at most 2^32 - 1 tasks");
        let Some(busy) = self.reserve().filter(|_| count > 1) else {
            let ranges = &[IndexRange::new(0..count)];
            return work(&mut TaskIndices { ranges, own: 0, recruiter: None });
        };
        // SAFETY: only the lifetime changes. A member uses `work` only between joining an open generation and leaving it, and
        // `Close` ends the generation and waits for all joined members before this function returns or unwinds.
        let work = unsafe { std::mem::transmute::<&TeamWork<'_>, &'static TeamWork<'static>>(work) };
        let shared = &*self.shared;
        *lock(&shared.job) = Some(work);
        *lock(&shared.panic) = None;
        let owners = shared.ranges.len();
        for (owner, range) in shared.ranges.iter().enumerate() {
            range.set(count * owner / owners..count * (owner + 1) / owners);
        }
        // The previous generation is closed and has no members, so no other thread changes the word.
        let state = shared.state.0.load(Ordering::Relaxed);
        shared.state.0.store(state.wrapping_add(GENERATION) | OPEN, Ordering::SeqCst);
        let close = Close(shared);
        let recruiter = Some(Recruiter { team: self, start: Instant::now(), awake: 0 });
        work(&mut TaskIndices { ranges: &shared.ranges, own: 0, recruiter });
        drop(close);
        drop(busy);
        let panic = lock(&shared.panic).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// The right to publish a job; `None` without members or while they execute one.
    fn reserve(&self) -> Option<MutexGuard<'_, ()>> {
        match self.busy.try_lock() {
            _ if self.members.is_empty() => None,
            Ok(busy) => Some(busy),
            // a caller unwound after its job had ended
            Err(TryLockError::Poisoned(busy)) => Some(busy.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

impl fmt::Debug for Team {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Team({} threads)", self.threads())
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::SeqCst);
        self.members.iter().for_each(Thread::unpark);
    }
}

/// Closes the generation and waits for its members, also when the caller unwinds.
struct Close<'a>(&'a TeamState);

impl Drop for Close<'_> {
    fn drop(&mut self) {
        self.0.state.0.fetch_and(!OPEN, Ordering::SeqCst);
        let mut polls = 0;
        while self.0.state.0.load(Ordering::Acquire) & JOINED != 0 {
            polls += 1;
            // a member without a core needs this one
            if polls % POLLS == 0 { thread::yield_now() } else { std::hint::spin_loop() }
        }
    }
}

impl TeamState {
    /// The loop of a member.
    fn serve(&self, index: usize, spin: Duration) {
        let (mut seen, mut idle_since, mut polls) = (0, Instant::now(), 0);
        while !self.stopped.load(Ordering::Relaxed) {
            let state = self.state.0.load(Ordering::SeqCst);
            if state & OPEN != 0 && state / GENERATION != seen {
                if self
                    .state
                    .0
                    .compare_exchange(state, state + 1, Ordering::SeqCst, Ordering::Relaxed)
                    .is_ok()
                {
                    seen = state / GENERATION;
                    self.execute(index + 1);
                    self.state.0.fetch_sub(1, Ordering::Release);
                    (idle_since, polls) = (Instant::now(), 0);
                }
                continue;
            }
            polls += 1;
            if polls % POLLS != 0 {
                std::hint::spin_loop();
            } else if idle_since.elapsed() >= spin {
                self.park(index, seen);
                idle_since = Instant::now();
            }
        }
    }

    /// Sleeps until the caller of a job or [`Team::drop`] wakes this member.
    fn park(&self, index: usize, seen: u64) {
        self.parked[index].store(true, Ordering::SeqCst);
        let state = self.state.0.load(Ordering::SeqCst);
        let has_work = state & OPEN != 0 && state / GENERATION != seen;
        if !has_work && !self.stopped.load(Ordering::SeqCst) {
            thread::park();
        }
        self.parked[index].store(false, Ordering::SeqCst);
    }

    /// Executes the job that this member has joined; `own` is the index of its range.
    fn execute(&self, own: usize) {
        let Some(work) = *lock(&self.job) else { return };
        let mut indices = TaskIndices { ranges: &self.ranges, own, recruiter: None };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| work(&mut indices))) {
            self.ranges.iter().for_each(|range| range.set(0..0));
            *lock(&self.panic) = Some(panic);
        }
    }
}

impl Iterator for TaskIndices<'_> {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        if let Some(recruiter) = &mut self.recruiter {
            recruiter.wake_due();
        }
        let own = self.ranges.get(self.own).and_then(|range| range.take(End::First));
        own.or_else(|| self.take_from_others())
    }
}

impl TaskIndices<'_> {
    /// The last index of the longest range.
    fn take_from_others(&self) -> Option<usize> {
        loop {
            let longest = self.ranges.iter().max_by_key(|range| range.len())?;
            if longest.len() == 0 {
                return None;
            }
            // another thread may have emptied it meanwhile
            if let Some(index) = longest.take(End::Last) {
                return Some(index);
            }
        }
    }
}

/// The end of a range from which an index is taken.
#[derive(Clone, Copy)]
enum End {
    First,
    Last,
}

impl IndexRange {
    fn new(range: Range<usize>) -> Self {
        let new = Self(CacheLine(AtomicU64::new(0)));
        new.set(range);
        new
    }

    fn set(&self, range: Range<usize>) {
        self.0.0.store((range.end as u64) << 32 | range.start as u64, Ordering::Relaxed);
    }

    fn bounds(word: u64) -> Range<u64> {
        word & u64::from(u32::MAX)..word >> 32
    }

    fn len(&self) -> u64 {
        let Range { start, end } = Self::bounds(self.0.0.load(Ordering::Relaxed));
        end - start
    }

    fn take(&self, from: End) -> Option<usize> {
        let rest = |word: u64| {
            let taken = match from {
                End::First => word + 1,
                End::Last => word.wrapping_sub(1 << 32),
            };
            (!Self::bounds(word).is_empty()).then_some(taken)
        };
        let Range { start, end } =
            Self::bounds(self.0.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, rest).ok()?);
        Some(match from {
            End::First => start,
            End::Last => end - 1,
        } as usize)
    }
}

impl Recruiter<'_> {
    /// Wakes the parked members that the age of the job justifies, each once.
    fn wake_due(&mut self) {
        let parked = &self.team.shared.parked;
        while parked.get(self.awake).is_some_and(|parked| !parked.load(Ordering::Relaxed)) {
            self.awake += 1;
        }
        if self.awake == parked.len() {
            return;
        }
        let wait = if self.awake < self.team.num_spinning { WAKE } else { WAKE_ALL };
        let due = self.start.elapsed() >= wait;
        if due {
            self.team.members[self.awake].unpark();
            self.awake += 1;
        }
    }
}

/// Locks a mutex whose data stays valid when a thread panics.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
