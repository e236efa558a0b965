//! A kernel as they are in earnest: a producer warp loads stages of A and B by TMA, a warpgroup multiplies them; and what
//! happens when either forgets its part.

use crate::SEEDS;
use half::bf16;
use tilewright_ptx::{
    build::{Barrier, Builder, BulkOptions, Shared, Value, Var, WgmmaLeft, WgmmaOperands},
    ir::Kernel,
    isa::{
        matrix::{Elements, Major},
        sync::Fence,
    },
    sim::{
        Arg, Fault, FaultKind, Launch, Memory, Report,
        tensor::{Swizzle, TensorMap},
    },
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mistake {
    None,
    /// The consumer does not wait for its stage.
    NoFullWait,
    /// The producer does not wait for stages to be free.
    NoEmptyWait,
    /// The consumer frees a stage before its products are waited for.
    EarlyRelease,
    /// The consumer never frees a stage.
    NoRelease,
    /// Fewer bytes are expected than come.
    ShortExpect,
    /// More bytes are expected than come.
    LongExpect,
    /// Parities of the consumer are the wrong way round.
    SwappedPhase,
    /// An mbarrier is initialised for one arrival too many.
    WrongCount,
    /// Sums are read without a wait for the last products.
    NoWgmmaWait,
}

const STAGES: u32 = 2;
const TILES: u32 = 5;
/// Bytes of 64 rows of 64 bf16.
const TILE: u32 = 64 * 128;

struct Stage<'k> {
    a: Shared<'k, u32>,
    b: Shared<'k, u32>,
    full: Barrier<'k>,
    empty: Barrier<'k>,
}

fn stages(k: &Builder, mistake: Mistake) -> Vec<Stage<'_>> {
    let words = (TILE / 4) as usize;
    let a = k.shared::<u32>("a", words * STAGES as usize, 1024);
    let b = k.shared::<u32>("b", words * STAGES as usize, 1024);
    let (full, empty) = (k.barriers("full", STAGES as usize), k.barriers("empty", STAGES as usize));
    let stage = |at: u32| Stage {
        a: a.at(at * words as u32),
        b: b.at(at * words as u32),
        full: full.at(at),
        empty: empty.at(at),
    };
    let stages: Vec<Stage<'_>> = (0..STAGES).map(stage).collect();
    k.when(k.thread().eq(0), || {
        for stage in &stages {
            stage.full.init(if mistake == Mistake::WrongCount { 2 } else { 1 });
            stage.empty.init(1);
        }
        k.fence(Fence::MbarrierInit);
    });
    k.sync_threads();
    stages
}

