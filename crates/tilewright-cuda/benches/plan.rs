//! Planning latency on the GPU of this machine: plans of the host until their upload is submitted, and plans computed on the
//! device. Skipped without a GPU.
//!
//! Decode requests, 32 query and 8 KV heads of 128, bf16, pages of 16 tokens. Columns, in microseconds:
//!
//! | | |
//! |---|---|
//! | `plan` | `plan()` on the host with its upload: fresh memory, filled and sent; median and minimum |
//! | `replan` | same, into the memory of a plan of fixed capacity |
//! | `shared_plan`, `shared_replan` | same, with page indices that the plan shares instead of copying |
//! | `device` | the planning kernel, per launch within a graph; median and minimum |
//! | `device_stream` | the same kernel, launched by the host |

#[path = "../../tilewright/benches/decode_batch/mod.rs"]
mod decode_batch;
mod gpu;

use clap::Parser;
use decode_batch::{DecodeBatch, LENGTHS, PAGE_SIZE};
use std::{error::Error, fmt::Write, path::PathBuf, sync::Arc, time::Instant};
use tilewright::{
    Attention, Batch, Dtype, HeadDim, Heads, Mask, PageTable, Plan, Problem,
    attention::{Capacity, DeviceBatch, DevicePages, Split},
};
use tilewright_cuda::{Cuda, Device, Gpu, machine::Machine};

/// Number of requests, and the target of a host plan in microseconds.
const TARGETS: [(usize, f64); 4] = [(1, 5.0), (64, 10.0), (256, 20.0), (1024, 60.0)];
/// The target of a device plan in microseconds.
const DEVICE_TARGET: f64 = 5.0;
/// Launches timed together.
const LAUNCHES: u32 = 100;
const COLUMNS: &str = "requests,lengths,pages,items,target,plan,plan_min,replan,replan_min,shared_plan,shared_plan_min,shared_replan,shared_replan_min,device_target,device,device_min,device_stream,device_stream_min";

/// Times plans on the GPU of this machine.
#[derive(Parser)]
struct Arguments {
    /// Writes the results to this file.
    #[arg(long)]
    record: Option<PathBuf>,
    /// Number of rounds; the table has median and minimum.
    #[arg(long, default_value_t = 300)]
    rounds: usize,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> Outcome<()> {
    let arguments = Arguments::parse();
    let Some(device) = gpu::or_skip(Device::open(0)) else { return Ok(()) };
    let gpu: Cuda = Gpu::new(device);
    let name = gpu.machine().stream().context().properties().name.clone();
    let rounds = arguments.rounds.max(1);
    let mut table = format!(
        "# device: {name}\n# command: cargo bench -p tilewright-cuda --bench plan -- --rounds {rounds}\n# microseconds\n{COLUMNS}\n"
    );
    let problem = Problem::builder(Heads { qo: 32, kv: 8 }, HeadDim::same(128))
        .dtypes(Dtype::Bf16, Dtype::Bf16)
        .mask(Mask::Causal)
        .build()?;
    let attention = Attention::new(problem, gpu.clone())?;
    for (requests, target) in TARGETS {
        for lengths in LENGTHS {
            let case = Case(DecodeBatch::new(requests, lengths));
            let line = case.time((&attention, &gpu), (target, rounds))?;
            println!("{line}");
            writeln!(table, "{line}")?;
        }
    }
    print!("{table}");
    if let Some(file) = &arguments.record {
        std::fs::write(file, table).map_err(|why| format!("{}: {why}", file.display()))?;
    }
    Ok(())
}

/// A batch of decode requests.
struct Case(DecodeBatch);

impl Case {
    /// A line of the table.
    fn time(
        &self,
        (attention, gpu): (&Attention<Cuda>, &Cuda),
        (target, rounds): (f64, usize),
    ) -> Outcome<String> {
        let (requests, pages) = (self.0.requests(), self.0.indices.len());
        let batches = self.0.copied_and_shared();
        let capacity = Capacity::decode(requests, pages);
        let items = attention.plan(&batches[0])?.schedule().items.len();
        let mut line = format!("{requests},{},{pages},{items},{target}", self.0.lengths);
        let on_the_host = |work: &mut dyn FnMut() -> Outcome<()>| {
            times(rounds, || {
                gpu.machine().synchronize()?;
                let start = Instant::now();
                work()?;
                Ok(start.elapsed().as_secs_f64())
            })
        };
        for batch in batches {
            // the time includes dropping the previous plan, as in a serving engine
            let mut kept = None;
            let fresh = on_the_host(&mut || {
                kept = Some(attention.plan(&batch)?);
                Ok(())
            })?;
            let mut plan = attention.plan_with_capacity(&capacity, &batch, Split::Balanced)?;
            let again = on_the_host(&mut || Ok(attention.replan(&mut plan, &batch)?))?;
            write!(line, ",{:.2},{:.2},{:.2},{:.2}", fresh.0, fresh.1, again.0, again.1)?;
        }
        let (graph, stream) = self.on_the_device((attention, gpu), rounds)?;
        write!(line, ",{DEVICE_TARGET},{:.2},{:.2},{:.2},{:.2}", graph.0, graph.1, stream.0, stream.1)?;
        Ok(line)
    }

