//! Runs a stored sample on a backend. The output is filled with NaN beforehand.

use crate::{elements::Elements, judge::Outcome, sample::Sample, storage::Stored};
use tilewright::{
    Attention, Backend, Batch, Dtype, KvCache, Output, Plan, Result, View, Workspace,
    attention::{Split, Variant, variant::Plain},
    kv::{KvScales, QuantizedCache},
};

/// Plans and runs with its own workspace.
pub(crate) fn run<B: Backend + Clone>(
    backend: &B,
    sample: &Sample,
    stored: &Stored,
    split: Split,
) -> Outcome {
    run_with(backend, sample, stored, split, &mut Workspace::default())
}

/// Plans and runs with a workspace of arbitrary contents.
pub(crate) fn run_with<B: Backend + Clone>(
    backend: &B,
    sample: &Sample,
    stored: &Stored,
    split: Split,
    workspace: &mut Workspace,
) -> Outcome {
    run_batch((backend, Plain), (sample, &stored.batch(), stored.cache()), split, workspace)
}

/// Plans and runs a batch of `sample` with a variant.
pub(crate) fn run_batch<B: Backend + Clone>(
    (backend, variant): (&B, impl Variant),
    (sample, batch, cache): (&Sample, &Batch<'_>, KvCache<'_>),
    split: Split,
    workspace: &mut Workspace,
) -> Outcome {
    let attention = Attention::with_variant(sample.problem, variant, backend.clone());
    let attention = attention.expect("the backend can do it");
    let plan = attention.plan_with(batch, split).expect("the batch is sound");
    execute(&attention, &plan, (sample, cache), workspace)
}

/// Runs a plan with a workspace of arbitrary contents.
pub(crate) fn execute<B: Backend>(
    attention: &Attention<B>,
    plan: &Plan,
    (sample, cache): (&Sample, KvCache<'_>),
    workspace: &mut Workspace,
) -> Outcome {
    execute_scaled(attention, plan, (sample, cache, KvScales::default()), workspace)
}

/// [`execute`] over a cache with scales.
pub(crate) fn execute_scaled<B: Backend>(
    attention: &Attention<B>,
    plan: &Plan,
    (sample, cache, scales): (&Sample, KvCache<'_>, KvScales<'_>),
    workspace: &mut Workspace,
) -> Outcome {
    let run =
        |q: View<'_>, out: Output<'_>| attention.run_scaled(plan, q, QuantizedCache { cache, scales }, out);
    outcome_of(attention, (plan, sample), run, workspace)
}

/// [`execute`] with tables of the variant.
pub(crate) fn execute_bound<B: Backend>(
    attention: &Attention<B>,
    plan: &Plan,
    (sample, cache, tables): (&Sample, KvCache<'_>, &[(&str, View<'_>)]),
) -> Outcome {
    let cache = QuantizedCache { cache, scales: KvScales::default() };
    let run = |q: View<'_>, out: Output<'_>| attention.bind(tables).run_scaled(plan, q, cache, out);
    outcome_of(attention, (plan, sample), run, &mut Workspace::default())
}

fn outcome_of<B: Backend>(
    attention: &Attention<B>,
    (plan, sample): (&Plan, &Sample),
    run: impl FnOnce(View<'_>, Output<'_>) -> Result<()>,
    workspace: &mut Workspace,
) -> Outcome {
    let problem = sample.problem;
    let (rows, heads, dim) = (sample.num_rows(), problem.heads().qo, problem.head_dim());
    workspace.fit(plan);
    let q = Elements::new(problem.dtype_q(), &sample.q);
    let mut o = Elements::filled(problem.dtype_out(), rows * heads * dim.vo, f32::NAN);
    let has_lse = attention.has_lse();
    let mut lse = Elements::filled(Dtype::F32, rows * heads, f32::NAN);
    let out = Output {
        o: o.view_mut(&[rows, heads, dim.vo]),
        lse: has_lse.then(|| lse.view_mut(&[rows, heads])),
        workspace,
    };
    let q = q.view(&[rows, heads, dim.qk]);
    run(q, out).expect("the tensors fit");
    let weights = attention.weights_dtype();
    Outcome { o: o.to_f32(), lse: has_lse.then(|| lse.to_f32()), weights }
}

/// Fills the workspace of a run of `sample` with NaN: NaN queries make every logit, weight and partial state NaN.
pub(crate) fn poison<B: Backend + Clone>(
    backend: &B,
    sample: &Sample,
    stored: &Stored,
    workspace: &mut Workspace,
) {
    let nan = |values: &[f32]| vec![f32::NAN; values.len()];
    let mut poisoned = sample.clone();
    poisoned.q = nan(&sample.q);
    run_with(backend, &poisoned, stored, Split::Fixed { tokens: 1 }, workspace);
}
