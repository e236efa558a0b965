//! Runs: the units of segments of many rows, in the order in which idle CTAs draw them.
//!
//! 1. Segments whose largest query tile sees more keys come first.
//! 2. Pairs of segment and KV head form sections whose keys and values stay in the device's cache together.
//! 3. In a section the units with most keys come first, so that the last units drawn are small.
//! 4. A unit is cut along its keys only if it costs more than a worker's share of the batch, into equal pieces of at most half a
//!    share. Units of like cost that have all workers to themselves are cut into the number of pieces that ends first.
//! 5. Long prompts alone have units of twice the rows, which two workers execute together. They are never cut.

use super::{ManyRows, Schedule, ScheduleInputs, Split, WorkItem, check_items, units::RowTile};
use crate::{Result, attention::requests::KvSource};
use std::{cmp::Reverse, ops::Range};

/// Minimum KV tiles of a piece: a shorter one costs more in partial states than its parallelism gains.
const MIN_PIECE: usize = 8;
/// Fixed cost of an item, in KV tiles.
const OVERHEAD: usize = 1;
/// Cost of the start and the end of an item, while no other work fills them, in KV tiles; also the minimum length of a piece then.
const EXPOSED: usize = 2;
/// The same for runs beside other items, which take bandwidth from them.
const EXPOSED_BESIDE: usize = 5;
/// Cost of the start and the end of the launch of other items, in halves of a KV tile of each worker.
const OTHERS_EXPOSED_HALVES: usize = 5;
/// Time of the keys of other items, in 16ths of that of a run's KV tile with as many.
const OTHERS_TILE: usize = 15;
/// The part of the workers whose other items draw the full bandwidth, in quarters.
const DRAWING_QUARTERS: usize = 3;
/// Cost of the partial states of a piece: they are written and merged. In KV tiles.
const PARTIAL: usize = 4;
/// Minimum length of a worker's share of paired runs of different lengths, in the longest of them: the last ones then end at nearly the
/// same time.
const SHARE_OF_PAIRS: usize = 4;
/// Minimum slots of a page that is loaded at once.
const BOX_SLOTS: usize = 8;

/// A segment of many rows, and its query tiles in row order.
struct ManyRowSegment {
    number: u32,
    kv_heads: Range<u32>,
    kv_len: usize,
    /// Whether its rows also have other segments.
    shared: bool,
    tiles: Vec<RowTile>,
    /// Maximum KV tiles of a query tile.
    longest: usize,
}

/// A query tile with one of its segment's KV heads.
struct RunUnit {
    segment: u32,
    kv_head: u32,
    shared: bool,
    tile: RowTile,
}

/// Appends the runs to a schedule of all other segments. Returns whether rows have several segments, whose states are still to be
/// merged.
pub(super) fn append(schedule: &mut Schedule, inputs: &ScheduleInputs<'_>, many: &ManyRows) -> Result<bool> {
    let pairs = if schedule.items.is_empty() { pairs(inputs, many) } else { None };
    let is_paired = pairs.is_some();
    let (workers, mut segments) = pairs.unwrap_or_else(|| (many.workers.max(1), segments(inputs, many)));
    let units: usize = segments.iter().map(ManyRowSegment::units_of_all_heads).sum();
    check_items(inputs.operator, schedule.items.len().saturating_add(units))?;
    let cost = cost_of(&segments, |_| true);
    let has_levels = segments.iter().any(|segment| segment.shared);
    // a KV tile of the other items takes about as long, by its bytes, as one of a run by its products
    let keys = |item: &WorkItem| item.kv_heads.len() * (item.kv.end - item.kv.start) as usize;
    let keys: usize = schedule.items.iter().map(keys).sum();
    let [beside, beside_runs] = [inputs.tiling.kv_tokens, many.kv_tokens].map(|tile| keys / tile.max(1));
    let pieces = match schedule.items.is_empty() || has_levels {
        true => pieces_of_like_units(&segments, units, workers, beside_runs),
        false => None,
    };
    let share = (cost + if has_levels { 0 } else { beside }).div_ceil(workers);
    schedule.has_paired_runs = is_paired;
    let split = if is_paired { Split::Never } else { inputs.split };
    let cutter = RunCutter { inputs, split, kv_tokens: many.kv_tokens, share, pieces };
    check_items(
        inputs.operator,
        schedule.items.len() + segments.iter().map(|of| cutter.items(of)).sum::<usize>(),
    )?;
    segments.sort_by_key(|segment| Reverse(segment.longest));
    for section in sections(&segments, many.resident_keys) {
        section.iter().for_each(|unit| cutter.push(schedule, unit));
    }
    Ok(has_levels)
}

