//! The grids of FlashInfer's own tests (its `tests/attention/`), checked against the oracle instead of another kernel. All
//! values of adjacent axes occur in combination; only the largest products are subsampled.

use crate::{Expected, Generator, Lens, Sample, Storage, Stored, execute, run};
use tilewright::{
    Attention, Backend, Dtype, HeadDim, Heads, KvLayout, Mask, Problem, Workspace,
    attention::{
        Split, Variant,
        variant::{Alibi, AttentionSinks, Plain, RotaryEmbedding, SoftCap},
    },
    reference::{attention::Definition, variant as formula},
    rope::Rope,
};

/// One point of a grid.
#[derive(Debug, Clone)]
struct Point {
    lens: Vec<Lens>,
    storage: Storage,
    heads: (usize, usize),
    dim: usize,
    mask: Mask,
    layout: KvLayout,
    dtypes: (Dtype, Dtype),
}

impl Point {
    /// Requests of two groups of query heads with a causal mask.
    fn causal(page: usize, lens: Vec<Lens>) -> Self {
        let dtypes = (Dtype::Bf16, Dtype::Bf16);
        let (storage, layout) = (Storage::Paged(page), KvLayout::Nhd);
        Self { lens, storage, heads: (4, 2), dim: 64, mask: Mask::Causal, layout, dtypes }
    }

    fn problem(&self) -> Problem {
        let heads = Heads { qo: self.heads.0, kv: self.heads.1 };
        Problem::builder(heads, HeadDim::same(self.dim))
            .dtypes(self.dtypes.0, self.dtypes.1)
            .layout(self.layout)
            .mask(self.mask)
            .build()
            .expect("it is sound")
    }

    fn sample(&self) -> Sample {
        Sample::random(self.problem(), &self.lens, self.dim as u64)
    }

    fn judge<B: Backend + Clone, V: Variant + Clone>(
        &self,
        backends: &[B],
        variant: &V,
        definition: &dyn Fn() -> Definition<'static>,
    ) {
        self.judge_runs(1, backends, variant, definition);
    }

    /// Judges each of `runs` runs of one plan: a run must leave tickets and counters as they were.
    fn judge_runs<B: Backend + Clone, V: Variant + Clone>(
        &self,
        runs: usize,
        backends: &[B],
        variant: &V,
        definition: &dyn Fn() -> Definition<'static>,
    ) {
        let (problem, sample) = (self.problem(), self.sample());
        let stored = Stored::new(&sample, self.storage, 1);
        let expected = Expected::by(&sample, &|_| definition());
        for backend in backends {
            let attention =
                Attention::with_variant(problem, variant.clone(), backend.clone()).expect("it can");
            let plan = attention.plan_with(&stored.batch(), Split::Balanced).expect("the batch is sound");
            let workspace = &mut Workspace::default();
            for run in 0..runs {
                let outcome = execute(&attention, &plan, (&sample, stored.cache()), workspace);
                expected.assert(backend, &outcome, format_args!("run {run} of {self:?}"));
            }
        }
    }

    /// Asserts that two CTAs execute each run of the batch.
    fn assert_pairs<B: Backend + Clone>(&self, backends: &[B]) {
        let stored = Stored::new(&self.sample(), self.storage, 1);
        for backend in backends {
            let attention = Attention::new(self.problem(), backend.clone()).expect("it can");
            let plan = attention.plan(&stored.batch()).expect("the batch is sound");
            assert!(plan.explain().has_paired_runs, "{}", plan.explain());
        }
    }

    fn judge_plain<B: Backend + Clone>(&self, backends: &[B]) {
        self.judge(backends, &Plain, &Definition::default);
    }
}

/// Every `step`-th point of the grid `axes`, with an offset that differs between axes.
fn subsampled<const N: usize>(axes: [usize; N], step: usize) -> Vec<[usize; N]> {
    let total: usize = axes.iter().product();
    let point = |mut at: usize| {
        axes.map(|len| {
            let place = at % len;
            at /= len;
            place
        })
    };
    let mut generator = Generator::new(step as u64);
    let order = generator.permutation(total);
    order.into_iter().take(total.div_ceil(step)).map(point).collect()
}

const DTYPES: (Dtype, Dtype) = (Dtype::F16, Dtype::F16);

fn batch_decode<B: Backend + Clone>(backends: &[B]) {
    let (batches, kv, pages, qo_heads, dims) =
        ([12, 17], [54, 97, 512], [1, 8, 16], [4, 32], [128, 256, 512]);
    for [b, k, p, h, d, layout] in crate::judge::subset(subsampled([2, 3, 3, 2, 3, 2], 18)) {
        let mut generator = Generator::new(k as u64);
        let lens = (0..batches[b]).map(|_| (1, kv[k] - generator.below(20))).collect();
        let point = Point {
            lens,
            storage: Storage::Paged(pages[p]),
            heads: (qo_heads[h], 4),
            dim: dims[d],
            mask: Mask::Causal,
            layout: [KvLayout::Nhd, KvLayout::Hnd][layout],
            dtypes: DTYPES,
        };
        point.judge_plain(backends);
    }
}

