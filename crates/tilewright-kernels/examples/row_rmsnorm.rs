//! RMSNorm of f32 rows: recorded, printed, simulated, and mutated.

use tilewright_ptx::{
    build::Builder,
    ir::{Kernel, Stmt},
    isa::{Op, sync::SyncOp},
    sim::{Arg, Fault, FaultKind, Launch, Memory, Report},
    text::ptx,
    verify::Invalid,
};

// the kernel: y = x / sqrt(mean(x²) + eps) · weight; x and y [rows, columns], weight [columns]; one CTA per row
pub(crate) fn rmsnorm(threads: u32) -> Result<Kernel, Invalid> {
    Builder::kernel("row_rmsnorm", threads, |k| {
        // (1) parameters, and the row of this CTA
        let (x, weight, y) = (k.global::<f32>("x"), k.global::<f32>("weight"), k.global::<f32>("y"));
        let (columns, eps) = (k.param::<u32>("columns"), k.param::<f32>("eps"));
        let first = (k.cta().to_u64() * columns.to_u64()).named("first");
        let (x, y) = (x.at_wide(first), y.at_wide(first));

        // (2) each thread sums the squares of its elements
        let squares = k.var("squares", 0.0_f32);
        k.repeat((k.thread(), columns), threads, |i| {
            let x = x.at(i).load();
            squares.set(x.mul_add(x, squares.get()));
        });

        // (3) each warp reduces the sums of its lanes
        let mut sum = squares.get();
        for mask in [16, 8, 4, 2, 1] {
            sum = sum + sum.shuffle_xor(mask);
        }

        // (4) the CTA reduces the sums of its warps through shared memory
        let warps = threads as usize / 32;
        let sums = k.shared::<f32>("sums", warps, 4);
        k.when(k.lane().eq(0), || sums.at(k.thread() >> 5).store(sum));
        k.sync_threads();
        let total = (1..warps).fold(sums.load(), |total, warp| total + sums.plus(warp).load());

        // (5) each thread scales its elements
        let scale = (total / columns.to_f32() + eps).rsqrt().named("scale");
        k.repeat((k.thread(), columns), threads, |i| {
            y.at(i).store(x.at(i).load() * scale * weight.at(i).load());
        });
    })
}
// the end of the kernel

/// Runs the kernel on 3 rows of 1000 columns and compares with the f64 definition.
pub(crate) fn simulated(kernel: &Kernel, seed: u64) -> Result<Report, Fault> {
    let (rows, columns) = (3, 1000);
    let numbers: Vec<f32> = (0..rows * columns).map(|i| (i as f32 * 0.37).sin()).collect();
    let factors: Vec<f32> = (0..columns).map(|i| 1.0 + i as f32 / 1000.0).collect();
    let mut memory = Memory::new();
    let (x, weight) = (memory.alloc_from(&numbers), memory.alloc_from(&factors));
    let y = memory.alloc(4 * rows * columns);

    let args = [Arg::U64(x), Arg::U64(weight), Arg::U64(y), Arg::U32(columns as u32), Arg::F32(1e-6)];
    let report = Launch { kernel, grid: [rows as u32, 1, 1], args: &args, seed }.run(&mut memory)?;

    let results = memory.read::<f32>(y, rows * columns)?;
    for (row, results) in numbers.chunks(columns).zip(results.chunks(columns)) {
        let mean = row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / columns as f64;
        for ((&x, &factor), &y) in row.iter().zip(&factors).zip(results) {
            let expected = f64::from(x) / (mean + 1e-6).sqrt() * f64::from(factor);
            assert!((f64::from(y) - expected).abs() < 1e-5, "{y} is not {expected}");
        }
    }
    Ok(report)
}

/// The same kernel without `sync_threads`.
pub(crate) fn without_barrier(kernel: &Kernel) -> Kernel {
    let mut wrong = kernel.clone();
    wrong.body.retain(|stmt| !matches!(stmt, Stmt::Inst(inst) if inst.op == Op::Sync(SyncOp::Barrier)));
    wrong
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let kernel = rmsnorm(128)?;
    println!("{}", ptx(&kernel, 80)?);
    println!("{:#?}", simulated(&kernel, 1)?);
    let wrong = without_barrier(&kernel);
    for seed in 0..8 {
        let fault = simulated(&wrong, seed).expect_err("a barrier is missing");
        println!("seed {seed}: {fault}");
        assert!([FaultKind::Uninitialized, FaultKind::Race].contains(&fault.kind));
    }
    Ok(())
}