/// Pairs of workers, and the segments of runs that each pair executes together; `None` if the batch has segments that are shared, masked by bits or divided
/// at fixed keys, or if runs have few rows, are short or would leave workers idle, since they are not cut.
fn pairs(inputs: &ScheduleInputs<'_>, many: &ManyRows) -> Option<(usize, Vec<ManyRowSegment>)> {
    let is_loaded_at_once = match inputs.requests.source {
        KvSource::Paged { page_size, .. } => page_size.is_multiple_of(BOX_SLOTS),
        KvSource::Ragged { .. } => true,
        _ => false,
    };
    let group = inputs.problem.heads().group();
    let tokens = many.q_rows / group;
    if !is_loaded_at_once
        || !inputs.requests.mask.is_empty()
        || matches!(inputs.split, Split::Fixed { .. })
        || tokens == 0
        || many.pair_tiles == usize::MAX
    {
        return None;
    }
    let segments = segments(inputs, &ManyRows { q_rows: 2 * tokens * group, ..*many });
    let (shortest, longest) = range_of_tiles(&segments)?;
    let units: usize = segments.iter().map(ManyRowSegment::units_of_all_heads).sum();
    let cost = cost_of(&segments, |_| true);
    // a run with the rows of one worker leaves the other one of its pair idle
    let are_full = 16 * cost_of(&segments, |tile| tile.qo.len() <= tokens) <= cost;
    let are_long = cost >= units.saturating_mul(OVERHEAD.saturating_add(many.pair_tiles));
    let workers = (many.workers / 2).max(1);
    let are_busy = match are_alike(shortest, longest) {
        true => 16 * units >= 15 * units.next_multiple_of(workers),
        false => cost / workers >= SHARE_OF_PAIRS * longest,
    };
    (are_full && are_long && are_busy && !segments.iter().any(|segment| segment.shared))
        .then_some((workers, segments))
}

/// Cost of the units of some query tiles.
fn cost_of(segments: &[ManyRowSegment], includes: impl Fn(&RowTile) -> bool) -> usize {
    let of_segment = |segment: &ManyRowSegment| {
        let tiles = segment.tiles.iter().filter(|tile| includes(tile));
        segment.kv_heads.len() * tiles.map(|tile| OVERHEAD + tile.kv_tiles.len()).sum::<usize>()
    };
    segments.iter().map(of_segment).sum()
}

/// The fewest and the most KV tiles of a query tile.
fn range_of_tiles(segments: &[ManyRowSegment]) -> Option<(usize, usize)> {
    let tiles = || segments.iter().flat_map(|segment| &segment.tiles).map(|tile| tile.kv_tiles.len());
    Some((tiles().min()?, tiles().max()?))
}

/// Whether units differ by an eighth at most.
fn are_alike(shortest: usize, longest: usize) -> bool {
    8 * shortest >= 7 * longest
}

/// The segments of many rows.
fn segments(inputs: &ScheduleInputs<'_>, many: &ManyRows) -> Vec<ManyRowSegment> {
    let tokens = (many.q_rows / inputs.problem.heads().group()).max(1);
    let of_many = inputs.requests.segments.iter().enumerate().filter(|(_, of)| inputs.has_many_rows(of));
    let with_tiles = of_many.map(|(number, segment)| {
        let tile = |begin: usize| {
            let rows = begin..segment.qo.end.min(begin + tokens);
            let kv = inputs.requests.visible(inputs.problem, segment, rows.clone());
            RowTile::new(rows, kv, many.kv_tokens)
        };
        let tiles: Vec<_> = segment.qo.clone().step_by(tokens).map(tile).collect();
        ManyRowSegment {
            number: number as u32,
            kv_heads: segment.kv_heads.start as u32..segment.kv_heads.end as u32,
            kv_len: segment.kv_len,
            shared: segment.shared,
            longest: tiles.iter().map(|tile| tile.kv_tiles.len()).max().unwrap_or(0),
            tiles,
        }
    });
    with_tiles.collect()
}

/// The units of each section, costliest first.
fn sections(segments: &[ManyRowSegment], resident_keys: usize) -> Vec<Vec<RunUnit>> {
    let (mut sections, mut section, mut keys) = (Vec::new(), Vec::new(), 0_usize);
    for segment in segments {
        let mut first = segment.kv_heads.start;
        for head in segment.kv_heads.clone() {
            keys = keys.saturating_add(segment.kv_len);
            if keys >= resident_keys {
                section.extend(segment.units(first..head + 1));
                sections.push(std::mem::take(&mut section));
                (first, keys) = (head + 1, 0);
            }
        }
        section.extend(segment.units(first..segment.kv_heads.end));
    }
    sections.push(section);
    for section in &mut sections {
        section.sort_by_key(|unit| Reverse(unit.tile.kv_tiles.len()));
    }
    sections
}

