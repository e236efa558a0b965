//! The anatomy of a decode step: time, bytes, rate and share of each operator, and the time between operators.

use super::{
    Setting,
    measure::{Measurement, Spread},
    profiled::OperatorCall,
};
use std::{collections::HashMap, fmt::Write as _};
use tilewright::svg_canvas::{Anchor, Area, Canvas, Point, colour, text_width};

/// The name of the time that belongs to no operator.
const BETWEEN: &str = "between operators";

/// Medians over the steps of a case.
pub(super) struct Anatomy {
    pub(super) setting: Setting,
    /// In the order of the step; the last is [`BETWEEN`].
    pub(super) parts: Vec<Part>,
    /// Bytes per second.
    bandwidth: f64,
}

/// An operator, or the time between operators.
pub(super) struct Part {
    pub(super) name: String,
    /// Calls per step.
    pub(super) calls: usize,
    /// Seconds per step, the median of the steps.
    pub(super) seconds: f64,
    /// Bytes per step.
    pub(super) bytes: usize,
}

impl Anatomy {
    /// From the calls of a measured case. Prefill and warm-up precede the measured steps, so the last calls count: each sample
    /// operator ends a step.
    pub(super) fn new(
        setting: Setting,
        measured: &Measurement,
        calls: Vec<OperatorCall>,
        bandwidth: f64,
    ) -> Self {
        let steps: Vec<&[OperatorCall]> =
            calls.split_inclusive(|call| call.name.starts_with("sampling.")).collect();
        let steps = &steps[steps.len().saturating_sub(measured.steps)..];
        let mut parts: Vec<Part> = Vec::new();
        let mut seconds: HashMap<&str, Vec<f64>> = HashMap::new();
        for (index, step) in steps.iter().enumerate() {
            for call in *step {
                let of_steps = seconds.entry(&call.name).or_insert_with(|| vec![0.0; steps.len()]);
                of_steps[index] += call.time.as_secs_f64();
            }
        }
        for call in steps.last().copied().unwrap_or_default() {
            let known = parts.iter_mut().find(|part| part.name == call.name);
            let Some(part) = known else {
                let seconds = seconds.remove(&*call.name).map_or(0.0, |times| Spread::new(times).median);
                parts.push(Part { name: call.name.clone(), calls: 1, seconds, bytes: call.bytes });
                continue;
            };
            part.calls += 1;
            part.bytes += call.bytes;
        }
        let in_operators: f64 = parts.iter().map(|part| part.seconds).sum();
        let between = (measured.seconds.median - in_operators).max(0.0);
        parts.push(Part { name: BETWEEN.to_owned(), calls: 0, seconds: between, bytes: 0 });
        Self { setting, parts, bandwidth }
    }

    /// Seconds per step.
    pub(super) fn total(&self) -> f64 {
        self.parts.iter().map(|part| part.seconds).sum()
    }

    pub(super) fn table(&self) -> String {
        let mut text = format!(
            "anatomy of {}: {:.1} us per step, at most {:.1} GB/s\n{:36} {:>7} {:>10} {:>9} {:>7} {:>7}\n",
            self.setting,
            self.total() * 1e6,
            self.bandwidth / 1e9,
            "operator",
            "calls",
            "us",
            "MB",
            "GB/s",
            "share"
        );
        for part in &self.parts {
            let _ = writeln!(
                text,
                "{:36} {:>7} {:>10.1} {:>9.3} {:>7.1} {:>5.1} %",
                part.name,
                part.calls,
                part.seconds * 1e6,
                part.bytes as f64 / 1e6,
                part.rate() / 1e9,
                100.0 * part.seconds / self.total()
            );
        }
        text
    }

    pub(super) fn csv(&self) -> String {
        let mut text = format!("\noperator of {},calls,seconds,bytes,bytes_per_second,share\n", self.setting);
        for part in &self.parts {
            let share = part.seconds / self.total();
            let Part { name, calls, seconds, bytes } = part;
            let _ = writeln!(text, "{name},{calls},{seconds:.9},{bytes},{:.0},{share:.4}", part.rate());
        }
        text
    }
}

impl Part {
    /// Bytes per second.
    pub(super) fn rate(&self) -> f64 {
        if self.seconds > 0.0 { self.bytes as f64 / self.seconds } else { 0.0 }
    }
}

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
    canvas.text(Point { x: MARGIN, y: 34.0 }, Anchor::Start, "class=\"title\"", &title);
    canvas.text(Point { x: MARGIN, y: 56.0 }, Anchor::Start, "class=\"quiet\"", subtitle);
    for (row, part) in anatomy.parts.iter().enumerate() {
        let y = TOP + row as f64 * ROW;
        canvas.text(Point { x: left - 8.0, y: y + 15.0 }, Anchor::End, "", &part.name);
        let width = BAR * part.seconds / largest;
        let area = Area { x: left, y: y + 2.0, width, height: ROW - 6.0 };
        let rate = if part.bytes > 0 { format!(", {:.1} GB/s", part.rate() / 1e9) } else { String::new() };
        let share = 100.0 * part.seconds / anatomy.total();
        let text = format!("{:.1} us, {share:.1} %{rate}", part.seconds * 1e6);
        canvas.rect(area, "item", colour(row), &format!("{}: {text}", part.name));
        canvas.text(Point { x: left + width + 6.0, y: y + 15.0 }, Anchor::Start, "class=\"quiet\"", &text);
    }
    let height = TOP + anatomy.parts.len() as f64 * ROW + MARGIN;
    canvas.finish(left + BAR + 230.0, height)
}
