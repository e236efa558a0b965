//! CPU backend: executes the same plans as the GPU backend on a thread pool.

mod activation;
mod append;
mod attention;
mod gather;
mod gemm;
mod norm;
mod parallel;
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
    Backend, Error, Result, View, ViewMut,
    activation::GatedActivation,
    attention::{
        Inputs, Output, Plan, Problem, StateMerge, Tiling,
        variant::{ExpressionVariant, Variant},
    },
    backend::Opaque,
    gather::RowGather,
    gemm::LinearLayer,
    kv::append::KvAppend,
    norm::RmsNorm,
    operator::on_host,
    rope::RotaryEmbedding,
    sampling::{
        ChainOutput, Choice, Drafts, Filter, LogitsEdit, Logprobs, Sampled, SamplingParams, Scores, TopK,
    },
    tensor::{DeviceMemory, check_on_host},
};
use std::sync::Arc;

/// Returns an error if one of the views is in device memory.
macro_rules! on_host {
    ($operator:literal, $($view:ident),+) => {
        check_on_host($operator, &[$((stringify!($view), $view.device())),+])?
    };
}

/// The CPU backend: a thread pool and the best vector instructions of the machine. Clones are cheap and share the pool.
#[derive(Debug, Clone)]
pub struct Cpu {
    pub(crate) pool: Arc<rayon::ThreadPool>,
    isa: Isa,
}

impl Cpu {
    /// One thread per hardware thread, and the best instruction set of the machine.
    pub fn new() -> Self {
        Self::with_threads(std::thread::available_parallelism().map_or(1, usize::from))
    }

    /// Exactly `threads` threads, at least one.
    ///
    /// # Panics
    /// When the operating system cannot create them.
    pub fn with_threads(threads: usize) -> Self {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads.max(1))
            .thread_name(|i| format!("tilewright-{i}"))
            .build()
            .expect("the operating system gives threads");
        let isa = Isa::available().last().copied().unwrap_or(Isa::Portable);
        Self { pool: Arc::new(pool), isa }
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
        self.pool.current_num_threads()
    }
}

impl Default for Cpu {
    fn default() -> Self {
        Self::new()
    }
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

    fn attention(&self, plan: &Plan, inputs: &Inputs<'_>, out: Output<'_>) -> Result<()> {
        check_attention_on_host("attention.run", inputs, &out)?;
        attention::run(self, plan, inputs, out)
    }

    fn merge_states(&self, operator: StateMerge<'_>) -> Result<()> {
        attention::merge_states(on_host(operator)?);
        Ok(())
    }

    fn linear(&self, operator: LinearLayer<'_>) -> Result<()> {
        gemm::linear(self, on_host(operator)?);
        Ok(())
    }

    fn append(&self, operator: KvAppend<'_>) -> Result<()> {
        append::append(on_host(operator)?);
        Ok(())
    }

    fn gather_rows(&self, operator: RowGather<'_>) -> Result<()> {
        gather::gather_rows(self, on_host(operator)?);
        Ok(())
    }

    fn rmsnorm(&self, operator: RmsNorm<'_>) -> Result<()> {
        norm::rmsnorm(self, on_host(operator)?);
        Ok(())
    }

    fn rope(&self, operator: RotaryEmbedding<'_>) -> Result<()> {
        rope::rope(self, on_host(operator)?);
        Ok(())
    }

    fn act_and_mul(&self, operator: GatedActivation<'_>) -> Result<()> {
        activation::act_and_mul(self, on_host(operator)?);
        Ok(())
    }

    fn softmax(&self, logits: View<'_>, temperature: &[f32], out: ViewMut<'_>) -> Result<()> {
        on_host!("sampling.softmax", logits, out);
        sampling::softmax(self, logits, temperature, out);
        Ok(())
    }

    fn filter(&self, filter: Filter<'_>, x: View<'_>, out: ViewMut<'_>) -> Result<()> {
        on_host!("sampling.filter", x, out);
        sampling::filter(self, filter, x, out);
        Ok(())
    }

    fn sample(&self, scores: Scores<'_>, params: &[SamplingParams], out: &mut [Sampled]) -> Result<()> {
        check_on_host("sampling.sample", &[("scores", scores.view().device())])?;
        sampling::sample(self, scores, params, out);
        Ok(())
    }

    fn distribution(&self, scores: Scores<'_>, params: &[SamplingParams], out: ViewMut<'_>) -> Result<()> {
        check_on_host("sampling.distribution", &[("scores", scores.view().device()), ("out", out.device())])?;
        sampling::distribution(self, scores, params, out);
        Ok(())
    }

    fn edit_logits(&self, edit: &LogitsEdit<'_>, logits: ViewMut<'_>) -> Result<()> {
        on_host!("sampling.edit_logits", logits);
        sampling::edit::run(self, edit, logits);
        Ok(())
    }

    fn top_k(&self, scores: View<'_>, top_k: TopK, values: ViewMut<'_>, indices: &mut [i32]) -> Result<()> {
        on_host!("sampling.top_k", scores, values);
        sampling::top_k::run(self, scores, top_k, values, indices);
        Ok(())
    }

    fn logprobs(
        &self,
        logits: View<'_>,
        params: &[SamplingParams],
        choices: &[Choice],
        out: &mut [Result<Logprobs>],
    ) -> Result<()> {
        on_host!("sampling.logprobs", logits);
        sampling::logprobs::run(self, logits, params, choices, out);
        Ok(())
    }

    fn chain_speculative_sampling(
        &self,
        drafts: Drafts<'_>,
        target: Scores<'_>,
        params: &[SamplingParams],
        out: ChainOutput<'_>,
    ) -> Result<()> {
        let devices = [("probs", drafts.probs.device()), ("target", target.view().device())];
        check_on_host("sampling.chain_speculative_sampling", &devices)?;
        sampling::speculative::run(self, drafts, target, params, out);
        Ok(())
    }
}

/// Returns an error if an input or output of attention is in device memory.
fn check_attention_on_host(operator: &'static str, inputs: &Inputs<'_>, out: &Output<'_>) -> Result<()> {
    let optional = |view: Option<View<'_>>| view.and_then(|view| view.device());
    let lse = out.lse.as_ref().and_then(ViewMut::device);
    let workspace = out.workspace.device().map(DeviceMemory::device_address);
    let devices = [
        ("q", inputs.q.0.device()),
        ("q.pe", optional(inputs.q.1)),
        ("k", inputs.k.0.device()),
        ("k.pe", optional(inputs.k_pe.map(|pe| pe.0))),
        ("v", inputs.v.0.device()),
        ("o", out.o.device()),
        ("lse", lse),
        ("workspace", workspace),
    ];
    check_on_host(operator, &devices)
}
