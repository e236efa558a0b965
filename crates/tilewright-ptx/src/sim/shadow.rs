//! The shadow of memory: for all bytes who wrote and who read it last, so that two accesses that nothing orders are found.
//!
//! After FastTrack (Flanagan and Freund, 2009): a last write, and the reads since then that do not know of each other. A cell
//! is 16 bytes; where narrower accesses come it is split into words, and these into bytes.

use super::clock::Clock;

/// Who made an access, and when.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Mark {
    /// The cluster in the grid.
    pub(super) cluster: u32,
    /// The thread in its cluster, or what works asynchronously, behind them.
    pub(super) who: u32,
    /// Its count; 0 is nobody.
    pub(super) count: u32,
    /// The instruction.
    pub(super) pc: u32,
    /// 0 for ordinary accesses; else how far they are ordered: 1 CTA, 2 cluster, 3 device.
    pub(super) strength: u8,
}

/// Reads of neighbours with the same count.
#[derive(Debug, Clone, Copy, Default)]
struct Read {
    mark: Mark,
    /// Bit `i` is `mark.who + i`, which is a multiple of 32.
    mask: u32,
}

#[derive(Debug, Clone, Default)]
struct Cell {
    write: Mark,
    read: Read,
    /// More reads: 1 + a place in `lists`.
    more: u32,
    /// 1 + a place in `splits`, where its quarters are.
    split: u32,
}

/// An access, as its thread sees it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Actor<'a> {
    /// What the thread knows.
    pub(super) clock: &'a Clock,
    /// The thread.
    pub(super) me: (u32, u32),
    /// What the access is remembered as.
    pub(super) mark: Mark,
}

/// An access that nothing orders before this one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Conflict {
    pub(super) other: Mark,
    pub(super) wrote: bool,
}

/// Reads beyond this many that do not know of each other push out the oldest.
const READS: usize = 48;

/// Where a cell is.
#[derive(Debug, Clone, Copy)]
enum Place {
    /// A page, and one of its cells.
    Page(usize, usize),
    /// A cell that was split, and one of its quarters.
    Split(usize, usize),
}

/// The shadow of a stretch of memory.
#[derive(Debug, Default)]
pub(super) struct Shadow {
    /// 1024 bytes each, made when first touched.
    pages: Vec<Option<Box<[Cell]>>>,
    lists: Vec<Vec<Read>>,
    splits: Vec<[Cell; 4]>,
    /// Threads of a CTA, and CTAs of a cluster.
    shape: (u32, u32),
}

impl Actor<'_> {
    /// Whether a mark is before this access.
    #[inline]
    fn knows(&self, mark: &Mark) -> bool {
        mark.count == 0
            || (mark.cluster, mark.who) == self.me
            || self.clock.get(mark.cluster, mark.who as usize) > mark.count
    }

    /// Whether all of the reads are before this access; else one that is not.
    fn knows_read(&self, read: &Read) -> Option<Mark> {
        let mut left = read.mask;
        while left != 0 {
            let mark = Mark { who: read.mark.who + left.trailing_zeros(), ..read.mark };
            if !self.knows(&mark) {
                return Some(mark);
            }
            left &= left - 1;
        }
        None
    }
}

/// Whether two accesses are both ordered as far as they are apart.
fn strong(a: &Mark, b: &Mark, (threads, size): (u32, u32)) -> bool {
    if a.strength == 0 || b.strength == 0 {
        return false;
    }
    let rank = |mark: &Mark| (mark.who < threads * size).then(|| mark.who / threads);
    let apart = match a.cluster == b.cluster {
        true if rank(a) == rank(b) => 1,
        true => 2,
        false => 3,
    };
    a.strength >= apart && b.strength >= apart
}

struct Rooms<'a> {
    lists: &'a mut Vec<Vec<Read>>,
    shape: (u32, u32),
}

impl Cell {
    fn note_read(&mut self, actor: &Actor<'_>, rooms: &mut Rooms<'_>) -> Result<(), Conflict> {
        if !actor.knows(&self.write) && !strong(&self.write, &actor.mark, rooms.shape) {
            return Err(Conflict { other: self.write, wrote: true });
        }
        let (base, bit) = (actor.mark.who & !31, 1 << (actor.mark.who & 31));
        let mark = Mark { who: base, ..actor.mark };
        let same = |read: &Read| {
            (read.mark.cluster, read.mark.who, read.mark.count, read.mark.strength)
                == (mark.cluster, base, mark.count, mark.strength)
        };
        if self.read.mask == 0 || same(&self.read) {
            self.read = Read { mark, mask: self.read.mask | bit };
            return Ok(());
        }
        if actor.knows_read(&self.read).is_none() {
            self.read = Read { mark, mask: bit };
            return Ok(());
        }
        if self.more == 0 {
            rooms.lists.push(Vec::new());
            self.more = rooms.lists.len() as u32;
        }
        let list = &mut rooms.lists[self.more as usize - 1];
        if let Some(read) = list.iter_mut().find(|read| same(read)) {
            read.mask |= bit;
            return Ok(());
        }
        list.retain(|read| actor.knows_read(read).is_some());
        if list.len() == READS {
            list.remove(0);
        }
        list.push(Read { mark, mask: bit });
        Ok(())
    }

