//! Shadow memory for race detection: the last write and the last reads of every byte.
//!
//! The algorithm is FastTrack (Flanagan and Freund, 2009): a cell holds the last write and the concurrent reads after it. A cell
//! covers 16 bytes; narrower accesses split it into words, and these into bytes.

use super::clock::Clock;
use std::{mem, ops::Range};

/// The thread, time and instruction of an access (an epoch of FastTrack).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Mark {
    /// The cluster in the grid.
    pub(super) cluster: u32,
    /// The index of the thread in its cluster, or of an asynchronous agent after the threads.
    pub(super) thread: u32,
    /// Its release count; 0 for no access.
    pub(super) count: u32,
    /// The instruction.
    pub(super) pc: u32,
    /// The scope of an ordered access: 1 CTA, 2 cluster, 3 device; 0 for weak accesses.
    pub(super) strength: u8,
}

/// Reads of adjacent threads with the same count.
#[derive(Debug, Clone, Copy, Default)]
struct Read {
    mark: Mark,
    /// Bit `i` stands for thread `mark.thread + i`; `mark.thread` is a multiple of 32.
    mask: u32,
}

#[derive(Debug, Clone, Default)]
struct Cell {
    write: Mark,
    read: Read,
    /// More reads: 1 + an index into `lists`.
    more: u32,
    /// The quarters of a split cell: 1 + an index into `splits`.
    split: u32,
}

/// The thread that performs an access.
#[derive(Debug, Clone, Copy)]
pub(super) struct Actor<'a> {
    /// The thread's vector clock.
    pub(super) clock: &'a Clock,
    /// Cluster and thread index; no thread's for several lanes.
    pub(super) id: (u32, u32),
    /// The thread's agent of `cp.async`, and the first batch of it that does not happen before this access.
    pub(super) copies: (u32, u32),
    /// The lanes of `mark.thread`'s warp that perform the access with this mark.
    pub(super) lanes: u32,
    /// The mark that records the access.
    pub(super) mark: Mark,
    pub(super) writes: bool,
    pub(super) shape: ClusterShape,
}

/// A prior access that is not ordered before this one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Conflict {
    pub(super) other: Mark,
    pub(super) wrote: bool,
}

/// The maximum number of concurrent reads per list; more evict the oldest.
const READS: usize = 48;

/// The shadow of a memory range.
#[derive(Debug, Clone, Default)]
pub(super) struct Shadow {
    /// Pages of 1024 bytes, allocated at the first access.
    pages: Vec<Option<Box<[Cell]>>>,
    parts: Parts,
}

/// The reads and quarters that cells refer to.
#[derive(Debug, Clone, Default)]
struct Parts {
    lists: Vec<Vec<Read>>,
    splits: Vec<[Cell; 4]>,
}

/// Threads per CTA, and CTAs per cluster.
#[derive(Debug, Clone, Copy)]
pub(super) struct ClusterShape {
    pub(super) threads: u32,
    pub(super) ctas: u32,
}

impl Actor<'_> {
    /// Whether a mark happens before this access.
    #[inline]
    fn is_ordered_after(&self, mark: &Mark) -> bool {
        mark.count == 0
            || (mark.cluster, mark.thread) == self.id
            || self.clock.get(mark.cluster, mark.thread as usize) > mark.count
            || (mark.cluster, mark.thread) == (self.id.0, self.copies.0) && mark.count < self.copies.1
    }

    /// A read that does not happen before this access, if any.
    fn find_unordered(&self, read: &Read) -> Option<Mark> {
        let first = read.mark.thread as usize;
        let block = self.clock.counts(read.mark.cluster).get(first..first + 32);
        // after a barrier, all of a warp's reads are ordered
        if !read.mask.is_power_of_two()
            && block
                .is_some_and(|block| block.iter().fold(true, |all, &known| all & (known > read.mark.count)))
        {
            return None;
        }
        let mut left = read.mask;
        while left != 0 {
            let mark = Mark { thread: read.mark.thread + left.trailing_zeros(), ..read.mark };
            if !self.is_ordered_after(&mark) {
                return Some(mark);
            }
            left &= left - 1;
        }
        None
    }

    /// Whether this access and that of a mark are ordered at a scope that includes both threads.
    fn is_strong(&self, other: &Mark) -> bool {
        if self.mark.strength == 0 || other.strength == 0 {
            return false;
        }
        let ClusterShape { threads, ctas } = self.shape;
        let rank = |mark: &Mark| (mark.thread < threads * ctas).then(|| mark.thread / threads);
        let apart = match self.mark.cluster == other.cluster {
            true if rank(&self.mark) == rank(other) => 1,
            true => 2,
            false => 3,
        };
        self.mark.strength >= apart && other.strength >= apart
    }
}

impl Cell {
    fn record_read(&mut self, actor: &Actor<'_>, lists: &mut Vec<Vec<Read>>) -> Result<(), Conflict> {
        if !actor.is_ordered_after(&self.write) && !actor.is_strong(&self.write) {
            return Err(Conflict { other: self.write, wrote: true });
        }
        let (base, lanes) = (actor.mark.thread & !31, actor.lanes);
        let mark = Mark { thread: base, ..actor.mark };
        let same = |read: &Read| {
            (read.mark.cluster, read.mark.thread, read.mark.count, read.mark.strength)
                == (mark.cluster, base, mark.count, mark.strength)
        };
        if self.read.mask == 0 || same(&self.read) {
            self.read = Read { mark, mask: self.read.mask | lanes };
            return Ok(());
        }
        if actor.find_unordered(&self.read).is_none() {
            self.read = Read { mark, mask: lanes };
            return Ok(());
        }
        if self.more == 0 {
            lists.push(Vec::new());
            self.more = lists.len() as u32;
        }
        let list = &mut lists[self.more as usize - 1];
        if let Some(read) = list.iter_mut().find(|read| same(read)) {
            read.mask |= lanes;
            return Ok(());
        }
        list.retain(|read| actor.find_unordered(read).is_some());
        if list.len() == READS {
            list.remove(0);
        }
        list.push(Read { mark, mask: lanes });
        Ok(())
    }

