//! SVG of a schedule: one lane per worker, one rectangle per work item along a cost axis, and the merges below.
//!
//! ```text
//! title, problem                                    ┐ legend.rs
//! legend: a colour for each request                 ┘
//! worker 0 ┃▒▒▒ r0 h0 ▒▒▒┃▒▒ r0 h1 ▒▒┃              ┐
//! worker 1 ┃// r0 h1 //┃▒▒ r1 h0 ▒▒▒▒┃              │ lanes.rs      // writes a partial state
//!          0      20      40      60  KV tiles      ┘
//! merges:  r0 h1 ← 2 partial states of workers 0, 1   merges.rs
//! ```

mod lanes;
mod legend;
mod merges;

use super::{Plan, Schedule, Segment, Tiling, WorkItem, side_by_side::describe_runs};
use crate::svg_canvas::Canvas;
use std::ops::Range;

/// Pixels from the left edge to the lanes.
const LEFT: f64 = 78.0;
/// Pixels of the lanes for the busiest worker.
const LANES: f64 = 960.0;
/// Pixels of the whole picture; the lane costs are right of the lanes.
const WIDTH: f64 = LEFT + LANES + 62.0;

/// A schedule to draw.
struct Picture<'a> {
    /// A line below the title.
    subtitle: String,
    /// The requests; those of a cascade and block rows are segments of keys.
    segments: &'a [Segment],
    schedule: &'a Schedule,
    tiling: &'a Tiling,
}

impl Plan {
    /// The schedule as an SVG file: one lane per worker, one rectangle per work item, and the merges. `machine` is the device
    /// in the line below the title.
    pub fn svg(&self, machine: &str) -> String {
        let runs =
            describe_runs(self.schedule.runs().len(), self.schedule.has_paired_runs, self.part_of_runs())
                .map(|runs| format!(" · {runs}"));
        let subtitle = format!("{} · {machine}{}", self.problem, runs.unwrap_or_default());
        Picture {
            subtitle,
            segments: &self.requests.segments,
            schedule: &self.schedule,
            tiling: &self.tiling,
        }
        .draw()
    }
}

impl Picture<'_> {
    fn draw(&self) -> String {
        let mut canvas = Canvas::default();
        let y = self.draw_legend(&mut canvas);
        let y = self.draw_lanes(&mut canvas, y + 24.0);
        let y = self.draw_merges(&mut canvas, y + 34.0);
        canvas.finish(WIDTH, y + 18.0)
    }

    fn cost(&self, item: &WorkItem) -> usize {
        self.tiling.cost(item.kv_heads.len(), item.qo.len(), item.kv.len())
    }

    /// The share of an item's cost that is overhead, not KV tiles.
    fn overhead(&self, item: &WorkItem) -> f64 {
        let tiles = item.kv.len().div_ceil(self.tiling.kv_tokens);
        self.tiling.segment_overhead as f64 / (self.tiling.segment_overhead + tiles) as f64
    }
}

/// A label for a range: `row 3`, `rows 3..5`.
fn range_label(kind: &str, range: &Range<u32>) -> String {
    match range.len() {
        1 => format!("{kind} {}", range.start),
        _ => format!("{kind}s {}..{}", range.start, range.end),
    }
}

/// A short label of KV heads: `h3`, `h3..5`.
fn short_heads(kv_heads: &Range<u32>) -> String {
    match kv_heads.len() {
        1 => format!("h{}", kv_heads.start),
        _ => format!("h{}..{}", kv_heads.start, kv_heads.end),
    }
}

/// `1 merge`, `2 merges`.
pub(super) fn counted(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}