/// The number of pieces per unit after which runs, and other items of `beside` KV tiles, end first; `None` if the units differ by more
/// than an eighth.
///
/// Runs that take `l` on `c` of `w` workers leave `w - c` to the other items, which then end at `c l / w + beside / w`: their rate is
/// proportional to their workers, up to [`DRAWING_QUARTERS`], so what is left of them when the runs end may take longer. Runs that end
/// last leave workers idle, so `l` counts a sixteenth more. Constants fit measured cascades
/// ([levels](../../../../../benches/record/h200/attention-cascades-2026-11-28.csv),
/// [own keys by TMA](../../../../../benches/record/h200/attention-boxes-2026-11-28.csv),
/// [many own keys](../../../../../benches/record/h200/attention-copies-trials-2026-11-29.csv)).
fn pieces_of_like_units(
    segments: &[ManyRowSegment],
    units: usize,
    workers: usize,
    beside: usize,
) -> Option<usize> {
    let (shortest, longest) = range_of_tiles(segments)?;
    if !are_alike(shortest, longest) {
        return None;
    }
    // rows of levels have partial states in any case
    let writes_more = !segments.iter().any(|segment| segment.shared);
    let exposed = if beside > 0 { EXPOSED_BESIDE } else { EXPOSED };
    let others = OTHERS_TILE * beside; // costs are in 16ths of a KV tile of a worker
    let launch = if beside > 0 { 8 * OTHERS_EXPOSED_HALVES * workers } else { 0 };
    let end = |pieces: usize| {
        let fixed = exposed + if writes_more && pieces > 1 { PARTIAL } else { 0 };
        let length = (units * pieces).div_ceil(workers) * (longest.div_ceil(pieces) + fixed);
        let beside_runs = 16 * (workers - workers_of(units * pieces, workers)) * length;
        let left = |cost: usize| cost.saturating_sub(beside_runs);
        let after_runs = left(others + launch).max(left(others) * 4 / DRAWING_QUARTERS);
        16 * workers * length + after_runs.max(workers * length)
    };
    (1..=(longest / EXPOSED).max(1)).min_by_key(|&pieces| end(pieces))
}

/// Workers that execute `runs` runs of like cost as fast as all of `workers` do.
pub(in super::super) fn workers_of(runs: usize, workers: usize) -> usize {
    runs.div_ceil(runs.div_ceil(workers.max(1)).max(1))
}

impl ManyRowSegment {
    fn units_of_all_heads(&self) -> usize {
        self.kv_heads.len() * self.tiles.len()
    }

    /// The units of some heads, last rows first: with a causal mask they see most keys.
    fn units(&self, heads: Range<u32>) -> impl Iterator<Item = RunUnit> {
        let (segment, shared) = (self.number, self.shared);
        self.tiles.iter().rev().flat_map(move |&tile| {
            heads.clone().map(move |kv_head| RunUnit { segment, kv_head, shared, tile })
        })
    }
}

/// Cuts units along their keys.
struct RunCutter<'a> {
    inputs: &'a ScheduleInputs<'a>,
    split: Split,
    kv_tokens: usize,
    /// Cost per worker.
    share: usize,
    /// Pieces per unit, if units are cut alike.
    pieces: Option<usize>,
}

impl RunCutter<'_> {
    /// Items of a segment.
    fn items(&self, segment: &ManyRowSegment) -> usize {
        segment.tiles.iter().map(|tile| self.pieces(tile).1.len()).sum::<usize>() * segment.kv_heads.len()
    }

    /// KV tiles per piece, and the pieces, counted from the segment's first key; one if there is no cut.
    fn pieces(&self, tile: &RowTile) -> (usize, Range<usize>) {
        let tiles = tile.kv_tiles.len();
        let piece = match self.split {
            Split::Never => return (usize::MAX, 0..1),
            Split::Fixed { tokens } => tokens.div_ceil(self.kv_tokens).max(1),
            Split::Balanced => {
                let most = if tiles > self.share { self.share / 2 } else { tiles };
                let pieces = self.pieces.unwrap_or_else(|| tiles.div_ceil(most.max(MIN_PIECE)));
                tiles.div_ceil(pieces.max(1)).max(1)
            }
        };
        match self.split {
            // the pieces of a fixed split depend on the request alone
            Split::Fixed { .. } => (piece, tile.pieces(piece)),
            _ => (piece, 0..tiles.div_ceil(piece).max(1)),
        }
    }

    fn push(&self, schedule: &mut Schedule, unit: &RunUnit) {
        let (piece, pieces) = self.pieces(&unit.tile);
        let (first, tiles) = (unit.tile.kv_tiles.start as usize, unit.tile.kv_tiles.len());
        let origin = if matches!(self.split, Split::Fixed { .. }) { first } else { 0 };
        let heads = unit.kv_head..unit.kv_head + 1;
        let qo = unit.tile.qo.range();
        let partial = unit.shared || pieces.len() > 1;
        let first_item = schedule.items.len() as u32;
        for number in pieces {
            let [begin, end] = [number, number.saturating_add(1)]
                .map(|at| at.saturating_mul(piece).clamp(origin, origin + tiles) - origin);
            let kv = unit.tile.keys(begin..end, self.kv_tokens).range();
            let (segment, kv_heads, qo) = (unit.segment, heads.clone(), qo.clone());
            schedule.push(
                WorkItem { segment, kv_heads, qo, kv, partial: None },
                partial.then_some(self.inputs.problem.heads().group()),
            );
        }
        if !unit.shared {
            schedule.merge_since(first_item, heads, qo);
        }
    }
}