    fn note_write(&mut self, actor: &Actor<'_>, rooms: &mut Rooms<'_>) -> Result<(), Conflict> {
        if !actor.knows(&self.write) && !strong(&self.write, &actor.mark, rooms.shape) {
            return Err(Conflict { other: self.write, wrote: true });
        }
        // reads that this write comes after need no place any more
        let unknown = |read: &Read| match actor.knows_read(read) {
            Some(other) if !strong(&other, &actor.mark, rooms.shape) => Err(Conflict { other, wrote: false }),
            other => Ok(other.is_some()),
        };
        if self.read.mask != 0 && !unknown(&self.read)? {
            self.read.mask = 0;
        }
        if self.more != 0 {
            let list = &mut rooms.lists[self.more as usize - 1];
            let mut kept = 0;
            for at in 0..list.len() {
                if unknown(&list[at])? {
                    list.swap(at, kept);
                    kept += 1;
                }
            }
            list.truncate(kept);
        }
        self.write = actor.mark;
        Ok(())
    }

    /// The same for each of its quarters.
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

    fn note(&mut self, write: bool, actor: &Actor<'_>, rooms: &mut Rooms<'_>) -> Result<(), Conflict> {
        if write { self.note_write(actor, rooms) } else { self.note_read(actor, rooms) }
    }
}

impl Shadow {
    /// Of so many bytes, for CTAs of so many threads in clusters of so many CTAs.
    pub(super) fn new(bytes: usize, shape: (u32, u32)) -> Self {
        let pages = (0..bytes.div_ceil(1024)).map(|_| None).collect();
        Self { pages, lists: Vec::new(), splits: Vec::new(), shape }
    }

    /// Notes an access to bytes from `offset` on.
    #[inline]
    pub(super) fn note(
        &mut self,
        write: bool,
        (offset, bytes): (usize, usize),
        actor: &Actor<'_>,
    ) -> Result<(), Conflict> {
        let (mut at, end) = (offset, offset + bytes);
        while at < end {
            let upto = end.min((at & !15) + 16);
            let page = &mut self.pages[at / 1024];
            page.get_or_insert_with(|| vec![Cell::default(); 64].into_boxed_slice());
            let place = Place::Page(at / 1024, at % 1024 / 16);
            self.note_in(place, 16, (at % 16, at % 16 + (upto - at)), (write, actor))?;
            at = upto;
        }
        Ok(())
    }

    /// Notes an access to some bytes of a cell of `size`.
    fn note_in(
        &mut self,
        place: Place,
        size: usize,
        (from, to): (usize, usize),
        (write, actor): (bool, &Actor<'_>),
    ) -> Result<(), Conflict> {
        let next = self.splits.len();
        let cell = match place {
            Place::Page(page, at) => match &mut self.pages[page] {
                Some(page) => &mut page[at],
                None => return Ok(()),
            },
            Place::Split(split, at) => &mut self.splits[split][at],
        };
        let mut rooms = Rooms { lists: &mut self.lists, shape: self.shape };
        if cell.split == 0 {
            if to - from == size {
                return cell.note(write, actor, &mut rooms);
            }
            let quarters = cell.quarters(rooms.lists);
            cell.split = next as u32 + 1;
            self.splits.push(quarters);
            return self.note_quarters(next, size, (from, to), (write, actor));
        }
        let split = cell.split as usize - 1;
        self.note_quarters(split, size, (from, to), (write, actor))
    }

    fn note_quarters(
        &mut self,
        split: usize,
        size: usize,
        (from, to): (usize, usize),
        access: (bool, &Actor<'_>),
    ) -> Result<(), Conflict> {
        let quarter = size / 4;
        for at in from / quarter..to.div_ceil(quarter) {
            let begin = at * quarter;
            let part = (from.max(begin) - begin, to.min(begin + quarter) - begin);
            self.note_in(Place::Split(split, at), quarter, part, access)?;
        }
        Ok(())
    }

    /// Calls `each` with the last write to each cell from `offset` on.
    pub(super) fn writes(&self, (offset, bytes): (usize, usize), mut each: impl FnMut(&Mark)) {
        let (mut at, end) = (offset, offset + bytes);
        while at < end {
            let upto = end.min((at & !15) + 16);
            if let Some(page) = &self.pages[at / 1024] {
                self.writes_in(&page[at % 1024 / 16], 16, (at % 16, at % 16 + (upto - at)), &mut each);
            }
            at = upto;
        }
    }

    fn writes_in(&self, cell: &Cell, size: usize, (from, to): (usize, usize), each: &mut impl FnMut(&Mark)) {
        if cell.split == 0 {
            return each(&cell.write);
        }
        let quarter = size / 4;
        for at in from / quarter..to.div_ceil(quarter) {
            let begin = at * quarter;
            let part = (from.max(begin) - begin, to.min(begin + quarter) - begin);
            self.writes_in(&self.splits[cell.split as usize - 1][at], quarter, part, each);
        }
    }
}
