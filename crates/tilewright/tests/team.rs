//! The thread team of the CPU backend: concurrent callers, more threads than cores, idle threads. A binary of its own, because one
//! test measures the CPU time of the process.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};
use tilewright::{Cpu, View, ViewMut, gemm::linear};

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
