//! Title and legend: colors of requests and meaning of the marks.

use super::{LEFT, Picture, WIDTH, counted};
use crate::svg_canvas::{Anchor, Area, Canvas, Point, colour, text_width};

/// Maximum listed requests; the rest is only counted.
const MAX_LISTED: usize = 20;
const CHIP: f64 = 13.0;
const LINE: f64 = 22.0;

impl Picture<'_> {
    /// Draws title and legend; returns their bottom.
    pub(super) fn draw_legend(&self, canvas: &mut Canvas) -> f64 {
        let schedule = self.schedule;
        let title = format!(
            "{} of {} on {}, {}",
            counted(schedule.items.len(), "work item"),
            counted(self.segments.len(), "request"),
            counted(schedule.num_workers(), "worker"),
            counted(schedule.merges.len(), "merge")
        );
        canvas.text(Point { x: 18.0, y: 34.0 }, Anchor::Start, "class=\"title\"", &title);
        canvas.text(Point { x: 18.0, y: 56.0 }, Anchor::Start, "class=\"quiet\"", &self.subtitle);

        let mut row = LegendCursor { x: LEFT, y: 74.0 };
        for (r, request) in self.segments.iter().enumerate().take(MAX_LISTED) {
            let label = format!("request {r}: {} × {}", request.qo.len(), request.kv_len);
            let chip = row.chip(&label);
            canvas.rect(chip, "chip", colour(r), "query rows × keys");
            row.label(canvas, &label);
        }
        let ending = match self.segments.len().saturating_sub(MAX_LISTED) {
            0 => "(query rows × keys)".to_owned(),
            more => format!("and {more} more (query rows × keys)"),
        };
        row.chip(&ending);
        row.label(canvas, &ending);
        row.next();
        for (class, label) in
            [("partial", "writes a partial state, to be merged"), ("overhead", "overhead of a work item")]
        {
            let chip = row.chip(label);
            canvas.rect(chip, "chip", colour(0), label);
            let dark = if class == "overhead" { CHIP / 2.0 } else { CHIP };
            canvas.cover(Area { width: dark, ..chip }, class);
            row.label(canvas, label);
        }
        let chip = row.chip("mean of the workers");
        let middle = chip.y + CHIP / 2.0;
        canvas.line(Point { x: chip.x - 6.0, y: middle }, Point { x: chip.x + CHIP, y: middle }, "mean");
        row.label(canvas, "mean of the workers");
        row.y + CHIP
    }
}

/// Position of the next legend entry.
struct LegendCursor {
    x: f64,
    y: f64,
}

impl LegendCursor {
    fn next(&mut self) {
        (self.x, self.y) = (LEFT, self.y + LINE);
    }

    /// The color chip of an entry; starts a new line if the entry does not fit.
    fn chip(&mut self, label: &str) -> Area {
        if self.x > LEFT && self.x + CHIP + 6.0 + text_width(label) > WIDTH - 18.0 {
            self.next();
        }
        Area { x: self.x, y: self.y, width: CHIP, height: CHIP }
    }

    fn label(&mut self, canvas: &mut Canvas, label: &str) {
        canvas.text(Point { x: self.x + CHIP + 6.0, y: self.y + 11.0 }, Anchor::Start, "", label);
        self.x += CHIP + 6.0 + text_width(label) + 14.0;
    }
}