fn batch_prefill<B: Backend + Clone>(backends: &[B]) {
    let (kv, qo, dims, qo_heads) = ([54, 97, 512], [37, 17, 127, 577], [64, 128, 256], [4, 8]);
    let storages = [Storage::Paged(1), Storage::Paged(5), Storage::Paged(16), Storage::Ragged];
    for [k, q, d, h, s, causal] in crate::judge::subset(subsampled([3, 4, 3, 2, 4, 2], 24)) {
        // few requests: FlashInfer uses 12 to 128 equal ones
        let point = Point {
            lens: vec![(qo[q], kv[k]); 2],
            storage: storages[s],
            heads: (qo_heads[h], 4),
            dim: dims[d],
            mask: [Mask::Full, Mask::Causal][causal],
            layout: KvLayout::Nhd,
            dtypes: DTYPES,
        };
        point.judge_plain(backends);
    }
}

fn single_prefill<B: Backend + Clone>(backends: &[B]) {
    let (kv, qo, heads, dims) = ([501, 2042], [37, 127, 577], [4, 7], [64, 128, 256]);
    for [k, q, h, d, causal] in crate::judge::subset(subsampled([2, 3, 2, 3, 2], 12)) {
        let point = Point {
            lens: vec![(qo[q], kv[k])],
            storage: Storage::Ragged,
            heads: (heads[h], 1),
            dim: dims[d],
            mask: [Mask::Full, Mask::Causal][causal],
            layout: KvLayout::Hnd,
            dtypes: (Dtype::Bf16, Dtype::Bf16),
        };
        point.judge_plain(backends);
    }
}

fn mixed_batches<B: Backend + Clone>(backends: &[B]) {
    // `test_batch_attention`, with shorter lengths; `(kv, qo)` there, `(qo, kv)` here
    let batches: [Vec<Lens>; 8] = [
        vec![(146, 146)],
        vec![(67, 67)],
        vec![(1, 2048); 7],
        vec![(129, 1025); 2],
        [vec![(1, 600); 26], vec![(3, 2500)]].concat(),
        [vec![(1, 1024); 10], vec![(17, 2048)]].concat(),
        [vec![(2, 766); 9], vec![(512, 1024)]].concat(),
        vec![(235, 2), (2677, 1)],
    ];
    let (pages, groups, dims) = ([1, 8, 16], [1, 4, 7, 8], [64, 128, 256]);
    for (number, lens) in crate::judge::subset(batches.iter().enumerate()) {
        let point = Point {
            lens: lens.clone(),
            storage: Storage::Paged(pages[number % 3]),
            heads: (groups[number % 4], 1),
            dim: dims[number % 3],
            mask: [Mask::Causal, Mask::Full][number / 4 % 2],
            layout: [KvLayout::Hnd, KvLayout::Nhd][number % 2],
            dtypes: [(Dtype::Bf16, Dtype::Bf16), (Dtype::F16, Dtype::F16)][number % 2],
        };
        point.judge_plain(backends);
        let cap = SoftCap::new(50.0).expect("it is above 0");
        point.judge(backends, &cap, &|| formula::soft_cap(50.0));
    }
}

/// Prompts, which Hopper computes in a kernel of their own, beside decode steps.
pub(super) fn prompts_beside_decode_steps<B: Backend + Clone>(backends: &[B]) {
    judge_twice(backends, 16, [vec![(150, 200)], vec![(1, 90); 5]].concat());
    judge_twice(backends, 1, vec![(1, 300), (40, 70), (2, 33)]);
}

/// Prompts without other items, which are long and enough for pairs of CTAs on Hopper.
pub(super) fn long_prompts_in_pairs<B: Backend + Clone>(backends: &[B], lens: Vec<Lens>) {
    judge_twice(backends, 16, lens).assert_pairs(backends);
}

/// Paired runs with a hook of logits, and with one of queries and keys, for which single CTAs of another body execute them.
pub(super) fn pairs_with_hooks<B: Backend + Clone>(backends: &[B], lens: Vec<Lens>) {
    let point = Point::causal(16, lens);
    point.assert_pairs(backends);
    let cap = SoftCap::new(50.0).expect("it is above 0");
    point.judge(backends, &cap, &|| formula::soft_cap(50.0));
    let rope = Rope::new(64, 1e4).expect("it is sound");
    let frequencies: &'static [f64] = Box::leak(rope.frequencies().into_boxed_slice());
    let variant = RotaryEmbedding::new(&rope).expect("it is sound");
    point.judge(backends, &variant, &|| formula::rotary_embedding(frequencies));
}

/// Type-checked alone: a CPU has no pairs.
const _: [fn(&[tilewright::Cpu], Vec<Lens>); 2] =
    [long_prompts_in_pairs::<tilewright::Cpu>, pairs_with_hooks::<tilewright::Cpu>];

/// Keys that are split among workers: merges leave their counters at 0.
pub(super) fn split_keys_twice<B: Backend + Clone>(backends: &[B]) {
    judge_twice(backends, 16, vec![(1, 900)]);
}

