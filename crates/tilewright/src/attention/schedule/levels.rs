//! Merges of rows with keys in several segments: cascade levels, and each request's own keys.

use super::{Merge, Schedule};
use crate::{Result, attention::Segment};
use std::ops::Range;

/// Maximum number of merge sources: each takes 4 bytes of the plan.
const MAX_SOURCES: usize = 1 << 26;

/// Adds the merges of segments that share rows. Work items of different segments have different rows and heads, so
/// merges begin and end at every item boundary.
pub(super) fn merge(operator: &'static str, schedule: &mut Schedule, segments: &[Segment]) -> Result<()> {
    let Schedule { items, merges, sources, .. } = schedule;
    let mut pending: Vec<u32> = (0..items.len() as u32).collect();
    pending.retain(|&at| segments[items[at as usize].segment as usize].shared);
    let row_cuts = cuts(pending.iter().map(|&at| &items[at as usize].qo));
    pending.sort_by_key(|&at| items[at as usize].qo.start);
    let mut pending = pending.into_iter().peekable();
    let mut active: Vec<u32> = Vec::new();
    for rows in row_cuts.windows(2) {
        active.retain(|&at| items[at as usize].qo.end > rows[0]);
        while let Some(at) = pending.next_if(|&at| items[at as usize].qo.start == rows[0]) {
            active.push(at);
        }
        let states = sources.len() + active.len();
        crate::ensure!(
            states <= MAX_SOURCES,
            operator,
            "at least {states} states to merge, the most is {MAX_SOURCES}: longer pieces are needed"
        );
        active.sort_unstable(); // earlier items hold earlier keys
        let head_cuts = cuts(active.iter().map(|&at| &items[at as usize].kv_heads));
        for heads in head_cuts.windows(2) {
            let first_source = sources.len() as u32;
            let has_head = |at: &&u32| items[**at as usize].kv_heads.contains(&heads[0]);
            sources.extend(active.iter().filter(has_head));
            let (kv_heads, qo) = (heads[0]..heads[1], rows[0]..rows[1]);
            merges.push(Merge { kv_heads, qo, sources: first_source..sources.len() as u32 });
        }
    }
    Ok(())
}

/// All bounds of `ranges`, in ascending order.
fn cuts<'a>(ranges: impl Iterator<Item = &'a Range<u32>>) -> Vec<u32> {
    let mut cuts: Vec<u32> = ranges.flat_map(|range| [range.start, range.end]).collect();
    cuts.sort_unstable();
    cuts.dedup();
    cuts
}
