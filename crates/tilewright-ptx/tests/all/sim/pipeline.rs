//! A warp-specialized GEMM: a producer warp loads stages of A and B by TMA and a warpgroup multiplies them. Each synchronization
//! bug must be reported.

use super::SEEDS;
use half::bf16;
use tilewright_ptx::{
    Arg, Barrier, Builder, Elements, Fault, FaultKind, Fence, Kernel, Launch, Major, Memory, Report, Shared,
    Swizzle, TensorBox, TensorMap, Value, Var, WgmmaLeft, WgmmaOperands,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bug {
    None,
    /// The consumer does not wait for its stage.
    NoFullWait,
    /// The producer does not wait for empty stages.
    NoEmptyWait,
    /// The consumer releases a stage before the wait for its `wgmma`.
    EarlyRelease,
    /// The consumer never releases a stage.
    NoRelease,
    /// Fewer bytes are expected than copied.
    ShortExpect,
    /// More bytes are expected than copied.
    LongExpect,
    /// The consumer's parities are swapped.
    SwappedPhase,
    /// An mbarrier is initialized with one arrival too many.
    WrongCount,
    /// Accumulators are read without a wait for the last `wgmma`.
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

fn stages(k: &Builder, bug: Bug) -> Vec<Stage<'_>> {
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
            stage.full.init(if bug == Bug::WrongCount { 2 } else { 1 });
            stage.empty.init(1);
        }
        k.fence(Fence::MbarrierInit);
    });
    k.sync_threads();
    stages
}

fn produce(k: &Builder, stages: &[Stage<'_>], (a, b): (Value<'_, u64>, Value<'_, u64>), bug: Bug) {
    k.when(k.elect(), || {
        for tile in 0..TILES {
            let stage = &stages[(tile % STAGES) as usize];
            if bug != Bug::NoEmptyWait {
                stage.empty.wait(((tile / STAGES) & 1) ^ 1);
            }
            let bytes = match bug {
                Bug::ShortExpect => 2 * TILE - 512,
                Bug::LongExpect => 2 * TILE + 512,
                _ => 2 * TILE,
            };
            stage.full.arrive_expecting(bytes);
            let at = [k.constant(tile * 64), k.cta() * 64];
            k.load_tensor(stage.a, TensorBox::new(a, &at), stage.full);
            let corner = &[at[0], k.constant(0)];
            k.load_tensor(stage.b, TensorBox::new(b, corner), stage.full);
        }
    });
}

fn consume<'k>(k: &'k Builder, stages: &[Stage<'k>], bug: Bug) -> Vec<Var<'k, f32>> {
    let sums: Vec<Var<'_, f32>> = (0..32).map(|_| k.var("sum", 0.0_f32)).collect();
    for tile in 0..TILES {
        let stage = &stages[(tile % STAGES) as usize];
        if bug != Bug::NoFullWait {
            let swapped = u32::from(bug == Bug::SwappedPhase);
            stage.full.wait(((tile / STAGES) & 1) ^ swapped);
        }
        k.wgmma_fence();
        for step in 0..4 {
            let descriptor = |tile: Shared<'k, u32>| {
                ((tile.address() + 32 * step) >> 4).to_u64() | (1_u64 << 16 | 64 << 32 | 1 << 62)
            };
            let operands = WgmmaOperands {
                elements: Elements::Bf16,
                left: WgmmaLeft::Shared(descriptor(stage.a), Major::K),
                right: descriptor(stage.b),
                right_major: Major::K,
            };
            k.wgmma(&sums, operands, true);
        }
        k.wgmma_commit();
        let release = || {
            if bug != Bug::NoRelease {
                k.when((k.thread() & 127).eq(0), || stage.empty.arrive());
            }
        };
        if bug == Bug::EarlyRelease {
            release();
        }
        if bug != Bug::NoWgmmaWait || tile + 1 < TILES {
            k.wgmma_wait(0);
        }
        if bug != Bug::EarlyRelease {
            release();
        }
    }
    sums
}

fn gemm(bug: Bug) -> Kernel {
    let kernel = Builder::kernel("gemm", 160, |k| gemm_body(k, bug));
    kernel.unwrap_or_else(|error| panic!("{error}"))
}

fn gemm_body(k: &Builder, bug: Bug) {
    let (a, b, out) = (k.tensor_map("a"), k.tensor_map("b"), k.global::<f32>("out"));
    let stages = stages(k, bug);
    k.when_else(
        k.warp_index().eq(4),
        || produce(k, &stages, (a, b), bug),
        || {
            let sums = consume(k, &stages, bug);
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
    let args = [Arg::TensorMap(map(a, 128).into()), Arg::TensorMap(map(b, 64).into()), Arg::U64(out)];
    let report = Launch { kernel, grid: [2, 1, 1], args: &args, seed }.run(&mut memory)?;
    Ok((memory.read(out, 128 * 64)?, report))
}

#[test]
fn the_correct_gemm_multiplies() {
    let value = |i: usize, by: usize| (i * by % 11) as f32 - 5.0;
    let expected: Vec<f32> = (0..128 * 64)
        .map(|at| (0..320).map(|k| value(at / 64 * 320 + k, 7) * value(at % 64 * 320 + k, 5)).sum())
        .collect();
    let (kernel, start) = (gemm(Bug::None), std::time::Instant::now());
    let mut products = 0;
    for seed in 0..SEEDS {
        let (found, report) = run(&kernel, seed).unwrap_or_else(|fault| panic!("seed {seed}: {fault}"));
        assert_eq!(found, expected, "seed {seed}");
        products += report.matrix_instructions / 4;
    }
    println!("wgmma m64n64k16: {:.1} us each", start.elapsed().as_secs_f64() * 1e6 / products as f64);
}

/// The distinct kinds of faults over all seeds.
fn found(bug: Bug) -> Vec<FaultKind> {
    let kernel = gemm(bug);
    let mut kinds: Vec<FaultKind> = (0..SEEDS)
        .map(|seed| match run(&kernel, seed) {
            Ok(_) => panic!("seed {seed}: {bug:?} was not found"),
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
fn every_bug_is_reported() {
    for (bug, expected) in [
        (Bug::NoFullWait, &[FaultKind::Uninitialized, FaultKind::InFlight][..]),
        (Bug::NoEmptyWait, &[FaultKind::WrongArrivalCount]),
        (Bug::EarlyRelease, &[FaultKind::InFlight]),
        (Bug::NoRelease, &[FaultKind::Deadlock]),
        (Bug::ShortExpect, &[FaultKind::WrongTransactionCount]),
        (Bug::LongExpect, &[FaultKind::WrongTransactionCount]),
        (Bug::SwappedPhase, &[FaultKind::InFlight, FaultKind::Uninitialized, FaultKind::Deadlock]),
        (Bug::WrongCount, &[FaultKind::Deadlock]),
        (Bug::NoWgmmaWait, &[FaultKind::InFlight]),
    ] {
        let found = found(bug);
        assert!(found.iter().all(|kind| expected.contains(kind)), "{bug:?}: {found:?}");
    }
}
