//! The anatomy of a step as an SVG: one bar per operator, as long as its share of the step.

use super::anatomy::Anatomy;
use tilewright::svg_canvas::{Anchor, Area, Canvas, colour, text_width};

const ROW: f64 = 24.0;
const TOP: f64 = 76.0;
const BAR: f64 = 560.0;
const MARGIN: f64 = 20.0;

pub(super) fn draw(anatomy: &Anatomy, subtitle: &str) -> String {
    let longest = anatomy.parts.iter().map(|part| text_width(&part.name)).fold(0.0, f64::max);
    let left = MARGIN + longest + 10.0;
    let largest = anatomy.parts.iter().map(|part| part.seconds).fold(f64::MIN_POSITIVE, f64::max);
    let mut canvas = Canvas::default();
    let title = format!("{}: {:.1} us per step", anatomy.setting, anatomy.total() * 1e6);
    canvas.text((MARGIN, 34.0), Anchor::Start, "class=\"title\"", &title);
    canvas.text((MARGIN, 56.0), Anchor::Start, "class=\"quiet\"", subtitle);
    for (row, part) in anatomy.parts.iter().enumerate() {
        let y = TOP + row as f64 * ROW;
        canvas.text((left - 8.0, y + 15.0), Anchor::End, "", &part.name);
        let width = BAR * part.seconds / largest;
        let area = Area { x: left, y: y + 2.0, width, height: ROW - 6.0 };
        let rate = if part.bytes > 0 { format!(", {:.1} GB/s", part.rate() / 1e9) } else { String::new() };
        let share = 100.0 * part.seconds / anatomy.total();
        let text = format!("{:.1} us, {share:.1} %{rate}", part.seconds * 1e6);
        canvas.rect(area, "item", colour(row), &format!("{}: {text}", part.name));
        canvas.text((left + width + 6.0, y + 15.0), Anchor::Start, "class=\"quiet\"", &text);
    }
    let height = TOP + anatomy.parts.len() as f64 * ROW + MARGIN;
    canvas.finish(left + BAR + 230.0, height)
}
