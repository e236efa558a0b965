//! The lanes: work items of each worker along a cost axis.

use super::{LANES, LEFT, Picture, range_label, short_heads};
use crate::attention::WorkItem;
use crate::svg_canvas::{Anchor, Area, Canvas, Point, colour, ink, text_width};

/// Maximum ticks of the axis.
const TICKS: usize = 10;

impl Picture<'_> {
    /// Draws the lanes from `top`; returns the bottom of the axis label.
    pub(super) fn draw_lanes(&self, canvas: &mut Canvas, top: f64) -> f64 {
        let workers = self.schedule.num_workers();
        let costs: Vec<usize> =
            (0..workers).map(|w| self.schedule.worker(w).iter().map(|item| self.cost(item)).sum()).collect();
        let busiest = costs.iter().copied().max().unwrap_or(0).max(1);
        let scale = LANES / busiest as f64;
        let pitch = (560.0 / workers as f64).clamp(9.0, 34.0);
        let bottom = top + pitch * workers as f64;

        draw_axis(canvas, busiest, scale, top, bottom);
        let label_stride = (14.0 / pitch).ceil() as usize;
        for (w, cost) in costs.iter().enumerate() {
            let y = top + pitch * w as f64;
            let mut begin = 0;
            for item in self.schedule.worker(w) {
                let x = LEFT + begin as f64 * scale;
                let area = Area { x, y: y + 1.5, width: self.cost(item) as f64 * scale, height: pitch - 3.0 };
                self.draw_item(canvas, item, area);
                begin += self.cost(item);
            }
            if w % label_stride == 0 {
                let baseline = y + pitch / 2.0 + 4.0;
                canvas.text(Point { x: LEFT - 8.0, y: baseline }, Anchor::End, "", &w.to_string());
                let right = Point { x: LEFT + LANES + 8.0, y: baseline };
                canvas.text(right, Anchor::Start, "class=\"quiet\"", &cost.to_string());
            }
        }
        let mean = LEFT + costs.iter().sum::<usize>() as f64 / workers as f64 * scale;
        canvas.line(Point { x: mean, y: top - 6.0 }, Point { x: mean, y: bottom + 4.0 }, "mean");

        canvas.text(Point { x: LEFT + LANES + 8.0, y: top - 6.0 }, Anchor::Start, "class=\"quiet\"", "cost");
        let middle = (top + bottom) / 2.0;
        let turned = format!("class=\"quiet\" transform=\"rotate(-90 24 {middle:.2})\"");
        canvas.text(Point { x: 24.0, y: middle }, Anchor::Middle, &turned, "worker");
        let name = self.tiling.cost_formula();
        let below = Point { x: LEFT + LANES / 2.0, y: bottom + 40.0 };
        canvas.text(below, Anchor::Middle, "class=\"quiet\"", &name);
        bottom + 40.0
    }

    fn draw_item(&self, canvas: &mut Canvas, item: &WorkItem, area: Area) {
        let WorkItem { segment: request, kv_heads, qo, kv, partial } = item;
        let fill = colour(*request as usize);
        let (rows, heads) = (range_label("row", qo), short_heads(kv_heads));
        let long = format!(
            "request {request}, {}, {rows}, keys {}..{}",
            range_label("KV head", kv_heads),
            kv.start,
            kv.end
        );
        let ending = if partial.is_some() { ", partial state" } else { "" };
        canvas.rect(area, "item", fill, &format!("{long}: cost {}{ending}", self.cost(item)));
        if partial.is_some() {
            canvas.cover(area, "partial");
        }
        let overhead = area.width * self.overhead(item);
        canvas.cover(Area { width: overhead, ..area }, "overhead");

        let labels = [
            long,
            format!("r{request} {heads} {rows} keys {}..{}", kv.start, kv.end),
            format!("r{request} {heads} {rows}"),
            format!("r{request} {heads}"),
        ];
        let label_width = area.width - overhead - 8.0;
        let fitting = labels.iter().find(|label| text_width(label) <= label_width && area.height >= 13.0);
        if let Some(label) = fitting {
            let middle = Point { x: area.x + overhead + 6.0, y: area.y + area.height / 2.0 + 4.0 };
            // hatching lightens the item
            let ink = if partial.is_some() { ink(0xffffff) } else { ink(fill) };
            canvas.text(middle, Anchor::Start, &format!("{ink} pointer-events=\"none\""), label);
        }
    }
}

/// Draws tick labels and grid lines between `top` and `bottom`, at 1, 2 or 5 times a power of ten.
fn draw_axis(canvas: &mut Canvas, busiest: usize, scale: f64, top: f64, bottom: f64) {
    let steps = (0..).flat_map(|power| [1, 2, 5].map(|step| step * 10usize.pow(power)));
    let step = steps.into_iter().find(|step| busiest / step <= TICKS).unwrap_or(busiest);
    for tick in (0..=busiest).step_by(step) {
        let x = LEFT + tick as f64 * scale;
        canvas.line(Point { x, y: top - 6.0 }, Point { x, y: bottom + 4.0 }, "grid");
        canvas.text(Point { x, y: bottom + 18.0 }, Anchor::Middle, "class=\"quiet\"", &tick.to_string());
    }
}
