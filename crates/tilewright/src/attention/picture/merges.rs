//! The merges of partial states, below the lanes.

use super::{LANES, LEFT, Picture, range_label, short_heads};
use crate::attention::Merge;
use crate::svg_canvas::{Anchor, Area, Canvas, colour};

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
        canvas.text((LEFT, top), Anchor::Start, "class=\"heading\"", heading);
        let origins = self.origins();
        for (at, merge) in merges.iter().enumerate() {
            let x = LEFT + (at % COLUMNS) as f64 * LANES / COLUMNS as f64;
            let y = top + 14.0 + (at / COLUMNS) as f64 * LINE;
            let chip = Area { x, y, width: CHIP, height: CHIP };
            let (request, label) = self.describe(merge, &origins);
            canvas.rect(chip, "merge", colour(request), &label);
            canvas.cover(chip, "partial");
            canvas.text((x + CHIP + 6.0, y + 11.0), Anchor::Start, "", &label);
        }
        top + 14.0 + merges.len().div_ceil(COLUMNS) as f64 * LINE
    }

    /// Worker and request of each item.
    fn origins(&self) -> Vec<(usize, usize)> {
        let workers = 0..self.schedule.num_workers();
        let items = workers.flat_map(|w| self.schedule.worker(w).iter().map(move |item| (w, item)));
        items.map(|(w, item)| (w, item.segment as usize)).collect()
    }

    /// The request of a merge and its label.
    fn describe(&self, merge: &Merge, origins: &[(usize, usize)]) -> (usize, String) {
        let sources = &self.schedule.sources[merge.sources.start as usize..merge.sources.end as usize];
        let mut workers: Vec<usize> = sources.iter().map(|source| origins[*source as usize].0).collect();
        let request = origins[sources[0] as usize].1;
        workers.dedup(); // sorted
        let workers = match &workers[..] {
            [one] => format!("worker {one}"),
            [one, other] => format!("workers {one} and {other}"),
            [first, .., last] => format!("workers {first} to {last}"),
            [] => String::new(),
        };
        let (rows, heads) = (range_label("row", &merge.qo), short_heads(&merge.kv_heads));
        let states = sources.len();
        (request, format!("r{request} {heads} {rows} ← {states} states of {workers}"))
    }
}