    /// Median and minimum per launch, in a graph and on a stream.
    fn on_the_device(
        &self,
        (attention, gpu): (&Attention<Cuda>, &Cuda),
        rounds: usize,
    ) -> Outcome<((f64, f64), (f64, f64))> {
        let DecodeBatch { qo_indptr, indptr, last_page_len, indices, .. } = &self.0;
        let capacity = Capacity::decode(self.0.requests(), indices.len());
        let num_requests = [self.0.requests() as i32];
        let arrays = [&num_requests[..], qo_indptr, indptr, last_page_len, indices]
            .map(|values| gpu.upload(bytemuck::cast_slice(values)).map(Arc::new));
        let [num_requests, qo_indptr, kv_indptr, last_page_len, indices] = arrays;
        let batch = DeviceBatch {
            num_requests: num_requests?,
            qo_indptr: qo_indptr?,
            pages: DevicePages::Lists {
                kv_indptr: kv_indptr?,
                last_page_len: last_page_len?,
                indices: indices?,
            },
        };
        let none = PageTable::new(&[0], &[] as &[i32; 0], &[] as &[i32; 0], PAGE_SIZE);
        let mut plan: Plan =
            attention.plan_with_capacity(&capacity, &Batch::paged(&[0], none), Split::Balanced)?;
        attention.plan_on_device(&mut plan, batch)?;
        if attention.refusals_on_device(&plan)? != 0 {
            return Err("the device refuses the batch".into());
        }
        let mut many = || (0..LAUNCHES).try_for_each(|_| attention.replan_on_device(&plan));
        let graph = gpu.machine().record(&mut many)?.ok_or("a GPU records")?;
        let stopwatch = gpu.machine().stream().stopwatch()?;
        let mut failed = None;
        let mut timed = |work: &mut dyn FnMut() -> tilewright::Result<()>| {
            times(rounds.div_ceil(10), || {
                let seconds = stopwatch.time(|| {
                    failed = work().err();
                    Ok(())
                })?;
                match failed.take() {
                    Some(why) => Err(why.into()),
                    None => Ok(seconds / f64::from(LAUNCHES)),
                }
            })
        };
        Ok((timed(&mut || graph.replay())?, timed(&mut many)?))
    }
}

/// Median and minimum of `rounds` times in microseconds, after a tenth as many for warm-up.
fn times(rounds: usize, mut round: impl FnMut() -> Outcome<f64>) -> Outcome<(f64, f64)> {
    let mut times = Vec::with_capacity(rounds);
    for at in 0..rounds + rounds.div_ceil(10) {
        let seconds = round()?;
        if at >= rounds.div_ceil(10) {
            times.push(seconds * 1e6);
        }
    }
    times.sort_by(f64::total_cmp);
    Ok((times[rounds / 2], times[0]))
}
