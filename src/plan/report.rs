//! Text report of a plan: roofline estimate and load of the workers.

use std::fmt::Write as _;
use tilewright::{
    Roofline,
    attention::{Explanation, Schedule, Tiling, WorkItem},
};

/// Width of the longest bar, in characters.
const BAR: usize = 24;

/// The roofline of a machine, in 10⁹ per second.
pub(crate) fn rates(roofline: &Roofline) -> String {
    let (bytes, flops) = (roofline.bytes_per_second / 1e9, roofline.flops_per_second / 1e9);
    format!("{bytes:.1} GB/s and {flops:.1} GFLOP/s")
}

/// The roofline estimate of a plan and its bound.
pub(crate) fn estimate(explanation: &Explanation, roofline: &Roofline) -> String {
    let estimate = explanation.estimate(roofline);
    let [total, memory, compute] = [estimate.seconds(), estimate.memory, estimate.compute].map(time);
    format!("at least {total}, bound by {} (memory {memory}, compute {compute})", estimate.bound())
}

/// Formats seconds in a suitable unit.
pub(crate) fn time(seconds: f64) -> String {
    match seconds {
        s if s < 1e-3 => format!("{:.2} µs", s * 1e6),
        s if s < 1.0 => format!("{:.2} ms", s * 1e3),
        s => format!("{s:.2} s"),
    }
}

/// The planner's cost of an item.
pub(crate) fn cost(item: &WorkItem, tiling: &Tiling) -> usize {
    tiling.cost(item.kv_heads.len(), item.qo.len(), item.kv.len())
}

/// The formula of [`cost`].
pub(crate) fn cost_formula(tiling: &Tiling) -> String {
    format!(
        "cost: (KV tiles of {} keys + {}) × (query rows + {}) × KV heads",
        tiling.kv_tokens, tiling.segment_overhead, tiling.tile_load
    )
}

/// One line per worker.
pub(super) fn workers(schedule: &Schedule, tiling: &Tiling) -> String {
    let costs: Vec<usize> = (0..schedule.num_workers())
        .map(|w| schedule.worker(w).iter().map(|item| cost(item, tiling)).sum())
        .collect();
    let busiest = costs.iter().copied().max().unwrap_or(0).max(1);
    let mut text = format!("worker  items  partial   cost  {:BAR$}  requests\n", "");
    for (w, &cost) in costs.iter().enumerate() {
        let items = schedule.worker(w);
        let partial = items.iter().filter(|item| item.partial.is_some()).count();
        let bar = "█".repeat((cost * BAR).div_ceil(busiest));
        let requests = requests(items);
        let line = format!("{w:6}  {:5}  {partial:7}  {cost:5}  {bar:BAR$}  {requests}", items.len());
        let _ = writeln!(text, "{}", line.trim_end());
    }
    let _ = writeln!(
        text,
        "\n{}\npartial: work items that write a partial state, to be merged when all are done",
        cost_formula(tiling)
    );
    text
}

/// The requests of consecutive items: `0`, `3-7`, empty for no item.
fn requests(items: &[WorkItem]) -> String {
    match items {
        [] => String::new(),
        [first, .., last] if first.segment != last.segment => format!("{}-{}", first.segment, last.segment),
        [first, ..] => first.segment.to_string(),
    }
}
