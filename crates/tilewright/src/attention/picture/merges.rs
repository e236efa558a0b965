//! The merges of partial states, below the lanes.

use super::{LANES, LEFT, Picture, range_label, short_heads};
use crate::attention::Merge;
use crate::svg_canvas::{Anchor, Area, Canvas, Point, colour};

const COLUMNS: usize = 3;
const CHIP: f64 = 13.0;
const LINE: f64 = 22.0;

impl Picture<'_> {
    /// Draws the merges from `top`; returns their bottom.
    pub(super) fn draw_merges(&self, canvas: &mut Canvas, top: f64) -> f64 {
        let merges = &self.schedule.merges;
        let heading = match merges.len() {
            0 => "No merges: every work item writes its output itself",
            _ => "Merges, when all work items are done",
        };
        canvas.text(Point { x: LEFT, y: top }, Anchor::Start, "class=\"heading\"", heading);
        for (at, merge) in merges.iter().enumerate() {
            let x = LEFT + (at % COLUMNS) as f64 * LANES / COLUMNS as f64;
            let y = top + 14.0 + (at / COLUMNS) as f64 * LINE;
            let chip = Area { x, y, width: CHIP, height: CHIP };
            let (request, label) = self.describe(merge);
            canvas.rect(chip, "merge", colour(request), &label);
            canvas.cover(chip, "partial");
            canvas.text(Point { x: x + CHIP + 6.0, y: y + 11.0 }, Anchor::Start, "", &label);
        }
        top + 14.0 + merges.len().div_ceil(COLUMNS) as f64 * LINE
    }

    /// The request of a merge and its label.
    fn describe(&self, merge: &Merge) -> (usize, String) {
        let schedule = self.schedule;
        let sources = &schedule.sources[merge.sources.start as usize..merge.sources.end as usize];
        // runs are the items after those of the last worker
        let worker = |item: &u32| schedule.worker_indptr.partition_point(|begin| begin <= item) - 1;
        let mut workers: Vec<usize> = sources.iter().map(worker).collect();
        workers.dedup(); // sorted
        let runs = workers.pop_if(|worker| *worker == schedule.num_workers()).map(|_| "runs".to_owned());
        let workers = match &workers[..] {
            [] => None,
            [one] => Some(format!("worker {one}")),
            [one, other] => Some(format!("workers {one} and {other}")),
            [first, .., last] => Some(format!("workers {first} to {last}")),
        };
        let origins = workers.into_iter().chain(runs).collect::<Vec<_>>().join(", ");
        let (rows, heads) = (range_label("row", &merge.qo), short_heads(&merge.kv_heads));
        let (states, request) = (sources.len(), schedule.items[sources[0] as usize].segment);
        (request as usize, format!("r{request} {heads} {rows} ← {states} states of {origins}"))
    }
}