/// Two runs of a plan with one workspace.
fn judge_twice<B: Backend + Clone>(backends: &[B], page: usize, lens: Vec<Lens>) -> Point {
    let point = Point::causal(page, lens);
    point.judge_runs(2, backends, &Plain, &Definition::default);
    point
}

fn alibi_and_soft_cap<B: Backend + Clone>(backends: &[B]) {
    let lens = [1, 9, 17, 81, 729];
    for [q, k, h, d, causal] in crate::judge::subset(subsampled([4, 5, 3, 2, 2], 12)) {
        let (qo_heads, dim) = ([4, 8, 32][h], [128, 256][d]);
        let point = Point {
            lens: vec![(lens[q], lens[k])],
            storage: Storage::Ragged,
            heads: (qo_heads, qo_heads),
            dim,
            mask: [Mask::Full, Mask::Causal][causal],
            layout: KvLayout::Nhd,
            dtypes: DTYPES,
        };
        let slopes: &'static [f64] = Box::leak(formula::alibi_slopes(qo_heads).into_boxed_slice());
        point.judge(backends, &Alibi::new(qo_heads), &|| formula::alibi(slopes));
        let cap = [1.0, 30.0, 50.0][q % 3];
        let variant = SoftCap::new(cap).expect("it is above 0");
        point.judge(backends, &variant, &|| formula::soft_cap(f64::from(cap)));
    }
}

fn sliding_windows<B: Backend + Clone>(backends: &[B]) {
    let (batches, kv, windows) = ([1, 3, 13], [1, 3, 99, 199, 1999], [3, 13, 23, 33, 43, 533]);
    for [b, k, w, h, d, decode] in crate::judge::subset(subsampled([3, 5, 6, 2, 3, 2], 40)) {
        let qo_len = if decode == 1 { 1 } else { kv[k].min(37) };
        let point = Point {
            lens: vec![(qo_len, kv[k]); batches[b]],
            storage: Storage::Paged([1, 16][w % 2]),
            heads: ([4, 8][h], [1, 4][h]),
            dim: [64, 128, 256][d],
            mask: Mask::Window { left: windows[w], right: Some(0) },
            layout: KvLayout::Nhd,
            dtypes: DTYPES,
        };
        point.judge_plain(backends);
    }
}

fn sinks_and_rope<B: Backend + Clone>(backends: &[B]) {
    for [b, l, h, w, causal] in crate::judge::subset(subsampled([3, 4, 2, 2, 2], 16)) {
        let (batch, len) = ([1, 4, 16][b], [1, 4, 16, 128][l]);
        let left = [u32::MAX, 128][w];
        let point = Point {
            lens: vec![(len, len + 3); batch],
            storage: Storage::Paged(16),
            heads: (32, [8, 32][h]),
            dim: 64,
            mask: Mask::Window { left, right: [None, Some(0)][causal] },
            layout: KvLayout::Nhd,
            dtypes: (Dtype::Bf16, Dtype::Bf16),
        };
        let sinks: Vec<f32> = (0..32).map(|h| (h as f32 * 0.9).sin() * 3.0).collect();
        let wide: &'static [f64] = Box::leak(sinks.iter().map(|x| f64::from(*x)).collect());
        let variant = AttentionSinks::new(sinks).expect("they are finite");
        point.judge(backends, &variant, &|| formula::attention_sinks(wide));
        let rope = Rope::new(64, 1e4).expect("it is sound");
        let frequencies: &'static [f64] = Box::leak(rope.frequencies().into_boxed_slice());
        let variant = RotaryEmbedding::new(&rope).expect("it is sound");
        point.judge(backends, &variant, &|| formula::rotary_embedding(frequencies));
    }
}

fn deepseek_prefill<B: Backend + Clone>(backends: &[B]) {
    let lens = [(17, 17), (377, 544), (177, 977), (1, 0)];
    for (number, (qo_len, kv_len)) in crate::judge::subset(lens.into_iter().enumerate()) {
        let heads = Heads { qo: 4, kv: 4 };
        let problem = Problem::builder(heads, HeadDim { qk: 192, vo: 128 })
            .dtypes(Dtype::F16, Dtype::F16)
            .mask([Mask::Causal, Mask::Full][number % 2])
            .build()
            .expect("it is sound");
        let sample = Sample::random(problem, &[(qo_len, kv_len), (1, 5)], 3);
        let stored = Stored::new(&sample, Storage::Ragged, 0);
        let expected = Expected::of(&sample);
        for backend in backends {
            let outcome = run(backend, &sample, &stored, Split::Balanced);
            expected.assert(backend, &outcome, format_args!("{problem}"));
        }
    }
}

crate::judge_backends!(
    batch_decode,
    batch_prefill,
    single_prefill,
    mixed_batches,
    prompts_beside_decode_steps,
    split_keys_twice,
    alibi_and_soft_cap,
    sliding_windows,
    sinks_and_rope,
    deepseek_prefill
);
