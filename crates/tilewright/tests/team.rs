//! The thread team of the CPU backend: concurrent callers, more threads than cores, idle threads. Allocations of runs and replans.
//! A binary of its own, because tests measure the CPU time and the allocations of the process.

use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use std::{
    alloc::System,
    sync::{Mutex, PoisonError},
    time::Duration,
};
use tilewright::{
    Attention, Batch, Cpu, Dtype, HeadDim, Heads, KvCache, Mask, Output, PageTable, Problem, View, ViewMut,
    Workspace,
    attention::{
        Capacity, Planner, Split, Tiling,
        variant::{Alibi, Both, Plain, SoftCap, Variant},
    },
    gemm::linear,
};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Held by each test: the machine has few cores, and one test measures idle time.
static ALONE: Mutex<()> = Mutex::new(());

const ROWS: usize = 40;
const INPUTS: usize = 200;
const FEATURES: usize = 1000;

/// A product of 63 tasks at 16 features each.
fn multiply(cpu: &Cpu) -> Vec<f32> {
    let numbers = |count: usize| (0..count).map(|i| (i * 7919 % 1013) as f32 / 1013.0).collect::<Vec<_>>();
    let (x, weight) = (numbers(ROWS * INPUTS), numbers(FEATURES * INPUTS));
    let mut out = vec![0.0; ROWS * FEATURES];
    let to = ViewMut::new(&mut out, &[ROWS, FEATURES]).expect("it fits");
    let (x, weight) = (View::new(&x, &[ROWS, INPUTS]), View::new(&weight, &[FEATURES, INPUTS]));
    linear(cpu, x.expect("it fits"), weight.expect("it fits"), None, to).expect("it fits");
    out
}

#[test]
fn callers_on_several_threads_share_a_team() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let cpu = Cpu::with_threads(3).expect("3 threads");
    let expected = multiply(&Cpu::with_threads(1).expect("1 thread"));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let (cpu, expected) = (cpu.clone(), &expected);
            scope.spawn(move || (0..50).for_each(|_| assert!(multiply(&cpu) == *expected, "the same bits")));
        }
    });
}

#[test]
fn more_threads_than_cores_compute_the_same() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let expected = multiply(&Cpu::with_threads(1).expect("1 thread"));
    for threads in [2, 5, 64] {
        let cpu = Cpu::with_threads(threads).expect("threads");
        assert_eq!(cpu.threads(), threads);
        (0..20).for_each(|_| assert!(multiply(&cpu) == expected, "{threads} threads"));
    }
}

/// Nanoseconds on a CPU of all threads of this process.
#[cfg(target_os = "linux")]
fn cpu_time() -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").expect("Linux has it");
    let times = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("schedstat")).ok());
    times.filter_map(|text| text.split_whitespace().next()?.parse::<u64>().ok()).sum()
}

#[test]
#[cfg(target_os = "linux")]
fn an_idle_team_uses_no_cpu() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let cpu = Cpu::with_threads(4).expect("4 threads");
    let idle = Duration::from_millis(400);
    for _ in 0..3 {
        multiply(&cpu);
        // longer than a thread spins, also on a busy machine
        std::thread::sleep(Duration::from_millis(100));
        let start = cpu_time();
        std::thread::sleep(idle);
        let used = Duration::from_nanos(cpu_time() - start);
        assert!(used < idle / 100, "an idle team used {used:?} in {idle:?}");
    }
}

/// Heap calls of a run of decode and prefill, with partial states of split keys: the minimum of many runs, because the test harness
/// allocates too.
fn allocations(cpu: &Cpu, variant: impl Variant) -> usize {
    const PAGES: usize = 40;
    let problem = Problem::builder(Heads { qo: 4, kv: 2 }, HeadDim::same(64)).mask(Mask::Causal);
    let attention =
        Attention::with_variant(problem.build().expect("valid"), variant, cpu.clone()).expect("valid");
    let indices: Vec<i32> = (0..PAGES as i32).collect();
    let table = PageTable::new(&[0, 30, 40], &indices, &[16, 16], 16);
    let split = Split::Fixed { tokens: 64 };
    let plan = attention.plan_with(&Batch::paged(&[0, 1, 33], table), split).expect("valid");
    let mut workspace = Workspace::for_plan(&plan);
    let (q, mut o) = (vec![0.1; 33 * 4 * 64], vec![0.0; 33 * 4 * 64]);
    let (kv, shape) = (vec![0.2; PAGES * 16 * 2 * 64], [PAGES, 16, 2, 64]);
    let mut run = || {
        let kv = View::new(&kv, &shape).expect("it fits");
        let out = ViewMut::new(&mut o, &[33, 4, 64]).expect("it fits");
        let out = Output { o: out, lse: None, workspace: &mut workspace };
        let q = View::new(&q, &[33, 4, 64]).expect("it fits");
        let region = Region::new(ALLOCATOR);
        attention.run(&plan, q, KvCache { k: kv, v: kv }, out).expect("valid");
        let calls = region.change();
        calls.allocations + calls.reallocations + calls.deallocations
    };
    (0..20).map(|_| run()).min().unwrap_or_default()
}

#[test]
fn runs_of_attention_do_not_allocate() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    for threads in [1, 3] {
        let cpu = Cpu::with_threads(threads).expect("threads");
        let hooked = Both::new(Alibi::new(4), SoftCap::new(30.0).expect("valid"));
        let found = [allocations(&cpu, Plain), allocations(&cpu, hooked)];
        assert_eq!(found, [0, 0], "{threads} threads, without and with hooks");
    }
}

#[test]
fn replans_within_a_capacity_do_not_allocate() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let problem = Problem::builder(Heads { qo: 4, kv: 2 }, HeadDim::same(64)).build().expect("valid");
    let tiling = Tiling {
        q_rows: 16,
        kv_heads: 1,
        kv_tokens: 64,
        segment_overhead: 1,
        cut_overhead: 1,
        tile_load: 4,
        workers: 16,
        shares: 16,
        scratch: 0,
        weights: Dtype::F32,
        many_rows: None,
    };
    let planner = Planner::new(problem, tiling);
    let indices: Vec<i32> = (0..40).collect();
    let table = PageTable::new(&[0, 30, 40], &indices, &[16, 16], 16);
    let empty = Batch::paged(&[0], PageTable::new(&[0], &indices[..0], &indices[..0], 16));
    for split in [Split::Balanced, Split::Never, Split::Fixed { tokens: 64 }] {
        // the minimum of many first replans, because the test harness allocates too
        let replan = || {
            let mut plan =
                planner.plan_with_capacity(&Capacity::new(2, 33, 40), &empty, split).expect("valid");
            let region = Region::new(ALLOCATOR);
            planner.replan(&mut plan, &Batch::paged(&[0, 1, 33], table)).expect("it fits");
            let calls = region.change();
            calls.allocations + calls.reallocations + calls.deallocations
        };
        assert_eq!((0..20).map(|_| replan()).min(), Some(0), "{split}");
    }
}
