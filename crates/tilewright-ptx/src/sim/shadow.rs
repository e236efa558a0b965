//! Shadow memory for race detection: the last write and the last reads of every byte.
//!
//! The algorithm is FastTrack (Flanagan and Freund, 2009): a cell holds the last write and the concurrent reads after it. A cell
//! covers 16 bytes; narrower accesses split it into words, and these into bytes.

use super::clock::Clock;
use std::ops::Range;

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
    /// Cluster and thread index.
    pub(super) id: (u32, u32),
    /// The mark that records the access.
    pub(super) mark: Mark,
    pub(super) writes: bool,
}

/// A prior access that is not ordered before this one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Conflict {
    pub(super) other: Mark,
    pub(super) wrote: bool,
}

/// The maximum number of concurrent reads per list; more evict the oldest.
const READS: usize = 48;

#[derive(Debug, Clone, Copy)]
enum CellIndex {
    /// A page, and a cell of it.
    Page(usize, usize),
    /// A split cell, and a quarter of it.
    Split(usize, usize),
}

/// The shadow of a memory range.
#[derive(Debug, Clone, Default)]
pub(super) struct Shadow {
    /// Pages of 1024 bytes, allocated at the first access.
    pages: Vec<Option<Box<[Cell]>>>,
    lists: Vec<Vec<Read>>,
    splits: Vec<[Cell; 4]>,
    /// Threads per CTA, and CTAs per cluster.
    shape: (u32, u32),
}

impl Actor<'_> {
    /// Whether a mark happens before this access.
    #[inline]
    fn is_ordered_after(&self, mark: &Mark) -> bool {
        mark.count == 0
            || (mark.cluster, mark.thread) == self.id
            || self.clock.get(mark.cluster, mark.thread as usize) > mark.count
    }

    /// A read that does not happen before this access, if any.
    fn find_unordered(&self, read: &Read) -> Option<Mark> {
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
}

/// Whether both accesses are ordered at a scope that includes both threads.
fn strong(a: &Mark, b: &Mark, (threads, size): (u32, u32)) -> bool {
    if a.strength == 0 || b.strength == 0 {
        return false;
    }
    let rank = |mark: &Mark| (mark.thread < threads * size).then(|| mark.thread / threads);
    let apart = match a.cluster == b.cluster {
        true if rank(a) == rank(b) => 1,
        true => 2,
        false => 3,
    };
    a.strength >= apart && b.strength >= apart
}

struct CellContext<'a> {
    lists: &'a mut Vec<Vec<Read>>,
    shape: (u32, u32),
}

impl Cell {
    fn record_read(&mut self, actor: &Actor<'_>, context: &mut CellContext<'_>) -> Result<(), Conflict> {
        if !actor.is_ordered_after(&self.write) && !strong(&self.write, &actor.mark, context.shape) {
            return Err(Conflict { other: self.write, wrote: true });
        }
        let (base, bit) = (actor.mark.thread & !31, 1 << (actor.mark.thread & 31));
        let mark = Mark { thread: base, ..actor.mark };
        let same = |read: &Read| {
            (read.mark.cluster, read.mark.thread, read.mark.count, read.mark.strength)
                == (mark.cluster, base, mark.count, mark.strength)
        };
        if self.read.mask == 0 || same(&self.read) {
            self.read = Read { mark, mask: self.read.mask | bit };
            return Ok(());
        }
        if actor.find_unordered(&self.read).is_none() {
            self.read = Read { mark, mask: bit };
            return Ok(());
        }
        if self.more == 0 {
            context.lists.push(Vec::new());
            self.more = context.lists.len() as u32;
        }
        let list = &mut context.lists[self.more as usize - 1];
        if let Some(read) = list.iter_mut().find(|read| same(read)) {
            read.mask |= bit;
            return Ok(());
        }
        list.retain(|read| actor.find_unordered(read).is_some());
        if list.len() == READS {
            list.remove(0);
        }
        list.push(Read { mark, mask: bit });
        Ok(())
    }