    fn record_write(&mut self, actor: &Actor<'_>, lists: &mut [Vec<Read>]) -> Result<(), Conflict> {
        if !actor.is_ordered_after(&self.write) && !actor.is_strong(&self.write) {
            return Err(Conflict { other: self.write, wrote: true });
        }
        // reads that happen before this write are removed
        let is_unordered = |read: &Read| match actor.find_unordered(read) {
            Some(other) if !actor.is_strong(&other) => Err(Conflict { other, wrote: false }),
            other => Ok(other.is_some()),
        };
        if self.read.mask != 0 && !is_unordered(&self.read)? {
            self.read.mask = 0;
        }
        if self.more != 0 {
            let list = &mut lists[self.more as usize - 1];
            let mut kept = 0;
            for at in 0..list.len() {
                if is_unordered(&list[at])? {
                    list.swap(at, kept);
                    kept += 1;
                }
            }
            list.truncate(kept);
        }
        self.write = actor.mark;
        Ok(())
    }

    /// Four copies of the cell, one per quarter.
    fn quarters(&self, lists: &mut Vec<Vec<Read>>) -> [Self; 4] {
        std::array::from_fn(|_| {
            let mut quarter = self.clone();
            if self.more != 0 {
                lists.push(lists[self.more as usize - 1].clone());
                quarter.more = lists.len() as u32;
            }
            quarter
        })
    }

    fn record(&mut self, actor: &Actor<'_>, lists: &mut Vec<Vec<Read>>) -> Result<(), Conflict> {
        if actor.writes { self.record_write(actor, lists) } else { self.record_read(actor, lists) }
    }
}

impl Shadow {
    /// The shadow of `bytes` bytes.
    pub(super) fn new(bytes: usize) -> Self {
        let pages = (0..bytes.div_ceil(1024)).map(|_| None).collect();
        Self { pages, parts: Parts::default() }
    }

    /// Records an access to a byte range.
    #[inline]
    pub(super) fn record(&mut self, bytes: Range<usize>, actor: &Actor<'_>) -> Result<(), Conflict> {
        let mut at = bytes.start;
        while at < bytes.end {
            let upto = bytes.end.min((at & !15) + 16);
            let page = &mut self.pages[at / 1024];
            let page = page.get_or_insert_with(|| vec![Cell::default(); 64].into_boxed_slice());
            self.parts.record(&mut page[at % 1024 / 16], 16, at % 16..at % 16 + (upto - at), actor)?;
            at = upto;
        }
        Ok(())
    }

    /// Calls `each` with the last write to each cell of a byte range.
    pub(super) fn writes(&self, bytes: Range<usize>, mut each: impl FnMut(&Mark)) {
        let mut at = bytes.start;
        while at < bytes.end {
            let upto = bytes.end.min((at & !15) + 16);
            if let Some(page) = &self.pages[at / 1024] {
                self.parts.writes(&page[at % 1024 / 16], 16, at % 16..at % 16 + (upto - at), &mut each);
            }
            at = upto;
        }
    }
}

impl Parts {
    /// Records an access to a byte range of a cell of `size` bytes.
    #[inline]
    fn record(
        &mut self,
        cell: &mut Cell,
        size: usize,
        bytes: Range<usize>,
        actor: &Actor<'_>,
    ) -> Result<(), Conflict> {
        if cell.split == 0 {
            if bytes.len() == size {
                return cell.record(actor, &mut self.lists);
            }
            self.splits.push(cell.quarters(&mut self.lists));
            cell.split = self.splits.len() as u32;
        }
        self.record_quarters(cell.split as usize - 1, size / 4, bytes, actor)
    }

    /// Records an access to a byte range of a split cell with quarters of `size` bytes.
    fn record_quarters(
        &mut self,
        split: usize,
        size: usize,
        bytes: Range<usize>,
        actor: &Actor<'_>,
    ) -> Result<(), Conflict> {
        for (at, part) in split_range(size, bytes) {
            let quarter = &mut self.splits[split][at];
            if quarter.split == 0 && part.len() == size {
                quarter.record(actor, &mut self.lists)?;
                continue;
            }
            // moved out of the list, which may grow
            let mut quarter = mem::take(quarter);
            let recorded = self.record(&mut quarter, size, part, actor);
            self.splits[split][at] = quarter;
            recorded?;
        }
        Ok(())
    }

    fn writes(&self, cell: &Cell, size: usize, bytes: Range<usize>, each: &mut impl FnMut(&Mark)) {
        if cell.split == 0 {
            return each(&cell.write);
        }
        for (at, part) in split_range(size / 4, bytes) {
            self.writes(&self.splits[cell.split as usize - 1][at], size / 4, part, each);
        }
    }
}

/// The quarters of `size` bytes of a cell that contain `bytes` of it, each with their range in the quarter.
#[inline]
fn split_range(size: usize, bytes: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
    // a power of two, and divisions are slow
    let shift = size.trailing_zeros();
    (bytes.start >> shift..((bytes.end - 1) >> shift) + 1).map(move |at| {
        let begin = at << shift;
        (at, bytes.start.max(begin) - begin..bytes.end.min(begin + size) - begin)
    })
}
