//! Host time of a plan: batches of decode requests, planned as for a GPU.
//!
//! 32 query and 8 KV heads of 128, pages of 16 tokens, one query row per request, one KV head per item.
//! `cargo bench -p tilewright --bench plan -- --record FILE` writes the results to a file. The plan time is the median over
//! calls that allocate their result; a replan rewrites one plan. Both are also measured for plans that share the caller's page
//! indices instead of copying them.

mod decode_batch;

use decode_batch::{DecodeBatch, LENGTHS};
use std::{error::Error, fmt::Write as _, hint::black_box, time::Instant};
use tilewright::{
    Dtype, HeadDim, Heads, Mask, Problem,
    attention::{Capacity, Planner, Split, Tiling},
};

/// Timed plans; another tenth runs before as warm-up.
const ROUNDS: usize = 2000;
/// Target times in microseconds by number of requests.
const TARGETS: [(usize, f64); 4] = [(1, 5.0), (64, 10.0), (256, 20.0), (1024, 60.0)];
const COLUMNS: &str = "requests,lengths,workers,q_rows,pages,items,merges,target_us,plan_us,plan_best_us,replan_us,replan_best_us,shared_us,shared_best_us,shared_replan_us,shared_replan_best_us";

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> Outcome<()> {
    let mut arguments = std::env::args().skip_while(|argument| argument != "--record").skip(1);
    let mut lines =
        vec![format!("# cpu: {}", cpu()), "# command: cargo bench -p tilewright --bench plan".to_owned()];
    lines.push(COLUMNS.to_owned());
    for (requests, target) in TARGETS {
        for lengths in LENGTHS {
            for (workers, q_rows) in [(132, 128), (264, 64)] {
                let case = PlanCase { batch: DecodeBatch::new(requests, lengths), workers, q_rows };
                lines.push(case.time(target)?);
            }
        }
    }
    let text = lines.join("\n") + "\n";
    print!("{text}");
    if let Some(file) = arguments.next() {
        std::fs::write(&file, text).map_err(|why| format!("{file}: {why}"))?;
    }
    Ok(())
}

/// The processor's name according to Linux.
fn cpu() -> String {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    name.map_or("unknown", |(_, name)| name.trim()).to_owned()
}

/// A batch and the device that it is planned for.
struct PlanCase {
    batch: DecodeBatch,
    workers: usize,
    q_rows: usize,
}

impl PlanCase {
    /// Measures one line of the record.
    fn time(&self, target: f64) -> Outcome<String> {
        let problem =
            Problem::builder(Heads { qo: 32, kv: 8 }, HeadDim::same(128)).mask(Mask::Causal).build()?;
        let tiling = Tiling {
            q_rows: self.q_rows,
            kv_heads: 1,
            kv_tokens: 64,
            segment_overhead: 3,
            cut_overhead: 6,
            tile_load: 16,
            workers: self.workers,
            shares: self.workers,
            scratch: 0,
            weights: Dtype::Bf16,
            many_rows: None,
        };
        let planner = Planner::new(problem, tiling);
        let (requests, pages) = (self.batch.requests(), self.batch.indices.len());
        let batches = self.batch.copied_and_shared();
        let plan = planner.plan_with(&batches[0], Split::Balanced)?;
        let mut line = format!("{requests},{},{},{},{pages}", self.batch.lengths, self.workers, self.q_rows);
        write!(line, ",{},{},{target}", plan.schedule().items.len(), plan.schedule().merges.len())?;
        for batch in batches {
            let fresh = times(|| {
                black_box(planner.plan_with(black_box(&batch), Split::Balanced).map(drop))?;
                Ok(())
            })?;
            let capacity = Capacity::decode(requests, pages);
            let mut fixed = planner.plan_with_capacity(&capacity, &batch, Split::Balanced)?;
            let replanned = times(|| Ok(planner.replan(&mut fixed, black_box(&batch))?))?;
            write!(line, ",{:.2},{:.2},{:.2},{:.2}", fresh.0, fresh.1, replanned.0, replanned.1)?;
        }
        Ok(line)
    }
}

/// The median and the minimum, in microseconds.
fn times(mut run: impl FnMut() -> Outcome<()>) -> Outcome<(f64, f64)> {
    let mut times = Vec::with_capacity(ROUNDS);
    for round in 0..ROUNDS + ROUNDS / 10 {
        let start = Instant::now();
        run()?;
        let time = start.elapsed().as_secs_f64() * 1e6;
        if round >= ROUNDS / 10 {
            times.push(time);
        }
    }
    times.sort_by(f64::total_cmp);
    Ok((times[ROUNDS / 2], times[0]))
}