    fn record_write(&mut self, actor: &Actor<'_>, context: &mut CellContext<'_>) -> Result<(), Conflict> {
        if !actor.is_ordered_after(&self.write) && !strong(&self.write, &actor.mark, context.shape) {
            return Err(Conflict { other: self.write, wrote: true });
        }
        // reads that happen before this write are removed
        let is_unordered = |read: &Read| match actor.find_unordered(read) {
            Some(other) if !strong(&other, &actor.mark, context.shape) => {
                Err(Conflict { other, wrote: false })
            }
            other => Ok(other.is_some()),
        };
        if self.read.mask != 0 && !is_unordered(&self.read)? {
            self.read.mask = 0;
        }
        if self.more != 0 {
            let list = &mut context.lists[self.more as usize - 1];
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

    fn record(&mut self, actor: &Actor<'_>, context: &mut CellContext<'_>) -> Result<(), Conflict> {
        if actor.writes { self.record_write(actor, context) } else { self.record_read(actor, context) }
    }
}

impl Shadow {
    /// The shadow of `bytes` bytes; `shape` is threads per CTA and CTAs per cluster.
    pub(super) fn new(bytes: usize, shape: (u32, u32)) -> Self {
        let pages = (0..bytes.div_ceil(1024)).map(|_| None).collect();
        Self { pages, lists: Vec::new(), splits: Vec::new(), shape }
    }

    /// Records an access to a byte range.
    #[inline]
    pub(super) fn record(&mut self, bytes: Range<usize>, actor: &Actor<'_>) -> Result<(), Conflict> {
        let mut at = bytes.start;
        while at < bytes.end {
            let upto = bytes.end.min((at & !15) + 16);
            let page = &mut self.pages[at / 1024];
            page.get_or_insert_with(|| vec![Cell::default(); 64].into_boxed_slice());
            let index = CellIndex::Page(at / 1024, at % 1024 / 16);
            self.record_in(index, 16, at % 16..at % 16 + (upto - at), actor)?;
            at = upto;
        }
        Ok(())
    }

    /// Records an access to a byte range of a cell of `size` bytes.
    fn record_in(
        &mut self,
        index: CellIndex,
        size: usize,
        bytes: Range<usize>,
        actor: &Actor<'_>,
    ) -> Result<(), Conflict> {
        let next = self.splits.len();
        let cell = match index {
            CellIndex::Page(page, at) => match &mut self.pages[page] {
                Some(page) => &mut page[at],
                None => return Ok(()),
            },
            CellIndex::Split(split, at) => &mut self.splits[split][at],
        };
        let mut context = CellContext { lists: &mut self.lists, shape: self.shape };
        if cell.split == 0 {
            if bytes.len() == size {
                return cell.record(actor, &mut context);
            }
            let quarters = cell.quarters(context.lists);
            cell.split = next as u32 + 1;
            self.splits.push(quarters);
            return self.record_quarters(next, size, bytes, actor);
        }
        let (split, quarter) = (cell.split as usize - 1, size / 4);
        // the most frequent access
        if bytes.len() == quarter && bytes.start.is_multiple_of(quarter) {
            let cell = &mut self.splits[split][bytes.start / quarter];
            if cell.split == 0 {
                return cell.record(actor, &mut context);
            }
        }
        self.record_quarters(split, size, bytes, actor)
    }

    fn record_quarters(
        &mut self,
        split: usize,
        size: usize,
        bytes: Range<usize>,
        actor: &Actor<'_>,
    ) -> Result<(), Conflict> {
        let quarter = size / 4;
        for (at, part) in split_range(quarter, bytes) {
            self.record_in(CellIndex::Split(split, at), quarter, part, actor)?;
        }
        Ok(())
    }

    /// Calls `each` with the last write to each cell of a byte range.
    pub(super) fn writes(&self, bytes: Range<usize>, mut each: impl FnMut(&Mark)) {
        let mut at = bytes.start;
        while at < bytes.end {
            let upto = bytes.end.min((at & !15) + 16);
            if let Some(page) = &self.pages[at / 1024] {
                self.writes_in(&page[at % 1024 / 16], 16, at % 16..at % 16 + (upto - at), &mut each);
            }
            at = upto;
        }
    }

    fn writes_in(&self, cell: &Cell, size: usize, bytes: Range<usize>, each: &mut impl FnMut(&Mark)) {
        if cell.split == 0 {
            return each(&cell.write);
        }
        let quarter = size / 4;
        for (at, part) in split_range(quarter, bytes) {
            self.writes_in(&self.splits[cell.split as usize - 1][at], quarter, part, each);
        }
    }
}

/// The quarters of `size` bytes of a cell that contain `bytes` of it, each with their range in the quarter.
fn split_range(size: usize, bytes: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
    (bytes.start / size..bytes.end.div_ceil(size)).map(move |at| {
        let begin = at * size;
        (at, bytes.start.max(begin) - begin..bytes.end.min(begin + size) - begin)
    })
}
