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

/// `1 merge`, `2 merges`.
pub(crate) fn counted(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// The planner's cost of an item.
fn cost(item: &WorkItem, tiling: &Tiling) -> usize {
    tiling.cost(item.kv_heads.len(), item.qo.len(), item.kv.len())
}

/// One line per worker with work, one per range of idle workers, and how `threads` execute them.
pub(super) fn workers(schedule: &Schedule, tiling: &Tiling, threads: usize) -> String {
    let costs: Vec<usize> = (0..schedule.num_workers())
        .map(|w| schedule.worker(w).iter().map(|item| cost(item, tiling)).sum())
        .collect();
    let busiest = costs.iter().copied().max().unwrap_or(0).max(1);
    let mut text = format!("worker  items  partial   cost  {:BAR$}  requests\n", "");
    let mut idle = Vec::new();
    for (w, &cost) in costs.iter().enumerate() {
        let items = schedule.worker(w);
        if items.is_empty() {
            let next_is_idle = w + 1 < costs.len() && schedule.worker(w + 1).is_empty();
            idle.push(w);
            if !next_is_idle {
                let _ = writeln!(text, "{:>6}  idle", range(&idle));
                idle.clear();
            }
            continue;
        }
        let partial = items.iter().filter(|item| item.partial.is_some()).count();
        let bar = "█".repeat((cost * BAR).div_ceil(busiest));
        let requests = requests(items);
        let line = format!("{w:6}  {:5}  {partial:7}  {cost:5}  {bar:BAR$}  {requests}", items.len());
        let _ = writeln!(text, "{}", line.trim_end());
    }
    let _ = writeln!(
        text,
        "\n{}\npartial: work items that write a partial state, to be merged when all are done\n{}",
        tiling.cost_formula(),
        threads_of_workers(costs.len(), threads)
    );
    text
}

/// How `threads` execute `workers`.
fn threads_of_workers(workers: usize, threads: usize) -> String {
    let executed = match threads {
        1 => "1 thread executes them one after another".to_owned(),
        _ => format!("{threads} threads execute them, each takes the next one when it is done"),
    };
    format!(
        "workers: {} per thread, so that a delayed thread delays little; {executed}",
        workers / threads.max(1)
    )
}

/// The first and last of some consecutive numbers: `0`, `3-7`.
fn range(numbers: &[usize]) -> String {
    match numbers {
        [first, .., last] => format!("{first}-{last}"),
        _ => numbers.first().map_or(String::new(), usize::to_string),
    }
}

/// The requests of consecutive items: `0`, `3-7`, empty for no item.
fn requests(items: &[WorkItem]) -> String {
    match items {
        [] => String::new(),
        [first, .., last] if first.segment != last.segment => format!("{}-{}", first.segment, last.segment),
        [first, ..] => first.segment.to_string(),
    }
}
