//! CPU backend: executes the same plans as the GPU backend on a team of threads.

mod activation;
mod attention;
mod elementwise;
mod gather;
mod gemm;
mod kv;
mod norm;
mod quantization;
mod roofline;
mod rope;
mod sampling;
pub(crate) mod simd;
mod threshold;
mod trial;

pub use simd::Isa;
#[cfg(target_arch = "x86_64")]
#[doc(hidden)]
pub use simd::avx512::convert_e4m3;
pub use trial::Trial;

use crate::{
    Backend, Error, Opaque, Problem, Result, View,
    attention::{
        AttentionRun, Tiling,
        variant::{ExpressionVariant, Variant},
    },
    gemm::{PackedMatrix, WeightFormat},
    operator::on_host,
};
use simd::team::{Team, lock};
use std::sync::{Arc, Mutex};

/// Maximum threads of the CPU backend.
const MAX_THREADS: usize = 1024;
/// Elements that one thread processes before another would have joined.
const MIN_PARALLEL_ELEMENTS: usize = 1 << 14;
/// Tasks per thread of [`Cpu::each_row`], so that other threads take over those of a delayed thread.
const TASKS_PER_THREAD: usize = 4;

/// The CPU backend: a team of threads and the best vector instructions of the machine. Clones are cheap and share the team.
#[derive(Debug, Clone)]
pub struct Cpu {
    team: Arc<Team>,
    isa: Isa,
}

impl Cpu {
    /// One thread per hardware thread, and the best instruction set of the machine.
    ///
    /// # Panics
    /// When the operating system cannot create the threads.
    pub fn new() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Self::with_threads(threads.min(MAX_THREADS)).expect("the operating system gives threads")
    }

    /// Exactly `threads` threads, from 1 to 1,024, the calling one included. Idle threads sleep.
    ///
    /// # Errors
    /// When the number is out of range, or the operating system cannot create them.
    pub fn with_threads(threads: usize) -> Result<Self> {
        const OPERATOR: &str = "cpu.with_threads";
        crate::ensure!(
            (1..=MAX_THREADS).contains(&threads),
            OPERATOR,
            "threads = {threads} is not in 1..={MAX_THREADS}"
        );
        let team = Team::new(threads)
            .map_err(|error| Error::new(OPERATOR, format!("threads = {threads}: {error}")))?;
        let isa = Isa::available().last().copied().unwrap_or(Isa::Portable);
        Ok(Self { team: Arc::new(team), isa })
    }

    /// Same threads with another instruction set, for tests and comparisons.
    ///
    /// # Errors
    /// When this machine does not have it.
    pub fn with_isa(mut self, isa: Isa) -> Result<Self> {
        if !isa.is_available() {
            let available: Vec<String> = Isa::available().iter().map(Isa::to_string).collect();
            let text = format!("this machine has no {isa}, it has {}", available.join(", "));
            return Err(Error::new("cpu.with_isa", text));
        }
        self.isa = isa;
        Ok(self)
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// The number of threads.
    pub fn threads(&self) -> usize {
        self.team.threads()
    }

    /// Runs `work(scratch, row, item)` for every item, a row of `width` elements.
    ///
    /// One thread processes a row, so results do not depend on the number of threads or on other rows. `work` must write to
    /// `scratch` before reading it.
    pub(crate) fn each_row<I: Send, S: Send>(
        &self,
        mut items: Vec<I>,
        width: usize,
        scratch: impl Fn() -> S + Sync,
        work: impl Fn(&mut S, usize, &mut I) + Sync,
    ) {
        let rows_per_task = self.rows_per_task(items.len(), width);
        let tasks = items.len().div_ceil(rows_per_task);
        let chunks = Mutex::new(items.chunks_mut(rows_per_task).enumerate());
        let scratches = Mutex::new(Vec::new());
        self.run_tasks(tasks, &|| {
            let Some((task, items)) = lock(&chunks).next() else { return };
            let unused = lock(&scratches).pop();
            let mut of_task = unused.unwrap_or_else(&scratch);
            for (row, item) in (task * rows_per_task..).zip(items) {
                work(&mut of_task, row, item);
            }
            lock(&scratches).push(of_task);
        });
    }

    /// Rows per task: all, if they are too few for a second thread.
    fn rows_per_task(&self, rows: usize, width: usize) -> usize {
        let parallel = rows * width > MIN_PARALLEL_ELEMENTS;
        let tasks = if parallel { self.threads() * TASKS_PER_THREAD } else { 1 };
        rows.div_ceil(tasks).max(1)
    }

    /// Calls `task` `count` times, shared by the threads. Not generic, because most operators have a task per dtype.
    fn run_tasks(&self, count: usize, task: &(dyn Fn() + Sync)) {
        if count == 1 {
            return task();
        }
        self.team.run(count, &|indices| indices.for_each(|_| task()));
    }

    /// Calls `work` for each index in `0..count` on at most one thread per state in `states`, including the calling thread.
    ///
    /// Threads fetch the next index dynamically, which balances the load if one is delayed.
    pub(crate) fn for_each<W: Send>(
        &self,
        count: usize,
        states: impl Iterator<Item = W> + Send,
        work: impl Fn(usize, &mut W) + Sync,
    ) {
        let states = Mutex::new(states.take(count.min(self.threads())));
        self.team.run(count, &|indices| {
            let state = lock(&states).next();
            let Some(mut state) = state else { return };
            indices.for_each(|at| work(at, &mut state));
        });
    }
}

impl Default for Cpu {
    fn default() -> Self {
        Self::new()
    }
}

/// Implements the method of each operator: checks that its tensors are on the host, then calls the function with the name of the
/// method in the module with the name of the operator's module.
macro_rules! execute {
    ($($method:ident: $($module:ident)::+, $Operator:ident;)+) => {$(
        fn $method(&self, operator: crate::$($module::)+$Operator<'_>) -> Result<()> {
            $($module::)+$method(self, on_host(operator)?);
            Ok(())
        }
    )+};
}

impl Backend for Cpu {
    fn describe(&self) -> String {
        match self.threads() {
            1 => format!("cpu: 1 thread, {}", self.isa),
            threads => format!("cpu: {threads} threads, {}", self.isa),
        }
    }

    fn tiling(&self, problem: &Problem) -> Result<Tiling> {
        attention::tiling(self, problem)
    }

    fn build<V: Variant>(
        &self,
        problem: &Problem,
        variant: V,
        recorded: &ExpressionVariant,
    ) -> Result<Option<Opaque>> {
        Ok(Some(attention::build(problem, variant, recorded)))
    }

    fn prepare(&self, plan: &crate::Plan, _previous: Option<Opaque>) -> Result<Option<Opaque>> {
        plan.requests().source.check_on_host("attention.plan", "")?;
        plan.requests().mask.check_on_host("attention.plan")?;
        Ok(None)
    }

    fn attention(&self, operator: AttentionRun<'_>) -> Result<()> {
        operator.plan.requests().source.check_on_host("attention.run", "")?;
        operator.plan.requests().mask.check_on_host("attention.run")?;
        attention::run(self, on_host(operator)?)
    }

    fn pack(&self, weight: View<'_>, format: WeightFormat) -> Result<Option<PackedMatrix>> {
        gemm::pack(self, weight, format).map(Some)
    }

    crate::for_each_operator!(execute);
    execute! {
        packed_linear: gemm, PackedLinear;
        gated_linear: gemm, GatedLinear;
    }
}
