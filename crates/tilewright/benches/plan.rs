//! Host time of a plan: batches of decode requests, planned as for a GPU.
//!
//! 32 query and 8 KV heads of 128, pages of 16 tokens, one query row per request, one KV head per item.
//! `cargo bench -p tilewright --bench plan -- --record FILE` writes the results to a file. The plan time is the median over
//! calls that allocate their result; a replan rewrites one plan. Both are also measured for plans that share the caller's page
//! indices instead of copying them.

use std::{error::Error, fmt::Write as _, hint::black_box, sync::Arc, time::Instant};
use tilewright::{
    Batch, Dtype, HeadDim, Heads, Mask, PageTable, Problem,
    attention::{Capacity, Planner, Split, Tiling},
};

const PAGE_SIZE: usize = 16;
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
        for lengths in ["even", "one long", "random"] {
            for (workers, q_rows) in [(132, 128), (264, 64)] {
                let case = PlanCase { requests, lengths, workers, q_rows };
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
    requests: usize,
    lengths: &'static str,
    workers: usize,
    q_rows: usize,
}

impl PlanCase {
    /// KV length of each request.
    fn kv_lens(&self) -> Vec<usize> {
        let long = |r: usize| if r + 1 == self.requests { 65_536 } else { 256 };
        let mut state = 1_u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            1 + (state >> 33) as usize % 8192
        };
        match self.lengths {
            "even" => vec![4096; self.requests],
            "one long" => (0..self.requests).map(long).collect(),
            _ => (0..self.requests).map(|_| random()).collect(),
        }
    }

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
        let kv_lens = self.kv_lens();
        let qo_indptr: Vec<i32> = (0..=self.requests as i32).collect();
        let mut indptr = vec![0_i32];
        kv_lens.iter().for_each(|len| indptr.push(indptr[indptr.len() - 1] + len.div_ceil(PAGE_SIZE) as i32));
        let last: Vec<i32> = kv_lens.iter().map(|len| ((len - 1) % PAGE_SIZE + 1) as i32).collect();
        let pages = indptr[self.requests];
        let indices: Arc<Vec<i32>> = Arc::new((0..pages).rev().collect());
        let copied = PageTable::new(&indptr, &indices[..], &last, PAGE_SIZE);
        let shared = PageTable::new(&indptr, &indices, &last, PAGE_SIZE);

        let plan = planner.plan_with(&Batch::paged(&qo_indptr, copied), Split::Balanced)?;
        let mut line = format!("{},{},{},{},{pages}", self.requests, self.lengths, self.workers, self.q_rows);
        write!(line, ",{},{},{target}", plan.schedule().items.len(), plan.schedule().merges.len())?;
        for table in [copied, shared] {
            let batch = Batch::paged(&qo_indptr, table);
            let fresh = times(|| {
                black_box(planner.plan_with(black_box(&batch), Split::Balanced).map(drop))?;
                Ok(())
            })?;
            let capacity = Capacity::decode(self.requests, indices.len());
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