fn produce(k: &Builder, stages: &[Stage<'_>], (a, b): (Value<'_, u64>, Value<'_, u64>), mistake: Mistake) {
    k.one_lane(|| {
        for tile in 0..TILES {
            let stage = &stages[(tile % STAGES) as usize];
            if mistake != Mistake::NoEmptyWait {
                stage.empty.wait(((tile / STAGES) & 1) ^ 1);
            }
            let bytes = match mistake {
                Mistake::ShortExpect => 2 * TILE - 512,
                Mistake::LongExpect => 2 * TILE + 512,
                _ => 2 * TILE,
            };
            stage.full.arrive_expecting(bytes);
            let at = [k.constant(tile * 64), k.cta() * 64];
            k.load_tensor(stage.a, (a, &at), stage.full, BulkOptions::default());
            k.load_tensor(stage.b, (b, &[at[0], k.constant(0)]), stage.full, BulkOptions::default());
        }
    });
}

fn consume<'k>(k: &'k Builder, stages: &[Stage<'k>], mistake: Mistake) -> Vec<Var<'k, f32>> {
    let sums: Vec<Var<'_, f32>> = (0..32).map(|_| k.var("sum", 0.0_f32)).collect();
    for tile in 0..TILES {
        let stage = &stages[(tile % STAGES) as usize];
        if mistake != Mistake::NoFullWait {
            let swapped = u32::from(mistake == Mistake::SwappedPhase);
            stage.full.wait(((tile / STAGES) & 1) ^ swapped);
        }
        k.wgmma_fence();
        for step in 0..4 {
            let descriptor = |tile: Shared<'k, u32>| {
                ((tile.address() + 32 * step) >> 4).to_u64() | (1_u64 << 16 | 64 << 32 | 1 << 62)
            };
            let operands = WgmmaOperands {
                elements: (Elements::Bf16, Elements::Bf16),
                left: WgmmaLeft::Shared(descriptor(stage.a), Major::K),
                right: descriptor(stage.b),
                right_major: Major::K,
            };
            k.wgmma(&sums, operands, true);
        }
        k.wgmma_commit();
        let release = || {
            if mistake != Mistake::NoRelease {
                k.when((k.thread() & 127).eq(0), || stage.empty.arrive());
            }
        };
        if mistake == Mistake::EarlyRelease {
            release();
        }
        if mistake != Mistake::NoWgmmaWait || tile + 1 < TILES {
            k.wgmma_wait(0);
        }
        if mistake != Mistake::EarlyRelease {
            release();
        }
    }
    sums
}

fn gemm(mistake: Mistake) -> Kernel {
    let kernel = Builder::kernel("gemm", 160, |k| gemm_body(k, mistake));
    kernel.unwrap_or_else(|error| panic!("{error}"))
}

fn gemm_body(k: &Builder, mistake: Mistake) {
    let (a, b, out) = (k.tensor_map("a"), k.tensor_map("b"), k.global::<f32>("out"));
    let stages = stages(k, mistake);
    k.when_else(
        k.warp_index().eq(4),
        || produce(k, &stages, (a, b), mistake),
        || {
            let sums = consume(k, &stages, mistake);
            let row = (k.thread() >> 5) * 16 + (k.lane() >> 2) + k.cta() * 64;
            for (i, sum) in sums.iter().enumerate() {
                let i = i as u32;
                let (row, column) = (row + (8 * (i >> 1 & 1)), (k.lane() & 3) * 2 + (8 * (i >> 2) + (i & 1)));
                out.at(row * 64 + column).store(sum.get());
            }
        },
    );
}

fn run(kernel: &Kernel, seed: u64) -> Result<(Vec<f32>, Report), Fault> {
    let mut memory = Memory::new();
    let value = |i: usize, by: usize| bf16::from_f32((i * by % 11) as f32 - 5.0);
    let matrix = |rows: usize, by: usize| (0..rows * 320).map(|i| value(i, by)).collect::<Vec<bf16>>();
    let a = memory.alloc_from(&matrix(128, 7));
    let b = memory.alloc_from(&matrix(64, 5));
    let out = memory.alloc(128 * 64 * 4);
    let map = |address, rows| TensorMap {
        element_bytes: 2,
        address,
        dims: vec![320, rows],
        strides: vec![640],
        box_dims: vec![64, 64],
        swizzle: Swizzle::B128,
    };
    let args = [Arg::TensorMap(map(a, 128)), Arg::TensorMap(map(b, 64)), Arg::U64(out)];
    let report = Launch { kernel, grid: [2, 1, 1], args: &args, seed }.run(&mut memory)?;
    Ok((memory.read(out, 128 * 64)?, report))
}

#[test]
fn it_multiplies() {
    let value = |i: usize, by: usize| (i * by % 11) as f32 - 5.0;
    let expected: Vec<f32> = (0..128 * 64)
        .map(|at| (0..320).map(|k| value(at / 64 * 320 + k, 7) * value(at % 64 * 320 + k, 5)).sum())
        .collect();
    let (kernel, start) = (gemm(Mistake::None), std::time::Instant::now());
    let mut products = 0;
    for seed in 0..SEEDS {
        let (found, report) = run(&kernel, seed).unwrap_or_else(|fault| panic!("seed {seed}: {fault}"));
        assert_eq!(found, expected, "seed {seed}");
        products += report.matrix_instructions / 4;
    }
    println!("wgmma m64n64k16: {:.1} us each", start.elapsed().as_secs_f64() * 1e6 / products as f64);
}

/// What is found with all seeds, each kind once.
fn found(mistake: Mistake) -> Vec<FaultKind> {
    let kernel = gemm(mistake);
    let mut kinds: Vec<FaultKind> = (0..SEEDS)
        .map(|seed| match run(&kernel, seed) {
            Ok(_) => panic!("seed {seed}: {mistake:?} was not found"),
            Err(fault) => {
                assert!(fault.to_string().contains(".rs:"), "{fault}");
                fault.kind
            }
        })
        .collect();
    kinds.sort_by_key(|kind| *kind as u8);
    kinds.dedup();
    kinds
}

#[test]
fn every_mistake_is_found() {
    for (mistake, expected) in [
        (Mistake::NoFullWait, &[FaultKind::Uninitialized, FaultKind::InFlight][..]),
        (Mistake::NoEmptyWait, &[FaultKind::WrongArrivalCount]),
        (Mistake::EarlyRelease, &[FaultKind::InFlight]),
        (Mistake::NoRelease, &[FaultKind::Deadlock]),
        (Mistake::ShortExpect, &[FaultKind::WrongTransactionCount]),
        (Mistake::LongExpect, &[FaultKind::WrongTransactionCount]),
        (Mistake::SwappedPhase, &[FaultKind::InFlight, FaultKind::Uninitialized, FaultKind::Deadlock]),
        (Mistake::WrongCount, &[FaultKind::Deadlock]),
        (Mistake::NoWgmmaWait, &[FaultKind::InFlight]),
    ] {
        let found = found(mistake);
        assert!(found.iter().all(|kind| expected.contains(kind)), "{mistake:?}: {found:?}");
    }
}
